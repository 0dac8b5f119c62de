//! Export and import of Hugging Face folders by a name map, and the errors for folders that do not match it.

#[path = "../../../tests/messages.rs"]
mod messages;

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use messages::assert_message;
use proptest::prelude::*;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::json;
use xtrain_checkpoint::CheckpointError;
use xtrain_checkpoint::hf::{
    ExportDtype, ExportOptions, NameEntry, NameMap, NamePart, TiedName, export, import, lossless_dtype,
};
use xtrain_checkpoint::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter};

type Tensors = HashMap<String, Vec<f32>>;

fn entry(name: &str, shape: &[usize], parts: &[(&str, usize)]) -> NameEntry {
    let parts =
        parts.iter().map(|(hf_name, rows)| NamePart { hf_name: hf_name.to_string(), rows: *rows }).collect();
    NameEntry { name: name.to_string(), shape: shape.to_vec(), parts, fp8: None }
}

/// A small model with a fused QKV, a scalar, an empty tensor and a tied head.
fn names() -> NameMap {
    NameMap {
        entries: vec![
            entry("embed", &[5, 3], &[("model.embed_tokens.weight", 5)]),
            entry("qkv", &[7, 3], &[("model.q.weight", 4), ("model.k.weight", 2), ("model.v.weight", 1)]),
            entry("norm", &[3], &[("model.norm.weight", 3)]),
            entry("scale", &[], &[("model.scale", 1)]),
            entry("none", &[0, 3], &[("model.none", 0)]),
        ],
        tied: vec![TiedName {
            hf_name: "lm_head.weight".to_string(),
            same_as: "model.embed_tokens.weight".to_string(),
        }],
        ignorable_suffixes: vec!["rotary_emb.inv_freq".to_string()],
        ..NameMap::default()
    }
}

fn values(seed: u32) -> Tensors {
    let numel = |entry: &NameEntry| entry.shape.iter().product::<usize>();
    let one = |entry: &NameEntry| {
        let mut state = seed ^ numel(entry) as u32;
        let mut next = || {
            state = state.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
            let bits = state ^ (state >> 15);
            // Finite, and not too large for bf16.
            f32::from_bits(if bits >> 23 & 0xFF >= 0xFE { bits ^ 1 << 30 } else { bits })
        };
        (entry.name.clone(), (0..numel(entry)).map(|_| next()).collect())
    };
    names().entries.iter().map(one).collect()
}

fn options(dtype: ExportDtype, max_shard_bytes: u64) -> ExportOptions {
    ExportOptions { dtype, max_shard_bytes, ..ExportOptions::default() }
}

fn export_to(folder: &Path, tensors: &Tensors, options: &ExportOptions) -> Result<(), CheckpointError> {
    let config = ("config.json".to_string(), b"{}".to_vec());
    export(folder, &names(), &mut |name| Ok(tensors[name].clone()), &[config], options)
}

fn import_from(folder: &Path, names: &NameMap) -> Result<Tensors, CheckpointError> {
    let mut tensors = HashMap::new();
    import(folder, names, &mut |name, values| {
        assert!(tensors.insert(name.to_string(), values.to_vec()).is_none());
        Ok(())
    })?;
    Ok(tensors)
}

fn bits(tensors: &Tensors) -> HashMap<&str, Vec<u32>> {
    tensors
        .iter()
        .map(|(name, values)| (name.as_str(), values.iter().map(|x| x.to_bits()).collect()))
        .collect()
}

/// Writes a safetensors file of tensors whose bytes are all `value`.
fn write_file(path: &Path, tensors: &[(&str, &[usize])], dtype: StoredDtype, value: u8) {
    let layout: Vec<StoredTensor> = tensors
        .iter()
        .map(|(name, shape)| StoredTensor { name: name.to_string(), dtype, shape: shape.to_vec() })
        .collect();
    let mut writer = TensorFileWriter::create(path, &layout, &[]).unwrap();
    for tensor in &layout {
        let bytes = tensor.shape.iter().product::<usize>() * dtype.bitsize() / 8;
        writer.write(&vec![value; bytes]).unwrap();
    }
    writer.finish().unwrap();
}

