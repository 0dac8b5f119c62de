//! The time that a whole run takes.

use super::{Device, Source, Timeline};
use crate::error::{LearnError, RunError};
use crate::layout::Layout;
use crate::programs;
use crate::spec::Planned;
use std::fmt;
use xtrain_model::decoder::Loss;
use xtrain_program::Program;
use xtrain_report::metrics::format;

/// The estimated time of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunTime {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Tokens per second in training steps.
    pub tokens_per_second: f64,
    /// Model FLOPs per second (PaLM's count).
    pub flops: f64,
    /// MFU: `flops` as a fraction of the device's peak, if that is known.
    pub mfu: Option<f64>,
    /// Seconds of the remaining steps and evaluations, if the run's length is known.
    pub seconds: Option<f64>,
    source: Source,
    /// The bandwidths of collectives, if several ranks share the step.
    network: Option<String>,
}

/// Time above which a run gets a warning.
const LONG_SECONDS: f64 = 86_400.0;

impl RunTime {
    /// The remaining time of the run `planned`, whose step is `program`, on `device` after `done` steps.
    pub fn of(planned: &Planned, program: &Program, device: &Device, done: u64) -> Result<RunTime, RunError> {
        let (spec, config) = (&planned.spec, &planned.resolved.config);
        let (ranks, micro_steps) = (spec.parallel.world_size, spec.micro_steps(config.train.batch_size));
        let step_seconds = Timeline::new(program, device, micro_steps).seconds();
        let tokens = config.step_tokens() as f64;
        let flops = spec.model.flops_per_token(spec.batch.seq_len) * tokens / step_seconds;
        let seconds = match planned.resolved.steps {
            Some(steps) => {
                let left = steps.saturating_sub(done);
                let every = config.eval.every.unwrap_or(0);
                let at_end = u64::from(config.eval.at_end);
                // With `eval.tokens = 0`, only the validation data tells how long an evaluation is.
                let is_known = every > 0 && config.eval.tokens.unwrap_or(0) > 0;
                let evaluations = if is_known { (left / every).max(at_end) } else { 0 };
                let each = if evaluations > 0 { evaluation_seconds(planned, device)? } else { 0.0 };
                Some(left as f64 * step_seconds + evaluations as f64 * each)
            }
            None => None,
        };
        Ok(RunTime {
            step_seconds,
            tokens_per_second: tokens / step_seconds,
            flops,
            mfu: device.peak_flops.map(|peak| flops / (peak * ranks as f64)),
            seconds,
            source: device.source,
            network: (ranks > 1).then(|| device.network.describe(ranks)),
        })
    }

    /// True if the run takes more than a day.
    pub fn is_long(&self) -> bool {
        self.seconds.is_some_and(|seconds| seconds > LONG_SECONDS)
    }
}

/// Seconds of an evaluation.
fn evaluation_seconds(planned: &Planned, device: &Device) -> Result<f64, RunError> {
    let (spec, config) = (&planned.spec, &planned.resolved.config);
    let mask = config.data.document_mask;
    let loss = Loss { z_loss: 0.0, sources: 0, balancing: None, ..spec.loss };
    let layout = Layout::of(spec).map_err(LearnError::from)?;
    let program = programs::evaluation(&spec.model, &spec.numerics(), &layout, spec.batch, mask, loss);
    let program = program.map_err(LearnError::from)?;
    let sequences = config.eval.sequences(config.data.seq_len).div_ceil(spec.batch.sequences as u64);
    let of_a_rank = sequences.div_ceil(spec.parallel.world_size as u64);
    Ok(of_a_rank as f64 * Timeline::new(&program, device, 1).seconds())
}

impl fmt::Display for RunTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(seconds) = self.seconds {
            write!(f, "about {}, ", format::duration(seconds))?;
        }
        write!(
            f,
            "{} tokens/s, {} TFLOP/s",
            format::count(self.tokens_per_second),
            format::significant(self.flops / 1e12)
        )?;
        if let Some(mfu) = self.mfu {
            write!(f, ", {} MFU", format::percent(mfu, 1))?;
        }
        match &self.network {
            Some(network) => write!(f, " ({}; collectives at {network})", self.source),
            None => write!(f, " ({})", self.source),
        }
    }
}
