//! The speed of training steps, measured as a run makes them but for its data: tokens are random and there from the start.

use crate::config::{Config, Parsed};
use crate::engine::{Processor, Target};
use crate::evaluate::feed;
use crate::learner::{Learner, Step};
use crate::programs;
use crate::run::{RunError, plan_on};
use crate::weights::LearnError;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;
use xtrain_data::Batch as TokenBatch;
use xtrain_runtime::{Checks, Part};
use xtrain_tensor::{Philox, TensorType};

/// How long to measure.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// Steps before the measurement: what is done once is done in them.
    pub warmup: usize,
    /// Measurements, of which the median counts.
    pub repeats: usize,
    /// Steps of a measurement.
    pub steps: usize,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct StepSpeed {
    /// What it ran on.
    pub device: String,
    /// `fp32`, `bf16`, ..
    pub precision: String,
    /// Tokens of an optimizer step.
    pub tokens: u64,
    /// Seconds of a step: the median of the measurements.
    pub seconds: f64,
    /// Seconds of a step in each measurement.
    pub measured: Vec<f64>,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// 10^12 floating-point operations a second, by PaLM's count.
    pub tflops: f64,
    /// Their share of the card's dense bf16 peak, where that is known.
    pub mfu: Option<f64>,
    /// Bytes of the planned arena.
    pub planned_bytes: u64,
    /// Bytes that the process took of the card, where there is one: the arena, the context, libraries.
    pub card_bytes: Option<u64>,
    /// Seconds from opening the processor to the end of the first step.
    pub first_step_seconds: f64,
    /// The loss of the last step: one that is not finite was not measured well.
    pub loss: f64,
}

/// What the instances of an op at a site, of all blocks, take of a step.
#[derive(Clone, Debug, Serialize)]
pub struct OpSpeed {
    /// The op.
    pub op: String,
    /// Where in a block or model.
    pub site: String,
    /// fprop, dgrad, ..
    pub role: String,
    /// Instances in a step.
    pub count: usize,
    /// Seconds of all of them.
    pub seconds: f64,
    /// 10^12 floating-point operations a second.
    pub tflops: f64,
    /// 10^9 bytes of operands a second.
    pub gigabytes_per_second: f64,
}

/// Measures every op of the training step of a run file by itself, the slowest first.
pub fn ops(parsed: &Parsed, repeats: usize) -> Result<Vec<OpSpeed>, RunError> {
    let processor = Processor::of(&parsed.config)?;
    let spec = plan_on(parsed, processor.target())?.spec;
    let program = programs::training(&spec).map_err(LearnError::from)?;
    let mut engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
    let id = engine.load(program.clone()).map_err(LearnError::from)?;
    let batch = random_batch(&spec, 0);
    feed(engine.as_mut(), id, &batch, spec.document_mask, batch.valid_targets).map_err(LearnError::from)?;
    engine.run(id, Part::Whole).map_err(LearnError::from)?;
    let seconds = engine.time_instances(id, repeats.max(1)).map_err(LearnError::from)?;
    let mut rows: BTreeMap<(&str, &str, &str), (usize, f64, f64, f64)> = BTreeMap::new();
    for (instance, seconds) in program.instances.iter().zip(seconds) {
        let op = instance.code.op();
        let (inputs, outputs) = (program.input_types(instance), program.output_types(instance));
        let bytes: usize = inputs.iter().chain(&outputs).map(TensorType::bytes).sum();
        let row = rows.entry((op.name(), &instance.origin.site, instance.origin.role.name())).or_default();
        row.0 += 1;
        row.1 += seconds;
        row.2 += op.cost(&inputs, &outputs).flops;
        row.3 += bytes as f64;
    }
    let speed = |((op, site, role), (count, seconds, flops, bytes)): (_, (usize, f64, f64, f64))| {
        let (op, site, role): (&str, &str, &str) = (op, site, role);
        let (tflops, gigabytes_per_second) = (flops / seconds / 1e12, bytes / seconds / 1e9);
        OpSpeed {
            op: op.into(),
            site: site.into(),
            role: role.into(),
            count,
            seconds,
            tflops,
            gigabytes_per_second,
        }
    };
    let mut all: Vec<OpSpeed> = rows.into_iter().map(|((a, b, c), v)| speed(((a, b, c), v))).collect();
    all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
    Ok(all)
}