const ALL_TENSORS: [(&str, &[usize]); 7] = [
    ("model.embed_tokens.weight", &[5, 3]),
    ("model.q.weight", &[4, 3]),
    ("model.k.weight", &[2, 3]),
    ("model.v.weight", &[1, 3]),
    ("model.norm.weight", &[3]),
    ("model.scale", &[]),
    ("model.none", &[0, 3]),
];

/// The error message for a folder with one file of `tensors`.
fn import_error(tensors: &[(&str, &[usize])], dtype: StoredDtype) -> String {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir.path().join("model.safetensors"), tensors, dtype, 0);
    let mut calls = 0;
    let error = import(dir.path(), &names(), &mut |_, _| {
        calls += 1;
        Ok(())
    })
    .unwrap_err();
    assert_eq!(calls, 0, "the sink is called only after all checks");
    assert!(error.is_users());
    error.to_string()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn f32_round_trips_to_the_bit_in_any_number_of_shards(seed: u32, max_shard_bytes in 0u64..300) {
        let dir = tempfile::tempdir()?;
        let folder = dir.path().join("a/b/model");
        let tensors = values(seed);
        export_to(&folder, &tensors, &options(ExportDtype::Fp32, max_shard_bytes)).unwrap();
        let found = import_from(&folder, &names()).unwrap();
        prop_assert_eq!(bits(&found), bits(&tensors));
        prop_assert_eq!(fs::read(folder.join("config.json"))?, b"{}");
        let shards = fs::read_dir(&folder)?.flatten().filter(|e| e.path().extension().unwrap() == "safetensors");
        let index = folder.join("model.safetensors.index.json");
        prop_assert_eq!(shards.count() > 1, index.exists());
        prop_assert_eq!(!index.exists(), folder.join("model.safetensors").exists());
        if index.exists() {
            let index: serde_json::Value = serde_json::from_slice(&fs::read(index)?)?;
            prop_assert_eq!(&index["metadata"]["total_size"], (5 * 3 + 7 * 3 + 3 + 1) * 4);
            prop_assert_eq!(index["weight_map"].as_object().unwrap().len(), 7);
        }
        prop_assert_eq!(fs::read_dir(dir.path().join("a/b"))?.count(), 1, "nothing else remains");
    }

    #[test]
    fn bf16_round_trips_rounded_to_nearest_even(seed: u32) {
        let dir = tempfile::tempdir()?;
        let folder = dir.path().join("model");
        let tensors = values(seed);
        export_to(&folder, &tensors, &options(ExportDtype::Bf16, 40)).unwrap();
        for (name, values) in import_from(&folder, &names()).unwrap() {
            for (found, value) in values.iter().zip(&tensors[&name]) {
                let expected = half::bf16::from_f32(*value).to_f32();
                prop_assert!(found.to_bits() == expected.to_bits() || (found.is_nan() && expected.is_nan()));
            }
        }
    }
}

#[test]
fn tensors_that_do_not_match_the_map_are_named_before_any_is_read() {
    let without_q: Vec<_> =
        ALL_TENSORS.iter().copied().filter(|(name, _)| *name != "model.q.weight").collect();
    let error = import_error(&without_q, StoredDtype::F32);
    assert_message("tensors that do not match the map are named before any is read", &error);

    let mut renamed = ALL_TENSORS;
    renamed[1].0 = "q.weight";
    let error = import_error(&renamed, StoredDtype::F32);
    assert_message("tensors that do not match the map are named before any is read, 2", &error);

    let mut misshapen = ALL_TENSORS;
    misshapen[2].1 = &[3, 2];
    let error = import_error(&misshapen, StoredDtype::F32);
    assert_message("tensors that do not match the map are named before any is read, 3", &error);

    let with_bias: Vec<_> = ALL_TENSORS.iter().copied().chain([("model.q.bias", &[4usize][..])]).collect();
    let error = import_error(&with_bias, StoredDtype::F32);
    assert_message("tensors that do not match the map are named before any is read, 4", &error);

    let error = import_error(&ALL_TENSORS, StoredDtype::F8_E5M2);
    assert!(error.contains("has F8_E5M2 elements") && error.contains("convert it to bf16"), "{error}");
}

