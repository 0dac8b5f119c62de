//! Folders of adapters: added to a model and merged into it, refused by the name of a tensor or key, and
//! answered whatever their bytes are.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{built, relative, small};
use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
use xtrain_config::Device;
use xtrain_data::Tokenizer;
use xtrain_model::{Adapter, Architecture, Description, Family, Recipe, Targets};
use xtrain_step::generate::{Generator, Sampling};
use xtrain_step::weights::Weights;
use xtrain_tensor::Philox;
use xtrain_train::error::RunError;
use xtrain_train::exchange::{Identity, export};
use xtrain_train::merge::Merge;
use xtrain_train::open_model::{OpenedModel, Which, open, open_with_adapter};

const FILE: &str = "adapter_model.safetensors";
const CONFIG: &str = "adapter_config.json";

/// A folder `base` with a model, and one `adapter` with adapters for it.
struct Folders {
    place: TempDir,
}

impl Folders {
    fn new(description: Description, targets: Targets) -> Folders {
        let folders = Folders { place: tempfile::tempdir().expect("a folder") };
        let adapter = Adapter { rank: 3, alpha: 5.0, dropout: 0.0, targets };
        let base = built(description);
        folders.write(base.clone(), "base");
        folders.write(Architecture { adapter: Some(adapter), ..base }, "adapter");
        folders
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// Writes a model, or its adapters if it has some, with random weights.
    fn write(&self, model: Architecture, name: &str) {
        let names: Vec<_> = model.parameters().into_iter().filter(|p| p.name.ends_with(".lora_b")).collect();
        let mut weights = Weights::new(common::engine(), model, Recipe::Fp32).expect("weights");
        weights.initialize(3, 0.3).expect("initial weights");
        for (stream, p) in names.iter().enumerate() {
            let mut values = vec![0.0; p.shape.iter().product()];
            Philox::new(5, stream as u32, 0).fill_normal(0.2, &mut values);
            weights.write_parameter(&p.name, &values).expect("written");
        }
        let tokenizer = Tokenizer::bytes();
        let identity = Identity::new(None, weights.model(), &tokenizer, None).expect("a description");
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
        export(&mut weights, &identity, &tokenizer, &self.path(name), &options).expect("an export");
    }

    fn opened(&self) -> Result<OpenedModel, RunError> {
        open_with_adapter(&self.path("base"), &self.path("adapter"), Device::Cpu, None)
    }

    fn merge(&self, out: &str, dtype: ExportDtype) {
        let merge = Merge::open(&self.path("adapter"), Which::Latest, Some(&self.path("base")));
        let options = ExportOptions { dtype, ..ExportOptions::default() };
        merge.expect("adapters").write(&self.path(out), &options).expect("an export");
    }

    /// Changes a key of the adapters' description.
    fn set(&self, key: &str, value: Value) {
        let path = self.path("adapter").join(CONFIG);
        let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        config[key] = value;
        fs::write(path, config.to_string()).expect("written");
    }

    /// Changes the adapters' tensors.
    fn change(&self, change: impl Fn(&mut Tensors)) {
        let path = self.path("adapter").join(FILE);
        let mut tensors = tensors(&path);
        change(&mut tensors);
        let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
            (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("a tensor"))
        });
        serialize_to_file(views.collect::<Vec<_>>(), None, &path).expect("written");
    }

    /// The error of a user, in one line.
    fn refusal(&self) -> String {
        let error = self.opened().err().expect("it is refused");
        assert!(error.is_users(), "{error}");
        let line = error.to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    }
}

