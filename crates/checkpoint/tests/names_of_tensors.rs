//! Names of tensors as people save them: with a prefix, without that of the base model, with the components
//! of wrappers; and names that do not agree with each other.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::collections::BTreeMap;
use std::path::Path;

use messages::assert_message;
use xtrain_checkpoint::hf::{
    NameEntry, NameMap, NamePart, TiedName, WholeName, check, import, lossless_dtype,
};
use xtrain_checkpoint::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter};

/// Two blocks with two experts each, which a folder may hold as one tensor.
fn names(tied: bool) -> NameMap {
    let entry = |name: &str, shape: [usize; 2], parts: &[&str]| NameEntry {
        name: name.to_owned(),
        shape: shape.to_vec(),
        parts: (parts.iter())
            .map(|hf_name| NamePart { hf_name: hf_name.to_string(), rows: shape[0] / parts.len() })
            .collect(),
        fp8: None,
    };
    let mut map = NameMap { base: "model.".into(), ..NameMap::default() };
    map.entries.push(entry("embed", [4, 2], &["model.embed_tokens.weight"]));
    for block in 0..2 {
        let theirs = |module: &str| format!("model.layers.{block}.{module}.weight");
        map.entries.push(entry(&format!("{block}.norm"), [1, 2], &[&theirs("input_layernorm")]));
        let experts = [0, 1].map(|expert| theirs(&format!("mlp.experts.{expert}.up_proj")));
        map.entries.push(entry(&format!("{block}.up"), [6, 2], &[&experts[0], &experts[1]]));
        let hf_name = format!("model.layers.{block}.mlp.experts.up_proj");
        map.whole.push(WholeName { entry: format!("{block}.up"), hf_name, shape: vec![2, 3, 2] });
    }
    match tied {
        true => map
            .tied
            .push(TiedName { hf_name: "lm_head.weight".into(), same_as: "model.embed_tokens.weight".into() }),
        false => map.entries.push(entry("head", [4, 2], &["lm_head.weight"])),
    }
    map.ignorable_suffixes.push("rotary_emb.inv_freq".into());
    map
}

/// Writes a file of tensors whose elements are all the number of the tensor, from 1.
fn write(folder: &Path, tensors: &[(String, Vec<usize>)]) {
    let layout: Vec<StoredTensor> = (tensors.iter())
        .map(|(name, shape)| StoredTensor {
            name: name.clone(),
            dtype: StoredDtype::F32,
            shape: shape.clone(),
        })
        .collect();
    let mut file = TensorFileWriter::create(&folder.join("model.safetensors"), &layout, &[]).unwrap();
    for (number, tensor) in layout.iter().enumerate() {
        let value = (number + 1) as f32;
        file.write(&value.to_le_bytes().repeat(tensor.shape.iter().product())).unwrap();
    }
    file.finish().unwrap();
}

/// The tensors of the map by their standard names, experts one by one or as a whole.
fn tensors(map: &NameMap, whole: bool) -> Vec<(String, Vec<usize>)> {
    let mut all = Vec::new();
    for entry in &map.entries {
        match map.whole.iter().find(|found| whole && found.entry == entry.name) {
            Some(found) => all.push((found.hf_name.clone(), found.shape.clone())),
            None => all.extend(entry.parts.iter().map(|part| (part.hf_name.clone(), vec![part.rows, 2]))),
        }
    }
    all
}

fn read(folder: &Path, map: &NameMap) -> Result<BTreeMap<String, Vec<f32>>, String> {
    let mut found = BTreeMap::new();
    import(folder, map, &mut |name, values| {
        found.insert(name.to_owned(), values.to_vec());
        Ok(())
    })
    .map_err(|error| error.to_string())?;
    Ok(found)
}

/// The values of a folder whose names are changed; `None` if the standard names do not give the same.
fn renamed(tied: bool, whole: bool, rename: impl Fn(&str) -> String) -> Result<(), String> {
    let map = names(tied);
    let dir = tempfile::tempdir().unwrap();
    let standard = tensors(&map, whole);
    write(dir.path(), &standard);
    let expected = read(dir.path(), &map).expect("standard names");
    let other: Vec<_> = standard.iter().map(|(name, shape)| (rename(name), shape.clone())).collect();
    write(dir.path(), &other);
    check(dir.path(), &map).map_err(|error| error.to_string())?;
    assert_eq!(read(dir.path(), &map)?, expected);
    lossless_dtype(dir.path(), &map).map_err(|error| error.to_string())?;
    Ok(())
}