#[test]
fn ignorable_tensors_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let more = ("model.layers.0.rotary_emb.inv_freq", &[2usize][..]);
    let tensors: Vec<_> = ALL_TENSORS.iter().copied().chain([more]).collect();
    write_file(&dir.path().join("model.safetensors"), &tensors, StoredDtype::F16, 0);
    assert_eq!(import_from(dir.path(), &names()).unwrap().len(), 5);
}

#[test]
fn a_tied_head_must_be_absent_equal_or_alone() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    let head = ("lm_head.weight", &[5usize, 3][..]);
    let both: Vec<_> = ALL_TENSORS.iter().copied().chain([head]).collect();
    write_file(&file, &both, StoredDtype::BF16, 7);
    assert!(import_from(dir.path(), &names()).is_ok(), "equal");

    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = import_from(dir.path(), &names()).unwrap_err().to_string();
    assert_message("a tied head must be absent equal or alone", &error);

    let alone: Vec<_> = both[1..].to_vec();
    write_file(&file, &alone, StoredDtype::BF16, 7);
    assert_eq!(import_from(dir.path(), &names()).unwrap()["embed"].len(), 15, "only the head is there");
}

/// The error message for a folder of two shards after `damage`.
fn sharded_error(damage: impl FnOnce(&Path)) -> String {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir.path().join("one.safetensors"), &ALL_TENSORS[..3], StoredDtype::F32, 0);
    write_file(&dir.path().join("two.safetensors"), &ALL_TENSORS[3..], StoredDtype::F32, 0);
    write_index(dir.path(), |_| {});
    assert!(import_from(dir.path(), &names()).is_ok());
    damage(dir.path());
    let error = import_from(dir.path(), &names()).unwrap_err();
    assert!(error.is_users());
    error.to_string()
}

fn write_index(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let file = |i| if i < 3 { "one.safetensors" } else { "two.safetensors" };
    let map: serde_json::Map<_, _> =
        ALL_TENSORS.iter().enumerate().map(|(i, (name, _))| (name.to_string(), file(i).into())).collect();
    let mut index = serde_json::json!({ "metadata": {}, "weight_map": map });
    change(&mut index["weight_map"]);
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).unwrap();
}

#[test]
fn an_index_that_does_not_match_its_shards_is_an_error() {
    let error = sharded_error(|folder| fs::remove_file(folder.join("two.safetensors")).unwrap());
    assert_message("an index that does not match its shards is an error", &error);

    for path in
        ["../two.safetensors", "/etc/passwd", ".//../two.safetensors", "a/two.safetensors", "..", "./", ""]
    {
        let error = sharded_error(|folder| write_index(folder, |map| map["model.v.weight"] = path.into()));
        assert!(error.contains("which is not a plain name"), "{error}");
    }
    let error = sharded_error(|folder| write_index(folder, |map| map["model.x"] = "one.safetensors".into()));
    assert_message("an index that does not match its shards is an error, 2", &error);
    let error = sharded_error(|folder| {
        write_file(&folder.join("two.safetensors"), &ALL_TENSORS[2..], StoredDtype::F32, 0);
    });
    assert_message("an index that does not match its shards is an error, 3", &error);

    let error = sharded_error(|folder| fs::write(folder.join("model.safetensors.index.json"), "{").unwrap());
    assert!(error.contains("is not as expected"), "{error}");
}

#[test]
fn an_index_may_write_dots_before_names_and_leave_tensors_out() {
    let dir = tempfile::tempdir().unwrap();
    write_file(&dir.path().join("one.safetensors"), &ALL_TENSORS[..3], StoredDtype::F32, 0);
    write_file(&dir.path().join("two.safetensors"), &ALL_TENSORS[3..], StoredDtype::F32, 0);
    write_index(dir.path(), |map| {
        map["model.v.weight"] = "./two.safetensors".into();
        map["model.q.weight"] = ".//.///one.safetensors".into();
        map.as_object_mut().unwrap().remove("model.norm.weight");
    });
    assert_eq!(import_from(dir.path(), &names()).unwrap().len(), 5);
}

