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
    tokens: Tokens,
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

    /// Launches the `n`-th micro-step of `step`. It is the `launched`-th of all.
    pub(super) fn micro_step(&mut self, step: &Step, n: usize, launched: usize) -> Result<(), RunError> {
        let StepBench { learner, tokens, .. } = self;
        let batch = tokens.batch(learner.spec(), launched)?;
        learner.name_sources(&tokens.sources(learner.spec(), launched))?;
        Ok(learner.micro_step(step, n, &batch)?)
    }
}

/// Measures the step of a run file as a run makes it: inputs are written for each step, and results are
/// fetched and read late.
pub fn step(parsed: &Parsed, options: BenchOptions) -> Result<StepSpeed, RunError> {
    let begun = Instant::now();
    let mut bench = StepBench::new(parsed)?;
    let train = &bench.config.train;
    let micro_steps = train.batch_size / train.micro_batch_size();
    let step_tokens = bench.config.step_tokens();

    let (mut number, mut loss) = (0, f64::NAN);
    let mut run = |bench: &mut StepBench, steps: usize| -> Result<f64, RunError> {
        let begun = Instant::now();
        let mut flying = VecDeque::new();
        for _ in 0..steps {
            let step = Step { number, lr: LR, valid_targets: step_tokens as usize, micro_steps };
            for n in 0..micro_steps {
                bench.micro_step(&step, n, number as usize * micro_steps + n)?;
            }
            flying.push_back(bench.learner.fetch()?);
            number += 1;
            if flying.len() > IN_FLIGHT
                && let Some(oldest) = flying.pop_front()
            {
                loss = bench.learner.collect(oldest)?.loss;
            }
        }
        for ticket in flying {
            loss = bench.learner.collect(ticket)?.loss;
        }
        Ok(begun.elapsed().as_secs_f64() / steps as f64)
    };
    run(&mut bench, 1)?;
    let first_step_seconds = begun.elapsed().as_secs_f64();
    run(&mut bench, options.warmup.max(2))?;
    let mut measured = Vec::new();
    for _ in 0..options.repeats.max(1) {
        measured.push(run(&mut bench, options.steps.max(1))?);
    }
    let StepBench { mut learner, config, tokens, device, target, peak_flops, free_before } = bench;
    let taken = |free: u64| Some(free_before?.saturating_sub(free));
    let card_bytes = match target {
        Target::Cpu => None,
        Target::Cuda => learner.weights().engine().free_bytes().and_then(taken),
    };
    let planned_bytes = learner.memory_bytes() as u64;
    let spec = learner.spec().clone();
    drop(learner);
    let ceiling = ceiling(&config)?;
    let seconds = median(&measured);
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn losses_of_a_mixture_are_summed_by_source() {
        let run = r#"
            [model]
            dim = 16
            layers = 1
            heads = 2
            [data]
            train = [{ path = "a.txt", weight = 1.0 }, { path = "b.txt", weight = 1.0 }]
            tokenizer = "bytes"
            seq_len = 8
            [train]
            steps = 1
            batch_size = 2
            device = "cpu"
        "#;
        let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), &[""; 0]).expect("it is valid");
        let mut bench = StepBench::new(&parsed).expect("it fits");
        let step = Step { number: 0, lr: LR, valid_targets: 16, micro_steps: 1 };
        bench.micro_step(&step, 0, 0).expect("a micro-step");
        let ticket = bench.learner.fetch().expect("a result");
        let losses = bench.learner.collect(ticket).expect("a result").source_losses;
        assert!(losses.len() == 2 && losses.iter().all(|&loss| loss > 0.0), "{losses:?}");
    }
}