/// Measures the step of a run file.
pub fn step(parsed: &Parsed, options: BenchOptions) -> Result<StepSpeed, RunError> {
    let begun = Instant::now();
    let processor = Processor::of(&parsed.config)?;
    let free_before = processor.available_bytes();
    let planned = plan_on(parsed, processor.target())?;
    let (device, target, peak) = (processor.describe(), processor.target(), processor.peak_flops());
    let config: Config = planned.resolved.config;
    let spec = planned.spec;
    let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
    let mut learner = Learner::new(engine, spec.clone(), config.train.seed)?;
    learner.weights().initialize(config.train.seed, config.model.init_std)?;
    let micro_steps = config.train.batch_size / config.train.micro_batch_size();
    let batches: Vec<TokenBatch> = (0..micro_steps as u32).map(|n| random_batch(&spec, n)).collect();
    let valid_targets = batches.iter().map(|b| b.valid_targets).sum();

    let mut number = 0;
    let mut run = |learner: &mut Learner, steps: usize| -> Result<f64, LearnError> {
        let begun = Instant::now();
        for _ in 0..steps {
            let step = Step { number, lr: 1e-4, valid_targets, micro_steps };
            for (n, batch) in batches.iter().enumerate() {
                learner.micro_step(&step, n, batch)?;
            }
            number += 1;
        }
        let ticket = learner.fetch()?;
        learner.collect(ticket)?;
        Ok(begun.elapsed().as_secs_f64() / steps as f64)
    };
    run(&mut learner, 1)?;
    let first_step_seconds = begun.elapsed().as_secs_f64();
    run(&mut learner, options.warmup.max(2))?;
    let mut measured = Vec::with_capacity(options.repeats);
    for _ in 0..options.repeats.max(1) {
        measured.push(run(&mut learner, options.steps.max(1))?);
    }
    let ticket = learner.fetch()?;
    let loss = learner.collect(ticket)?.loss;
    let taken = |free: u64| Some(free_before?.saturating_sub(free));
    let card_bytes = match target {
        Target::Cpu => None,
        Target::Cuda => learner.weights().engine().free_bytes().and_then(taken),
    };
    let mut sorted = measured.clone();
    sorted.sort_by(f64::total_cmp);
    let seconds = sorted[sorted.len() / 2];
    let tokens = config.step_tokens();
    let flops = spec.model.flops_per_token(config.data.seq_len) * tokens as f64 / seconds;
    Ok(StepSpeed {
        device,
        precision: spec.recipe.name().into(),
        tokens,
        seconds,
        measured,
        tokens_per_second: tokens as f64 / seconds,
        tflops: flops / 1e12,
        mfu: peak.map(|peak| flops / peak),
        planned_bytes: learner.memory_bytes() as u64,
        card_bytes,
        first_step_seconds,
        loss,
    })
}

/// Documents of this many tokens, where attention stays within them.
const DOCUMENT_TOKENS: usize = 512;

/// A micro-batch of random tokens.
fn random_batch(spec: &crate::programs::TrainingSpec, n: u32) -> TokenBatch {
    let (sequences, seq_len) = (spec.batch.sequences, spec.batch.seq_len);
    let count = sequences * seq_len;
    let rng = Philox::new(0, n, 0);
    let token = |i: usize| (rng.word(i as u64) % spec.model.vocab_size as u32) as i32;
    let start =
        |i: usize| if spec.document_mask { i % seq_len / DOCUMENT_TOKENS * DOCUMENT_TOKENS } else { 0 };
    TokenBatch {
        batch_size: sequences,
        seq_len,
        tokens: (0..count).map(token).collect(),
        targets: (1..=count).map(token).collect(),
        positions: (0..count).map(|i| (i % seq_len - start(i)) as i32).collect(),
        doc_start: (0..count).map(|i| start(i) as i32).collect(),
        valid_targets: count,
    }
}
