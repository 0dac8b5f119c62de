//! Parity with PEFT, on the golden files of tests/golden/make_lora.py: its folders give the same logits,
//! gradients and steps of AdamW here.

#[path = "../../step/tests/common/mod.rs"]
mod common;

use common::{golden, relative};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use xtrain_data::Batch as TokenBatch;
use xtrain_model::decoder::{Batch, Context, io};
use xtrain_model::hf::HfConfig;
use xtrain_model::{Adapter, Architecture, ModelRanks, ParameterSpec, Recipe, Targets};
use xtrain_program::StateKind;
use xtrain_runtime::Part;
use xtrain_step::layout::Layout;
use xtrain_step::learner::Learner;
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_train::exchange::import;

const MODELS: [&str; 3] = ["llama3", "qwen2", "qwen3"];

/// The shape of the golden batches.
const BATCH: Batch = Batch { sequences: 2, seq_len: 40 };

/// Tensors by name.
struct Tensors(BTreeMap<String, Vec<u8>>);

impl Tensors {
    fn read(path: &Path) -> Tensors {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).expect("safetensors");
        Tensors(file.tensors().into_iter().map(|(name, view)| (name, view.data().to_vec())).collect())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.0[name])
    }

    fn ints(&self, name: &str) -> Vec<i32> {
        bytemuck::pod_collect_to_vec(&self.0[name])
    }

    /// The tensors `prefix` + their names of a parameter, stacked as our parameter is.
    fn parameter(&self, prefix: &str, p: &ParameterSpec) -> Vec<f32> {
        p.parts.list().iter().flat_map(|part| self.floats(&format!("{prefix}{}", part.hf_name))).collect()
    }
}

/// A golden model with adapters of PEFT's.
struct Golden {
    name: &'static str,
    model: Architecture,
    /// Batches and learning rates.
    base: Tensors,
    adapters: Tensors,
    results: Tensors,
}

impl Golden {
    fn load(name: &'static str) -> Golden {
        let folder = golden("lora").join(name);
        let text = |path: &Path| std::fs::read_to_string(path).expect("a text");
        let hf = HfConfig::parse(&text(&golden(name).join("config.json"))).expect("config.json");
        let json: Value = serde_json::from_str(&text(&folder.join("adapter_config.json"))).expect("JSON");
        let targets = json["target_modules"].as_array().expect("a list");
        let targets = targets.iter().map(|target| target.as_str().expect("a name").to_owned()).collect();
        let number = |key: &str| json[key].as_f64().unwrap_or_else(|| panic!("{key}"));
        let adapter = Adapter {
            rank: number("r") as usize,
            alpha: number("lora_alpha") as f32,
            dropout: number("lora_dropout") as f32,
            targets: Targets::Named(targets),
        };
        Golden {
            name,
            model: Architecture { adapter: Some(adapter), ..common::built(hf.model) },
            base: Tensors::read(&golden(name).join("golden.safetensors")),
            adapters: Tensors::read(&folder.join("adapter_model.safetensors")),
            results: Tensors::read(&folder.join("golden.safetensors")),
        }
    }

    /// A and B of all layers.
    fn trained(&self) -> Vec<ParameterSpec> {
        let mut parameters = self.model.parameters();
        parameters.retain(ParameterSpec::is_trained);
        parameters
    }

    /// Reads the base and the adapters.
    fn fill(&self, weights: &mut Weights) {
        import(weights, &golden(self.name)).expect("the folder imports");
        for p in self.trained() {
            weights.write_parameter(&p.name, &self.adapters.parameter("", &p)).expect("written");
        }
        weights.refresh().expect("refreshed");
    }

    fn learner(&self) -> Learner {
        let spec = TrainingSpec { max_grad_norm: 1.0, ..common::spec(self.model.clone(), BATCH) };
        let mut learner = Learner::new(common::engine(), spec, 0).expect("a learner");
        self.fill(learner.weights());
        learner
    }