#[test]
fn the_error_for_a_folder_without_safetensors_names_what_it_has() {
    let dir = tempfile::tempdir().unwrap();
    let error = |path: &Path| import_from(path, &names()).unwrap_err().to_string();
    assert_message(
        "the error for a folder without safetensors names what it has",
        error(&dir.path().join("no")),
    );
    assert_message("the error for a folder without safetensors names what it has, 2", error(dir.path()));
    fs::write(dir.path().join("other.safetensors"), "").unwrap();
    assert!(error(dir.path()).contains("only other.safetensors"));
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    // With tensors in safetensors files, nothing has to be converted; the other file is named too.
    let both = error(dir.path());
    assert_message("the error for a folder without safetensors names what it has, 3", &both);
    assert!(error(&dir.path().join("pytorch_model.bin")).contains("is not a folder"));
    for (file, says) in [
        ("model.gguf", "only model.gguf; get the safetensors version"),
        (
            "pytorch_model.bin",
            "only pytorch_model.bin; convert to safetensors first (from_pretrained, then save_pretrained",
        ),
        ("ckpt.pt", "only ckpt.pt; convert to safetensors first (safetensors.torch.save_file"),
        (
            "consolidated.00.pth",
            "only consolidated.00.pth; convert to safetensors first (safetensors.torch.save_file",
        ),
        ("__0_0.distcp", "only __0_0.distcp; convert it first"),
        ("tf_model.h5", "only tf_model.h5; get the safetensors version"),
        ("flax_model.msgpack", "only flax_model.msgpack; get the safetensors version"),
        ("zero_to_fp32.py", "a checkpoint of DeepSpeed"),
        ("adapter_model.bin", "is a LoRA adapter, not a model; merge it"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), "{}").unwrap();
        fs::write(dir.path().join(file), "").unwrap();
        let found = error(dir.path());
        assert!(found.contains(says), "{found}");
    }
}

#[test]
fn an_adapter_is_named_with_its_base() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("adapter_config.json");
    let error = || import_from(dir.path(), &names()).unwrap_err().to_string();
    write_file(&dir.path().join("adapter_model.safetensors"), &ALL_TENSORS, StoredDtype::F32, 0);
    for (text, says) in [
        ("{", "is a LoRA adapter, not a model"),
        (
            r#"{"base_model_name_or_path": "Qwen/Qwen3-8B"}"#,
            "is a LoRA adapter of the model 'Qwen/Qwen3-8B', not a model",
        ),
        (
            r#"{"base_model_name_or_path": "a\u001b[31m\nb", "peft_type": "LORA"}"#,
            r"of the model 'a\u{1b}[31m\nb', not a model",
        ),
        (r#"{"base_model_name_or_path": null, "peft_type": "IA3"}"#, "is an adapter (IA3), not a model"),
    ] {
        fs::write(&config, text).unwrap();
        let found = error();
        assert!(found.contains(says) && found.contains("merge it into its base model first"), "{found}");
    }
    // With a model beside it, the model is read.
    write_file(&dir.path().join("model.safetensors"), &ALL_TENSORS, StoredDtype::F32, 0);
    assert!(import_from(dir.path(), &names()).is_ok());
}

#[test]
fn an_existing_target_is_replaced_only_on_request_and_only_if_it_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let (old, new) = (values(1), values(2));
    let keep = options(ExportDtype::Fp32, 1000);
    let replace = ExportOptions { overwrite: true, ..keep.clone() };
    fs::create_dir(&folder).unwrap();
    export_to(&folder, &old, &keep).expect("an empty folder may be filled");
    assert!(export_to(&folder, &new, &keep).unwrap_err().to_string().contains("already exists"));
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&old));
    export_to(&folder, &new, &replace).unwrap();
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&new));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else remains");

    fs::create_dir(folder.join(".git")).unwrap();
    assert!(export_to(&folder, &old, &replace).unwrap_err().to_string().contains("it is more than a model"));
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("thesis.tex"), "x").unwrap();
    assert!(export_to(&home, &old, &replace).unwrap_err().to_string().contains("contains no model"));
    assert!(
        export_to(&home.join("thesis.tex"), &old, &replace).unwrap_err().to_string().contains("is a file")
    );
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&new));
}

