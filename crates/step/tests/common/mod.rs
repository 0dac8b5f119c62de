//! Helpers of the tests of whole models.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use xtrain_config::Device;
use xtrain_data::Batch as TokenBatch;
use xtrain_model::decoder::{Balancing, Batch, Loss};
use xtrain_model::optimizer::{AdamWSpec, MuonSpec, Optimizer};
use xtrain_model::{
    Architecture, BlockSet, Description, Family, Fp8Overrides, Mixture, Recipe, RopeScaling, Router,
    StaticScales,
};
use xtrain_program::{Parallel, Recompute, StateKind};
use xtrain_runtime::{Checks, Engine};
use xtrain_step::engine::Processor;
use xtrain_step::learner::{Learner, StepResult};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, Philox};

/// True if tests run on a GPU: with XTRAIN_TEST_DEVICE=cuda.
pub fn on_card() -> bool {
    std::env::var("XTRAIN_TEST_DEVICE").as_deref() == Ok("cuda")
}

/// True if tests run only a sample of their cases, as on the slow emulated GPU: `XTRAIN_TEST_SAMPLE` is 1.
pub fn is_sample() -> bool {
    std::env::var("XTRAIN_TEST_SAMPLE").is_ok_and(|sample| sample == "1")
}

/// All cases; or, if [`is_sample`], `count` of them, selected by `XTRAIN_TEST_SEED`.
pub fn drawn<T>(all: impl IntoIterator<Item = T>, count: usize) -> Vec<T> {
    let mut all: Vec<T> = all.into_iter().collect();
    if is_sample() {
        let seed = std::env::var("XTRAIN_TEST_SEED").map_or(0, |seed| seed.parse().expect("a number"));
        let rng = Philox::new(seed, 0, 0);
        let mut n = 0;
        while all.len() > count {
            n += 1;
            all.remove(rng.word(n) as usize % all.len());
        }
    }
    all
}

/// An engine that poisons every output before it is written, on the device of the tests.
pub fn engine() -> Box<dyn Engine> {
    let device = if on_card() { Device::Cuda } else { Device::Cpu };
    let processor = Processor::choose(device).unwrap_or_else(|e| panic!("{e}"));
    processor.engine(Checks { poison: true, numerics: false }).unwrap_or_else(|e| panic!("{e}"))
}

/// A small Qwen3-like model with every size its own.
pub fn small() -> Description {
    Description {
        family: Family::QWEN3,
        dim: 20,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn_dim: 28,
        mixture: None,
        vocab_size: 37,
        max_position_embeddings: 64,
        window: None,
        attention_scale: None,
        rope_theta: 1e4,
        rope_scaling: RopeScaling::None,
        norm_eps: 1e-6,
        tie_embeddings: false,
        qkv_bias: false,
        qk_norm: true,
    }
}

/// A model with heads as wide as real ones, so that attention takes the algorithms that real models take, and
/// of sizes that FP8 takes.
pub fn wide() -> Description {
    Description {
        dim: 96,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        ffn_dim: 160,
        max_position_embeddings: 1024,
        ..small()
    }
}

/// The model of a description.
pub fn built(description: Description) -> Architecture {
    description.architecture().expect("a model")
}

pub fn small_model() -> Architecture {
    built(small())
}

pub fn wide_model() -> Architecture {
    built(wide())
}

/// The constants of the spec's optimizer.
pub fn adamw(spec: &mut TrainingSpec) -> &mut AdamWSpec {
    let (Optimizer::AdamW(adamw) | Optimizer::Muon(MuonSpec { adamw, .. })) = &mut spec.optimizer;
    adamw
}

/// Replaces the spec's optimizer with Muon, with AdamW's constants for the other parameters.
pub fn use_muon(spec: &mut TrainingSpec) {
    let adamw = AdamWSpec { moments: DType::F32, ..*adamw(spec) };
    spec.optimizer = Optimizer::Muon(MuonSpec { momentum: 0.95, adamw });
}

