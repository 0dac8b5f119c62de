//! The training step of a run file, measured as a run makes it.

use super::op_bench::{Ceiling, OpBench, OpBenchOptions};
use super::tokens::Tokens;
use serde::Serialize;
use std::collections::VecDeque;
use std::time::Instant;
use xtrain_config::{Config, ParallelConfig, Parsed};
use xtrain_runtime::Checks;
use xtrain_train::engine::{Processor, Target};
use xtrain_train::error::{LearnError, RunError};
use xtrain_train::estimate::Device;
use xtrain_train::learner::{IN_FLIGHT, Learner, Step};
use xtrain_train::slower::{self, median};
use xtrain_train::spec::plan_on;
use xtrain_train::{choose, fit};

/// Length of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct BenchOptions {
    /// Steps before the measurement: what is done once is done in them.
    pub warmup: usize,
    /// Measurements, of which the median counts.
    pub repeats: usize,
    /// Steps of a measurement.
    pub steps: usize,
}

/// Speed of a training step.
#[derive(Clone, Debug, Serialize)]
pub struct StepSpeed {
    /// Its device.
    pub device: String,
    /// `fp32`, `bf16`, ..
    pub precision: String,
    /// Source of the tokens: `shards`, those of the run file, or `random`.
    pub data: &'static str,
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
    /// Their share of the GPU's dense bf16 peak, if that is known.
    pub mfu: Option<f64>,
    /// Best rates of the processor, measured after the steps.
    pub ceiling: Ceiling,
    /// The rate of operations as a share of the ceiling's GEMM.
    pub of_product: f64,
    /// Bytes of the planned arena.
    pub planned_bytes: u64,
    /// Bytes of GPU memory besides the context: the arena, libraries, recorded graphs.
    pub card_bytes: Option<u64>,
    /// Seconds from opening the processor to the end of the first step.
    pub first_step_seconds: f64,
    /// The loss of the last step: one that is not finite was not measured well.
    pub loss: f64,
}

/// A learner of a run file with fresh weights, and what it runs on.
pub(super) struct StepBench {
    pub(super) learner: Learner,
    config: Config,
    pub(super) tokens: Tokens,
    device: String,
    target: Target,
    /// Operations a second that the processor can do at most, where that is known.
    peak_flops: Option<f64>,
    /// Bytes that were available before, if the processor tells.
    free_before: Option<u64>,
}

impl StepBench {
    pub(super) fn new(parsed: &Parsed) -> Result<StepBench, RunError> {
        let processor = Processor::for_config(&parsed.config)?;
        let mut parsed = parsed.clone();
        // The step of one process, which measures the device.
        parsed.config.parallel = ParallelConfig::default();
        let planned = plan_on(&parsed, processor.target())?;
        let device = Device::of(&processor, planned.spec.recipe, rayon::current_num_threads());
        let (planned, choice) = choose::decide(planned, &device)?;
        if let Some(choice) = choice.filter(|choice| !choice.is_usual()) {
            tracing::info!("chosen: {choice}");
        }
        let planned = slower::decide(planned, &processor)?;
        let free_before = processor.available_bytes();
        fit::check(&planned, &processor, 1)?;
        let (device, target, peak_flops) = (processor.describe(), processor.target(), processor.peak_flops());
        let config: Config = planned.resolved.config;
        let tokens = Tokens::open(&config, planned.spec.model.vocab_size)?;
        let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
        let mut learner = Learner::new(engine, planned.spec, config.train.seed)?;
        learner.weights().initialize(config.train.seed, config.model.init_std)?;
        Ok(StepBench { learner, config, tokens, device, target, peak_flops, free_before })
    }
}

/// Measures the step of a run file as a run makes it: inputs are written for each step, and results are
/// fetched and read late.
pub fn step(parsed: &Parsed, options: BenchOptions) -> Result<StepSpeed, RunError> {
    let begun = Instant::now();
    let StepBench { mut learner, config, tokens, device, target, peak_flops, free_before } =
        StepBench::new(parsed)?;
    let spec = learner.spec().clone();
    let micro_steps = config.train.batch_size / config.train.micro_batch_size();
    let valid_targets = config.step_tokens() as usize;

    let (mut number, mut loss) = (0, f64::NAN);
    let mut run = |learner: &mut Learner, steps: usize| -> Result<f64, RunError> {
        let begun = Instant::now();
        let mut flying = VecDeque::new();
        for _ in 0..steps {
            let step = Step { number, lr: LR, valid_targets, micro_steps };
            for n in 0..micro_steps {
                let batch = tokens.batch(&spec, number as usize * micro_steps + n)?;
                learner.micro_step(&step, n, &batch)?;
            }
            flying.push_back(learner.fetch()?);
            number += 1;
            if flying.len() > IN_FLIGHT
                && let Some(oldest) = flying.pop_front()
            {
                loss = learner.collect(oldest)?.loss;
            }
        }
        for ticket in flying {
            loss = learner.collect(ticket)?.loss;
        }
        Ok(begun.elapsed().as_secs_f64() / steps as f64)
    };
    run(&mut learner, 1)?;
    let first_step_seconds = begun.elapsed().as_secs_f64();
    run(&mut learner, options.warmup.max(2))?;
    let mut measured = Vec::new();
    for _ in 0..options.repeats.max(1) {
        measured.push(run(&mut learner, options.steps.max(1))?);
    }
    let taken = |free: u64| Some(free_before?.saturating_sub(free));
    let card_bytes = match target {
        Target::Cpu => None,
        Target::Cuda => learner.weights().engine().free_bytes().and_then(taken),
    };
    let planned_bytes = learner.memory_bytes() as u64;
    drop(learner);
    let ceiling = ceiling(&config)?;
    let seconds = median(&measured);
    let step_tokens = config.step_tokens();
    let flops = spec.model.flops_per_token(config.data.seq_len) * step_tokens as f64 / seconds;
    Ok(StepSpeed {
        device,
        precision: spec.recipe.name().into(),
        data: tokens.name(),
        tokens: step_tokens,
        seconds,
        measured,
        tokens_per_second: step_tokens as f64 / seconds,
        tflops: flops / 1e12,
        mfu: peak_flops.map(|peak| flops / peak),
        ceiling,
        of_product: flops / 1e12 / ceiling.tflops,
        planned_bytes,
        card_bytes,
        first_step_seconds,
        loss,
    })
}

/// Best rates of a run's processor, in the run's precision.
pub(super) fn ceiling(config: &Config) -> Result<Ceiling, RunError> {
    let (device, recipe) = (config.train.device, config.precision.recipe);
    Ok(OpBench::new(OpBenchOptions { device, recipe, repeats: 5, runs: 10 })?.ceiling)
}

/// The learning rate of steps that are measured.
pub(super) const LR: f64 = 1e-4;