/// Type, shape and bytes of tensors by name.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = |(name, tensor): (String, TensorView<'_>)| {
        (name, (tensor.dtype(), tensor.shape().to_vec(), tensor.data().to_vec()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

fn floats((dtype, _, bytes): &(Dtype, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    match dtype {
        Dtype::F32 => bytemuck::pod_collect_to_vec(bytes),
        _ => {
            let wide = |pair: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16);
            bytes.chunks_exact(2).map(wide).collect()
        }
    }
}

/// The tokens that a model chooses after a prompt, and all their logits.
fn generated(mut model: OpenedModel) -> (Vec<u32>, Vec<f32>) {
    let prompt = [7, 90, 201, 33, 5];
    let mut generator = Generator::new(&mut model.weights, 16).expect("a generator");
    let mut logits = Vec::new();
    let greedy = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
    let tokens = generator.generate(&mut model.weights, &prompt, 6, greedy, &[], &mut |made| {
        logits.extend_from_slice(made.logits);
        ControlFlow::Continue(())
    });
    (tokens.expect("tokens"), logits)
}

fn named(names: &[&str]) -> Targets {
    Targets::Named(names.iter().map(|name| (*name).to_owned()).collect())
}

/// A Llama, Qwen2 or Qwen3 whose vocabulary has the tokens of bytes.
fn model(family: Family) -> Description {
    let is_qwen2 = family == Family::QWEN2;
    Description { family, vocab_size: 260, qkv_bias: is_qwen2, qk_norm: family == Family::QWEN3, ..small() }
}

fn qwen3() -> Folders {
    Folders::new(model(Family::QWEN3), Targets::AllLinear)
}

#[test]
fn a_merged_model_computes_as_the_model_with_its_adapters() {
    for family in [Family::LLAMA, Family::QWEN2, Family::QWEN3] {
        for tie_embeddings in [false, true] {
            for targets in
                [Targets::AllLinear, named(&["q_proj", "v_proj", "layers.1.mlp.up_proj", "down_proj"])]
            {
                let case = format!("{} tied {tie_embeddings} {targets:?}", family.name());
                let folders = Folders::new(Description { tie_embeddings, ..model(family) }, targets);
                folders.merge("merged", ExportDtype::Fp32);
                let (tokens, logits) = generated(folders.opened().expect("adapters"));
                let opened = |name: &str| open(&folders.path(name), Which::Latest, Device::Cpu, None);
                let (of_merged, merged) = generated(opened("merged").expect("a model"));
                assert_eq!(tokens, of_merged, "{case}");
                let error = relative(&merged, &logits);
                assert!(error < 1e-5, "{case}: logits differ by {error:e}");
                let (_, base) = generated(opened("base").expect("a model"));
                let change = relative(&base[..260], &logits[..260]);
                assert!(change > 1e-2, "{case}: the adapters change logits by {change:e}");
            }
        }
    }
}

#[test]
fn merged_weights_are_sums_in_f32_that_are_rounded_once() {
    let folders = qwen3();
    folders.merge("fp32", ExportDtype::Fp32);
    folders.merge("bf16", ExportDtype::Bf16);
    let read = |name: &str| tensors(&folders.path(name).join("model.safetensors"));
    let (base, wide, narrow) = (read("base"), read("fp32"), read("bf16"));
    let adapter = tensors(&folders.path("adapter").join(FILE));
    let mut merged = 0;
    for (name, tensor) in &base {
        let (before, after) = (floats(tensor), floats(&wide[name]));
        let matrix = |which: &str| {
            let stem = name.strip_suffix(".weight")?;
            Some(floats(adapter.get(&format!("base_model.model.{stem}.{which}.weight"))?))
        };
        let Some((a, b)) = matrix("lora_A").zip(matrix("lora_B")) else {
            assert_eq!(before, after, "{name}");
            continue;
        };
        merged += 1;
        let columns = tensor.1[1];
        for (at, (before, after)) in before.iter().zip(&after).enumerate() {
            let (row, column) = (at / columns, at % columns);
            let product: f64 =
                (0..3).map(|k| f64::from(b[row * 3 + k]) * f64::from(a[k * columns + column])).sum();
            let expected = f64::from(*before) + 5.0 / 3.0 * product;
            assert!((f64::from(*after) - expected).abs() < 1e-6, "{name}[{row}, {column}]");
        }
    }
    assert_eq!(merged, 3 * 7);
    for (name, tensor) in &narrow {
        let rounded = floats(&wide[name]).into_iter().map(|x| {
            let bits = x.to_bits();
            f32::from_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
        });
        assert!(floats(tensor).into_iter().eq(rounded), "{name}");
    }
}

#[test]
fn adapters_of_16_bits_are_read() {
    let folders = qwen3();
    let logits = generated(folders.opened().expect("adapters")).1;
    folders.change(|tensors| {
        for tensor in tensors.values_mut() {
            let narrow = floats(tensor).into_iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes());
            *tensor = (Dtype::BF16, tensor.1.clone(), narrow.collect());
        }
    });
    let error = relative(&generated(folders.opened().expect("adapters")).1[..260], &logits[..260]);
    assert!((1e-6..0.1).contains(&error), "{error:e}");
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_by_the_name_of_a_tensor() {
    const Q: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    type Change = fn(&mut Tensors);
    let changes: [(Change, &str); 6] = [
        (|tensors| drop(tensors.remove(Q)), Q),
        (
            |tensors| {
                let tensor = tensors[Q].clone();
                tensors.insert("base_model.model.lm_head.lora_A.weight".into(), tensor);
            },
            "base_model.model.lm_head.lora_A.weight",
        ),
        (
            |tensors| {
                let tensor = tensors.remove(Q).expect("a tensor");
                tensors.insert(Q.replace("layers.0.", "layers.7."), tensor);
            },
            Q,
        ),
        (|tensors| tensors.get_mut(Q).expect("a tensor").1.reverse(), Q),
        (|tensors| tensors.get_mut(Q).expect("a tensor").0 = Dtype::I32, Q),
        (|tensors| tensors.get_mut(Q).expect("a tensor").2[..4].copy_from_slice(&f32::NAN.to_le_bytes()), Q),
    ];
    for (change, name) in changes {
        let folders = qwen3();
        folders.change(change);
        let line = folders.refusal();
        assert!(line.contains(name), "{line}");
    }
    // Another rank, and models of other sizes and depths.
    let folders = qwen3();
    folders.set("r", json!(4));
    assert!(folders.refusal().contains(Q), "{}", folders.refusal());
    folders.set("r", json!(3));
    folders.opened().expect("as it was");
    let own = model(Family::QWEN3);
    for (other, name) in [
        (Description { dim: 24, ..own }, Q),
        (Description { layers: 2, ..own }, "layers.2."),
        (Description { layers: 4, ..own }, "layers.3."),
    ] {
        let folders = qwen3();
        fs::remove_dir_all(folders.path("base")).expect("removed");
        folders.write(built(other), "base");
        let line = folders.refusal();
        assert!(line.contains(name), "{line}");
    }
}

#[test]
fn other_kinds_of_adapters_and_damaged_files_are_refused() {
    let folders = qwen3();
    for (key, value) in [
        ("use_dora", json!(true)),
        ("use_rslora", json!(true)),
        ("modules_to_save", json!(["embed_tokens"])),
        ("target_parameters", json!(["mlp.experts.down_proj"])),
        ("target_modules", json!(["c_attn"])),
        ("target_modules", json!("(")),
    ] {
        let before = fs::read(folders.path("adapter").join(CONFIG)).expect("a file");
        folders.set(key, value.clone());
        let line = folders.refusal();
        let names_it = line.contains(key) || line.contains(value.as_str().unwrap_or_default());
        assert!(line.contains(CONFIG) && names_it, "{line}");
        fs::write(folders.path("adapter").join(CONFIG), before).expect("written");
    }
    let file = folders.path("adapter").join(FILE);
    let whole = fs::read(&file).expect("a file");
    fs::write(&file, &whole[..whole.len() / 2]).expect("written");
    assert!(folders.refusal().contains(FILE));
    fs::rename(&file, folders.path("adapter").join("adapter_model.bin")).expect("renamed");
    assert!(folders.refusal().contains("adapter_model.bin"));
    fs::write(folders.path("adapter").join(CONFIG), "{").expect("written");
    assert!(folders.refusal().contains(CONFIG));
    fs::remove_file(folders.path("adapter").join(CONFIG)).expect("removed");
    assert!(folders.refusal().contains(CONFIG));
}

#[test]
fn a_tokenizer_with_more_tokens_than_the_model_is_refused() {
    let folders = qwen3();
    fs::remove_dir_all(folders.path("base")).expect("removed");
    folders.write(built(Description { vocab_size: 257, ..model(Family::QWEN3) }), "base");
    folders.opened().expect("257 tokens");
    let path = folders.path("adapter").join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    tokenizer["added_tokens"].as_array_mut().expect("a list").push(json!({
        "id": 257, "content": "<new>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false
    }));
    fs::write(path, tokenizer.to_string()).expect("written");
    assert!(folders.refusal().contains("258 tokens"), "{}", folders.refusal());
}

/// Changes, removes, repeats or inserts something at random.
fn mutate(bytes: &[u8], next: &mut impl FnMut(usize) -> usize) -> Vec<u8> {
    const TOKENS: [&[u8]; 9] =
        [b"0", b"-1", b"null", b"true", b"1e999", b"18446744073709551615", b"[]", b"\0", b"\xff\xfe"];
    let mut out = bytes.to_vec();
    for _ in 0..=next(3) {
        // Half of the changes are in a header.
        let end = if next(2) == 0 { out.len() } else { out.len().min(900) };
        let at = next(end.max(1));
        let to = (at + 1 + next(8)).min(out.len());
        match next(6) {
            0 if !out.is_empty() => out[at] ^= 1 << next(8),
            1 if !out.is_empty() => out[at] = b"0123456789\"{}[],:.-"[next(19)],
            2 => drop(out.drain(at.min(to)..to)),
            3 => drop(out.splice(at.min(to)..to, TOKENS[next(TOKENS.len())].iter().copied())),
            4 => out.truncate(at),
            _ => out.extend_from_within(at.min(to)..to),
        }
    }
    out
}

#[test]
fn mutated_folders_are_answered() {
    const ROUNDS: usize = 1000;
    let seed = std::env::var("XTRAIN_TEST_SEED").map_or(0, |seed| seed.parse().expect("a number"));
    println!("XTRAIN_TEST_SEED={seed}");
    let numbers = Philox::new(seed, 9, 0);
    let mut drawn = 0;
    let mut next = |end: usize| {
        drawn += 1;
        numbers.word(drawn) as usize % end
    };
    let folders =
        Folders::new(Description { layers: 1, ..model(Family::QWEN3) }, named(&["q_proj", "o_proj"]));
    for file in [CONFIG, FILE] {
        let path = folders.path("adapter").join(file);
        let whole = fs::read(&path).expect("a file");
        let mut accepted = 0;
        for _ in 0..ROUNDS {
            let mutated = mutate(&whole, &mut next);
            fs::write(&path, &mutated).expect("written");
            match folders.opened() {
                Ok(_) => accepted += 1,
                Err(error) => {
                    let (line, shown) = (error.to_string(), String::from_utf8_lossy(&mutated));
                    assert!(error.is_users() && !line.contains('\n') && line.len() < 4000, "{line}\n{shown}");
                }
            }
        }
        assert!(accepted < ROUNDS, "nothing was refused");
        println!("{file}: {accepted} of {ROUNDS} mutations changed nothing that matters");
        fs::write(&path, &whole).expect("written");
    }
}