    /// Batch `n` of these names.
    fn batch(&self, tokens: &str, targets: &str, n: usize) -> TokenBatch {
        let count = BATCH.tokens();
        let of = |name: &str| self.base.ints(name)[n * count..(n + 1) * count].to_vec();
        let targets = of(targets);
        TokenBatch {
            batch_size: BATCH.sequences,
            seq_len: BATCH.seq_len,
            tokens: of(tokens),
            valid_targets: targets.iter().filter(|&&t| t >= 0).count(),
            row_inputs: vec![BATCH.seq_len; BATCH.sequences],
            targets,
            positions: (0..count).map(|i| (i % BATCH.seq_len) as i32).collect(),
            doc_start: vec![0; count],
        }
    }
}

#[test]
fn tensors_of_adapters_have_pefts_names() {
    for name in MODELS {
        let g = Golden::load(name);
        let ours: BTreeSet<String> =
            g.trained().iter().flat_map(|p| p.parts.list()).map(|part| part.hf_name).collect();
        assert_eq!(ours, g.adapters.0.keys().cloned().collect(), "{name}");
    }
}

#[test]
fn logits_of_a_folder_of_pefts_agree() {
    for name in MODELS {
        let g = Golden::load(name);
        let mut weights = Weights::new(common::engine(), g.model.clone(), Recipe::Fp32).expect("weights");
        g.fill(&mut weights);
        let rows: Vec<i32> = (0..BATCH.seq_len as i32).collect();
        let context =
            Context::Sequence { document_mask: false, deterministic: true, ranks: ModelRanks::ALONE };
        let program = programs::logits(
            &g.model,
            &Recipe::Fp32.into(),
            &Layout::alone(),
            Batch { sequences: 1, ..BATCH },
            context,
            rows.len(),
        )
        .expect("a program");
        let id = weights.load(program).expect("loads");
        let tokens = &g.base.ints("input_ids")[..BATCH.seq_len];
        let engine = weights.engine();
        engine.write_input(id, io::TOKENS, bytemuck::cast_slice(tokens)).expect("tokens");
        engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&rows)).expect("positions");
        engine.write_input(id, io::ROWS, bytemuck::cast_slice(&rows)).expect("rows");
        engine.run(id, Part::Whole).expect("runs");
        let outputs = engine.outputs(id).expect("outputs");
        let logits: Vec<f32> = bytemuck::pod_collect_to_vec(outputs.get(io::LOGITS).expect("logits"));
        let error = relative(&logits, &g.results.floats("logits"));
        println!("{name}: logits differ by {error:e}");
        assert!(error < 1e-5, "{name}: logits differ by {error:e}");
        // They are not those of the base.
        let base = &g.base.floats("logits")[..logits.len()];
        assert!(relative(&logits, base) > 0.05, "{name}: adapters change little");
    }
}

#[test]
fn gradients_of_adapters_agree_with_peft() {
    for name in MODELS {
        let g = Golden::load(name);
        let mut learner = g.learner();
        learner.step(0, 0.0, &[g.batch("input_ids", "labels", 0)]).expect("a step");
        let mut worst = 0.0f64;
        for p in g.trained() {
            let bytes = learner.read_state(StateKind::Gradient, &p.name).expect("a gradient");
            let found: Vec<f32> = bytemuck::pod_collect_to_vec(&bytes);
            let error = relative(&found, &g.results.parameter("grad.", &p));
            assert!(error < 1e-4, "{name}: the gradient of {} differs by {error:e}", p.name);
            worst = worst.max(error);
        }
        println!("{name}: gradients differ by {worst:e}");
    }
}

/// The norm is clipped at 1, and A and B decay.
#[test]
fn ten_adamw_steps_of_adapters_agree_with_peft() {
    for name in MODELS {
        let g = Golden::load(name);
        let mut learner = g.learner();
        let (lr, losses) = (g.base.floats("train.lr"), g.results.floats("train.loss"));
        assert_eq!(losses.len(), 10);
        let mut worst = 0.0f64;
        for (step, &expected) in losses.iter().enumerate() {
            let batch = g.batch("train.input_ids", "train.labels", step);
            let loss = learner.step(step as u64, lr[step].into(), &[batch]).expect("a step").loss;
            let error = (loss / f64::from(expected) - 1.0).abs();
            assert!(error < 1e-5, "{name}, step {step}: loss {loss} instead of {expected}");
            worst = worst.max(error);
        }
        println!("{name}: losses differ by {worst:e}");
    }
}