#[test]
fn names_with_one_prefix_or_without_that_of_the_base_model_are_read() {
    let without = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    let wrapped = |name: &str| name.replace(".mlp.", "._checkpoint_wrapped_module.mlp.");
    let renames: [(&str, &dyn Fn(&str) -> String); 17] = [
        ("as they are", &|name| name.to_owned()),
        ("the base model", &without),
        ("torch.compile", &|name| format!("_orig_mod.{name}")),
        ("DDP", &|name| format!("module.{name}")),
        ("DDP of torch.compile", &|name| format!("module._orig_mod.{name}")),
        ("torch.compile of DDP", &|name| format!("_orig_mod.module.{name}")),
        ("torch.compile of the base model", &|name| format!("_orig_mod.{}", without(name))),
        ("DDP of the base model", &|name| format!("module.{}", without(name))),
        ("the inner model compiled", &|name| name.replace("model.", "model._orig_mod.")),
        ("FSDP", &|name| format!("_fsdp_wrapped_module.{}", name.replace("mlp", "_fsdp_wrapped_module.mlp"))),
        ("checkpoints of activations", &wrapped),
        ("each block compiled", &|name| name.replace(".mlp.", "._orig_mod.mlp.")),
        ("a model in a model", &|name| format!("model.{name}")),
        ("a model in a model, the head outside", &|name| {
            if name.starts_with("lm_head") { name.to_owned() } else { format!("model.{name}") }
        }),
        ("peft, merged", &|name| format!("base_model.model.{name}")),
        ("a part of another model", &|name| format!("student.language_model.{}", without(name))),
        ("a part of a part", &|name| format!("student.language_model.{name}")),
    ];
    for (case, rename) in renames {
        for (tied, whole) in [(false, false), (true, false), (false, true), (true, true)] {
            renamed(tied, whole, rename).unwrap_or_else(|error| panic!("{case}, tied {tied}: {error}"));
        }
    }
}

#[test]
fn tensors_that_are_ignored_or_repeated_may_have_the_prefix_too() {
    let map = names(true);
    let dir = tempfile::tempdir().unwrap();
    let mut all = tensors(&map, false);
    all.push(("model.layers.0.self_attn.rotary_emb.inv_freq".into(), vec![2]));
    all.remove(0);
    all.push(("lm_head.weight".into(), vec![4, 2]));
    all.iter_mut().for_each(|(name, _)| name.insert_str(0, "_orig_mod."));
    write(dir.path(), &all);
    let found = read(dir.path(), &map).expect("the head alone, in place of the embedding");
    assert_eq!(found["embed"], vec![all.len() as f32; 8]);
}

#[test]
fn names_that_do_not_agree_are_refused_with_two_of_them() {
    let without = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
    let second = |name: &str| name.contains("layers.1");
    let mixtures: [(&str, &dyn Fn(&str) -> String); 5] = [
        ("compiled and not", &|name| {
            if second(name) { format!("_orig_mod.{name}") } else { name.to_owned() }
        }),
        ("two wrappers", &|name| format!("{}{name}", if second(name) { "_orig_mod." } else { "module." })),
        ("with and without the base", &|name| if second(name) { without(name) } else { name.to_owned() }),
        ("without and with the base", &|name| if second(name) { name.to_owned() } else { without(name) }),
        ("two prefixes", &|name| format!("{}.{name}", if second(name) { "teacher" } else { "student" })),
    ];
    for (case, rename) in mixtures {
        let error = renamed(false, false, rename).expect_err(case);
        assert!(error.contains("different prefixes: '") && error.contains("layers.1"), "{case}: {error}");
    }
}

#[test]
fn the_same_tensor_under_two_names_is_refused() {
    let map = names(false);
    let dir = tempfile::tempdir().unwrap();
    let mut all = tensors(&map, false);
    let wrapped =
        |(name, shape): &(String, Vec<usize>)| (name.replace("mlp", "_orig_mod.mlp"), shape.clone());
    let copies: Vec<_> = all.iter().filter(|(name, _)| name.contains("mlp")).map(wrapped).collect();
    all.extend(copies);
    write(dir.path(), &all);
    let error = read(dir.path(), &map).expect_err("two copies");
    assert_message("the same tensor under two names is refused", &error);
}

#[test]
fn a_copy_beside_the_model_has_no_place_in_it() {
    let map = names(false);
    let dir = tempfile::tempdir().unwrap();
    let mut all = tensors(&map, false);
    all.push(("mtp.layers.0.input_layernorm.weight".into(), vec![1, 2]));
    write(dir.path(), &all);
    let error = read(dir.path(), &map).expect_err("a layer too many");
    assert_message("a copy beside the model has no place in it", &error);
}

#[test]
fn a_missing_head_says_what_to_do() {
    let map = names(false);
    let dir = tempfile::tempdir().unwrap();
    let mut all = tensors(&map, false);
    all.pop();
    write(dir.path(), &all);
    let error = read(dir.path(), &map).expect_err("no head");
    assert_message("a missing head says what to do", &error);
}

#[test]
fn an_adapter_that_is_not_merged_is_named() {
    let map = names(false);
    for name in [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.base_layer.weight",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let mut all = tensors(&map, false);
        all.push((name.into(), vec![1, 2]));
        write(dir.path(), &all);
        let error = read(dir.path(), &map).expect_err("an adapter");
        assert!(error.contains("adapter (LoRA)") && error.contains("merge it"), "{error}");
    }
}