pub fn spec(model: Architecture, batch: Batch) -> TrainingSpec {
    TrainingSpec {
        model,
        recipe: Recipe::Fp32,
        fp8: Fp8Overrides::default(),
        batch,
        document_mask: false,
        attention_deterministic: true,
        loss: Loss { chunk_tokens: 16, z_loss: 0.0, sources: 0, counts_matches: false, balancing: None },
        fixed_routing: None,
        dropout: 0.0,
        recompute: Recompute::None,
        recompute_blocks: None,
        parallel: Parallel::ALONE,
        split: Vec::new(),
        capacity: None,
        max_grad_norm: 1.0,
        optimizer: Optimizer::AdamW(AdamWSpec {
            betas: [0.9, 0.95],
            eps: 1e-8,
            weight_decay: 0.1,
            moments: DType::F32,
            seed: 7,
        }),
        reference: false,
        scored: Vec::new(),
    }
}

/// The spec of a mixture of `family` in the sizes of `description`, with so many experts of which a token
/// passes through so many, and a shared expert if the family has one.
pub fn mixture(
    family: Family,
    description: Description,
    [count, top_k]: [usize; 2],
    batch: Batch,
    balancing: Balancing,
) -> TrainingSpec {
    let router = Router { top_k, ..family.router().expect("a family with experts") };
    let ffn_dim = description.ffn_dim;
    let shared_ffn_dim = if family.shares_an_expert() { ffn_dim } else { 0 };
    let mixture = Mixture { count, ffn_dim, router, shared_ffn_dim, dense: BlockSet::default() };
    let mut spec = spec(built(Description { family, mixture: Some(mixture), ..description }), batch);
    spec.loss.balancing = Some(balancing);
    spec
}

/// Random tokens and targets; every seventh target is ignored.
pub fn random_batch(batch: Batch, vocab_size: usize, seed: u64) -> TokenBatch {
    let n = batch.sequences * batch.seq_len;
    let rng = Philox::new(seed, 0, 0);
    let token = |i: usize| (rng.word(i as u64) % vocab_size as u32) as i32;
    let targets: Vec<i32> = (0..n).map(|i| if i % 7 == 3 { -100 } else { token(n + i) }).collect();
    TokenBatch {
        batch_size: batch.sequences,
        seq_len: batch.seq_len,
        tokens: (0..n).map(token).collect(),
        valid_targets: targets.iter().filter(|&&t| t >= 0).count(),
        row_inputs: vec![batch.seq_len; batch.sequences],
        targets,
        positions: (0..n).map(|i| (i % batch.seq_len) as i32).collect(),
        doc_start: vec![0; n],
    }
}

/// The batch without the targets of other tokens than those that `trains`.
pub fn with_targets_at(mut batch: TokenBatch, trains: impl Fn(usize) -> bool) -> TokenBatch {
    for (_, target) in batch.targets.iter_mut().enumerate().filter(|(token, _)| !trains(*token)) {
        *target = -100;
    }
    batch.valid_targets = batch.targets.iter().filter(|&&t| t >= 0).count();
    batch
}

/// The batch cut into documents of 1, 2, 4, .. tokens.
pub fn in_documents(batch: TokenBatch) -> TokenBatch {
    let start = |i: usize| (1 << (i % batch.seq_len + 1).ilog2()) - 1;
    let n = batch.tokens.len();
    let doc_start: Vec<i32> = (0..n).map(start).collect();
    let positions = (0..n).map(|i| (i % batch.seq_len) as i32 - doc_start[i]).collect();
    TokenBatch { doc_start, positions, ..batch }
}