#[test]
fn a_source_that_fails_damages_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let old = values(3);
    export_to(&folder, &old, &options(ExportDtype::Fp32, 60)).unwrap();
    let replace = ExportOptions { overwrite: true, ..options(ExportDtype::Fp32, 60) };
    let mut source = |name: &str| match name {
        "norm" => Err("the device is lost".into()),
        name => Ok(old[name].clone()),
    };
    let error = export(&folder, &names(), &mut source, &[], &replace).unwrap_err();
    assert!(matches!(&error, CheckpointError::Caller(_)) && error.to_string() == "the device is lost");
    let short = export(&folder, &names(), &mut |_| Ok(vec![0.0]), &[], &replace).unwrap_err();
    assert!(!short.is_users());
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&old));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_replacement_killed_between_its_renames_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let old = values(4);
    export_to(&folder, &old, &options(ExportDtype::Fp32, 1000)).unwrap();
    // The state between the two renames: the old folder is renamed, the new one is not.
    fs::rename(&folder, dir.path().join("model.old-77")).unwrap();
    fs::create_dir(dir.path().join("model.tmp-77")).unwrap();
    let error = import_from(&folder, &names()).unwrap_err().to_string();
    assert!(error.contains("interrupted: rename") && error.contains("model.old-77"), "{error}");
    let error = export_to(&folder, &values(5), &options(ExportDtype::Fp32, 1000)).unwrap_err().to_string();
    assert!(error.contains("already exists"), "{error}");
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&old));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn bf16_is_lossless_where_every_weight_is_bf16_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let lossless = |dtype: StoredDtype, rest: StoredDtype| {
        let sharded = dir.path().join(format!("{dtype:?}-{rest:?}"));
        fs::create_dir(&sharded).unwrap();
        let tensors: [(&str, &[usize]); 2] = [("a", &[3]), ("b", &[2])];
        let map =
            json!({ "a": "1.safetensors", "b": "2.safetensors", "rotary_emb.inv_freq": "3.safetensors" });
        fs::write(sharded.join("model.safetensors.index.json"), json!({ "weight_map": map }).to_string())
            .unwrap();
        write_file(&sharded.join("1.safetensors"), &tensors[..1], dtype, 0);
        write_file(&sharded.join("2.safetensors"), &tensors[1..], rest, 0);
        // Holds no trained weights and is ignored.
        write_file(&sharded.join("3.safetensors"), &[("rotary_emb.inv_freq", &[2])], StoredDtype::F32, 0);
        lossless_dtype(&sharded, &names()).unwrap()
    };
    let (bf16, f16, f32) = (StoredDtype::BF16, StoredDtype::F16, StoredDtype::F32);
    assert_eq!(lossless(bf16, bf16), ExportDtype::Bf16);
    for (dtype, rest) in [(f32, f32), (f16, f16), (bf16, f32), (bf16, f16)] {
        assert_eq!(lossless(dtype, rest), ExportDtype::Fp32, "{dtype:?} {rest:?}");
    }
}

/// True if the file system can exchange names; otherwise a replaced folder is absent for a moment.
fn can_exchange_names(folder: &Path) -> bool {
    let [one, two] = ["one", "two"].map(|name| folder.join(name));
    [&one, &two].iter().for_each(|path| fs::create_dir(path).unwrap());
    let exchanged = renameat_with(CWD, &one, CWD, &two, RenameFlags::EXCHANGE).is_ok();
    [&one, &two].iter().for_each(|path| fs::remove_dir(path).unwrap());
    exchanged
}

#[test]
fn readers_find_a_complete_folder_at_every_moment_of_a_replacement() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let replace = ExportOptions { overwrite: true, ..options(ExportDtype::Fp32, 1000) };
    let tensors = values(8);
    export_to(&folder, &tensors, &replace).unwrap();
    let is_done = AtomicBool::new(false);
    let absences = std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut absences = 0;
            while !is_done.load(Ordering::Relaxed) {
                absences += usize::from(!folder.join("config.json").exists());
            }
            absences
        });
        for _ in 0..60 {
            export_to(&folder, &tensors, &replace).unwrap();
        }
        is_done.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    });
    assert!(absences == 0 || !can_exchange_names(dir.path()), "it was absent {absences} times");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn weights_that_are_not_finite_are_neither_exported_nor_imported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut tensors = values(7);
        // Row 4 of the fused matrix is row 0 of its second part.
        tensors.get_mut("qkv").unwrap()[4 * 3 + 1] = bad;
        for dtype in [ExportDtype::Fp32, ExportDtype::Bf16] {
            let error = export_to(&folder, &tensors, &options(dtype, 1000)).unwrap_err();
            let (text, expected) =
                (error.to_string(), format!("tensor 'model.k.weight': element 1 of [2, 3] is {shown};"));
            assert!(error.is_users() && text.contains(&expected), "{text}");
            assert!(text.starts_with(&format!("{}, ", folder.display())), "{text}");
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing remains of it");
        }
    }
    let error = {
        // Every byte 0xFF is a NaN.
        write_file(&dir.path().join("model.safetensors"), &ALL_TENSORS, StoredDtype::F16, 0xFF);
        import_from(dir.path(), &names()).unwrap_err()
    };
    let text = error.to_string();
    assert!(error.is_users(), "{}", text);
    assert_message("weights that are not finite are neither exported nor imported", &text);
}