/// Sequences `first..first + count` of a batch, as a batch.
pub fn slice(batch: &TokenBatch, first: usize, count: usize) -> TokenBatch {
    let range = first * batch.seq_len..(first + count) * batch.seq_len;
    let targets = batch.targets[range.clone()].to_vec();
    TokenBatch {
        batch_size: count,
        seq_len: batch.seq_len,
        tokens: batch.tokens[range.clone()].to_vec(),
        valid_targets: targets.iter().filter(|&&t| t >= 0).count(),
        row_inputs: batch.row_inputs[first..first + count].to_vec(),
        targets,
        positions: batch.positions[range.clone()].to_vec(),
        doc_start: batch.doc_start[range].to_vec(),
    }
}

/// ||a - b|| / ||b||.
pub fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&x, &y)| square(f64::from(x) - f64::from(y))).sum();
    let norm: f64 = b.iter().map(|&y| square(f64::from(y))).sum();
    (difference / norm.max(1e-60)).sqrt()
}

/// The root of the mean of the squares.
pub fn typical(errors: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = errors.fold((0.0, 0.0), |(sum, count), e| (sum + e * e, count + 1.0));
    (sum / count).sqrt()
}

/// The folder of golden files from PyTorch and transformers.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

/// A learner with random weights of this standard deviation.
pub fn learner(spec: TrainingSpec, std: f64) -> Learner {
    let mut learner = Learner::new(engine(), spec, 11).expect("a learner");
    learner.weights().initialize(5, std).expect("initialises");
    learner
}

/// The gradients of all parameters, by name.
pub fn gradients(learner: &mut Learner, model: &Architecture) -> Vec<(String, Vec<f32>)> {
    let read = |p: xtrain_model::ParameterSpec| {
        let bytes = learner.read_state(StateKind::Gradient, &p.name).expect("a gradient");
        (p.name, bytemuck::pod_collect_to_vec(&bytes))
    };
    model.parameters().into_iter().filter(|p| p.is_trained()).map(read).collect()
}

/// The gradients by name, the step's result, and the masters after it.
pub type Step = (Vec<(String, Vec<f32>)>, StepResult, Vec<Vec<f32>>);

/// A step over a batch cut into micro-batches of `spec.batch`, from random weights of this standard
/// deviation.
pub fn step_from(spec: &TrainingSpec, batch: &TokenBatch, std: f64) -> Step {
    let mut l = learner(spec.clone(), std);
    let firsts = (0..batch.batch_size).step_by(spec.batch.sequences);
    let micro: Vec<TokenBatch> = firsts.map(|first| slice(batch, first, spec.batch.sequences)).collect();
    let result = l.step(3, 1e-2, &micro).expect("a step");
    let gradients = gradients(&mut l, &spec.model);
    let masters = spec
        .model
        .parameters()
        .iter()
        .map(|p| l.weights().read_parameter(&p.name).expect("a master"))
        .collect();
    (gradients, result, masters)
}

/// The delayed scales that a learner has, as static ones.
pub fn delayed_scales(learner: &mut Learner) -> StaticScales {
    let mut scales = StaticScales::default();
    for tensor in programs::training(learner.spec()).expect("a program").delayed {
        let bytes = learner.read_state(StateKind::Scale, &tensor.name).expect("a scale");
        let of = scales.layers.entry(tensor.layer.to_string()).or_default();
        of.scales[tensor.operand as usize] = Some(bytemuck::pod_read_unaligned(&bytes));
    }
    scales
}

/// Replaces the delayed scales of a learner with these, so that its next step casts by them.
pub fn freeze(learner: &mut Learner, scales: &StaticScales) {
    for tensor in programs::training(learner.spec()).expect("a program").delayed {
        let scale = scales.get(&tensor.layer.to_string(), tensor.operand).expect("a scale");
        let engine = learner.weights().engine();
        engine.write_state(StateKind::Scale, &tensor.name, bytemuck::bytes_of(&scale)).expect("written");
    }
    // Weights have been cast by the scales that the last step computed.
    learner.weights().refresh().expect("refreshed");
}