#[test]
fn finite_weights_that_overflow_in_the_target_type_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("model");
    let mut tensors = values(7);
    // The largest f32 rounds up to infinity in bf16.
    tensors.get_mut("norm").unwrap()[2] = f32::MIN;
    let error = export_to(&folder, &tensors, &options(ExportDtype::Bf16, 1000)).unwrap_err();
    let text = error.to_string();
    let expected = "tensor 'model.norm.weight': element 2 of [3] is -3.4028235e38, which is infinite in bf16";
    assert!(error.is_users() && text.contains(expected) && text.contains("export as fp32"), "{text}");
    assert!(!folder.exists());
    export_to(&folder, &tensors, &options(ExportDtype::Fp32, 1000)).unwrap();
    assert_eq!(bits(&import_from(&folder, &names()).unwrap()), bits(&tensors));
    tensors.get_mut("norm").unwrap()[2] = half::bf16::MAX.to_f32();
    let replace = ExportOptions { overwrite: true, ..options(ExportDtype::Bf16, 1000) };
    export_to(&folder, &tensors, &replace).expect("the largest bf16 is representable");

    // Bytes 0x7E make doubles of about 1e301.
    write_file(&dir.path().join("model.safetensors"), &ALL_TENSORS, StoredDtype::F64, 0x7E);
    let text = import_from(dir.path(), &names()).unwrap_err().to_string();
    assert_message("finite weights that overflow in the target type are named", &text);
}

#[test]
fn an_inconsistent_map_or_invalid_file_name_is_an_internal_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut rows = names();
    rows.entries[1].parts[0].rows = 3;
    let mut twice = names();
    twice.entries.push(twice.entries[0].clone());
    let mut tied = names();
    tied.tied[0].same_as = "nothing".to_string();
    for wrong in [rows, twice, tied] {
        assert!(!import_from(dir.path(), &wrong).unwrap_err().is_users());
    }
    let tensors = values(6);
    for name in ["../x", "model.safetensors", ""] {
        let files = [(name.to_string(), Vec::new())];
        let mut source = |name: &str| Ok(tensors[name].clone());
        let result = export(&dir.path().join("m"), &names(), &mut source, &files, &ExportOptions::default());
        assert!(!result.unwrap_err().is_users());
    }
}

#[test]
fn a_tensor_larger_than_a_chunk_is_exported_whole_and_its_elements_are_counted_from_its_start() {
    let dir = tempfile::tempdir().unwrap();
    let (rows, columns) = (1100, 1000);
    let part = NamePart { hf_name: "w".to_string(), rows };
    let entry = NameEntry { name: "w".to_string(), shape: vec![rows, columns], parts: vec![part], fp8: None };
    let names = NameMap { entries: vec![entry], ..NameMap::default() };
    let mut values: Vec<f32> = (0..rows * columns).map(|i| (i % 251) as f32).collect();
    let folder = dir.path().join("bf16");
    let options = options(ExportDtype::Bf16, u64::MAX);
    export(&folder, &names, &mut |_| Ok(values.clone()), &[], &options).unwrap();
    import(&folder, &names, &mut |_, found| {
        assert!(found == values);
        Ok(())
    })
    .unwrap();
    values[1_099_999] = f32::MAX;
    let error =
        export(&dir.path().join("x"), &names, &mut |_| Ok(values.clone()), &[], &options).unwrap_err();
    assert_message(
        "a tensor larger than a chunk is exported whole and its elements are counted from its start",
        error.to_string(),
    );
}
