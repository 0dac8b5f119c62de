//! The time that a whole run takes.

use super::{Device, RateSource, Timeline};
use crate::error::PlanError;
use crate::planned::Planned;
use std::fmt;
use xtrain_model::decoder::Loss;
use xtrain_program::Program;
use xtrain_report::metrics::format;
use xtrain_step::error::LearnError;
use xtrain_step::layout::Layout;
use xtrain_step::programs;
use xtrain_step::scored_shape::ScoredShape;

/// The estimated speed of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Tokens per second in training steps.
    pub tokens_per_second: f64,
    /// Model FLOPs per second (PaLM's count).
    pub flops: f64,
    /// MFU: `flops` as a fraction of the peak of all devices, if that is known.
    pub mfu: Option<f64>,
}

impl Speed {
    /// The speed of the run `planned`, whose step takes the time of `timeline`, on `device`.
    pub fn estimate(planned: &Planned, timeline: &Timeline, device: &Device) -> Speed {
        let spec = &planned.spec;
        let (step_seconds, tokens) = (timeline.seconds(), planned.resolved.config.step_tokens() as f64);
        let flops = spec.model.flops_per_token(spec.batch.seq_len) * tokens / step_seconds;
        let ranks = spec.parallel.rank.world_size as f64;
        let mfu = device.peak_flops.map(|peak| flops / (peak * ranks));
        Speed { step_seconds, tokens_per_second: tokens / step_seconds, flops, mfu }
    }
}

/// The estimated time of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunTime {
    /// Speed of training steps.
    pub speed: Speed,
    /// Seconds of the remaining steps and evaluations, and of tasks if their tokens are known, if the run's
    /// length is known.
    pub seconds: Option<f64>,
    source: RateSource,
    /// True if the ranks are on several nodes.
    spans_nodes: bool,
    /// True if the run scores tasks whose tokens are not known yet.
    lacks_tasks: bool,
}

/// Time above which a run gets a warning.
const LONG_SECONDS: f64 = 86_400.0;

impl RunTime {
    /// The remaining time of the run `planned`, whose step is `program`, on `device` after `done` steps.
    pub fn estimate(
        planned: &Planned,
        program: &Program,
        device: &Device,
        done: u64,
    ) -> Result<RunTime, PlanError> {
        let micro_steps = planned.micro_steps();
        RunTime::of_step(planned, &Timeline::new(program, device, micro_steps), device, done)
    }

    /// As [`RunTime::estimate`], for a step that takes the time of `timeline`.
    pub fn of_step(
        planned: &Planned,
        timeline: &Timeline,
        device: &Device,
        done: u64,
    ) -> Result<RunTime, PlanError> {
        let config = &planned.resolved.config;
        let speed = Speed::estimate(planned, timeline, device);
        let seconds = match planned.resolved.steps {
            Some(steps) => {
                let left = steps.saturating_sub(done);
                let every = config.eval.every.unwrap_or(0);
                let at_end = u64::from(config.eval.at_end);
                // With `eval.tokens = 0`, only the validation data tells how long an evaluation is.
                let is_known = every > 0 && config.eval.tokens.unwrap_or(0) > 0;
                let evaluations = if is_known { (left / every).max(at_end) } else { 0 };
                let each = if evaluations > 0 { evaluation_seconds(planned, device)? } else { 0.0 };
                let tasks = tasks_seconds(planned, device, steps, done)?;
                Some(left as f64 * speed.step_seconds + evaluations as f64 * each + tasks)
            }
            None => None,
        };
        let spans_nodes = device.network.spans_nodes(planned.spec.parallel.rank.world_size);
        let lacks_tasks = !config.eval.tasks.is_empty() && planned.scored.is_empty();
        Ok(RunTime { speed, seconds, source: device.source, spans_nodes, lacks_tasks })
    }

    /// The time in words, without its source.
    pub fn without_source(&self) -> String {
        let Speed { step_seconds, tokens_per_second, flops, mfu } = self.speed;
        let all =
            self.seconds.map_or(String::new(), |seconds| format!("about {}; ", format::duration(seconds)));
        let step = format::seconds(step_seconds);
        let reached = match mfu {
            Some(mfu) => format!("{} MFU", format::percent(mfu, 1)),
            None => format!("{} TFLOP/s", format::significant(flops / 1e12)),
        };
        format!("{all}{step} a step, {} tokens/s, {reached}", format::count(tokens_per_second))
    }

    /// True if the run takes more than a day.
    pub fn is_long(&self) -> bool {
        self.seconds.is_some_and(|seconds| seconds > LONG_SECONDS)
    }
}

/// Seconds of an evaluation.
fn evaluation_seconds(planned: &Planned, device: &Device) -> Result<f64, PlanError> {
    let (spec, config) = (&planned.spec, &planned.resolved.config);
    let mask = config.data.document_mask();
    let sources = spec.loss.sources.max(1);
    let loss = Loss { z_loss: 0.0, sources, counts_matches: true, balancing: None, ..spec.loss };
    let layout = Layout::from_spec(spec).map_err(LearnError::from)?;
    let program = programs::evaluation(&spec.model, &spec.numerics(), &layout, spec.batch, mask, loss);
    let program = program.map_err(LearnError::from)?;
    let sequences = config.eval.sequences(config.data.seq_len).div_ceil(spec.batch.sequences as u64);
    let of_a_rank = sequences.div_ceil(spec.parallel.data_rank().world_size as u64);
    Ok(of_a_rank as f64 * Timeline::new(&program, device, 1).seconds())
}

/// Seconds of the tasks that are scored after the steps from `done` to `steps`.
fn tasks_seconds(planned: &Planned, device: &Device, steps: u64, done: u64) -> Result<f64, PlanError> {
    let every = planned.resolved.config.eval.tasks_every;
    let until = |step: u64| step.checked_div(every).unwrap_or(0);
    let at_end = u64::from(steps > done && steps.checked_rem(every) != Some(0));
    let times = until(steps).saturating_sub(until(done)) + at_end;
    let spec = &planned.spec;
    let programs = programs::scored(spec).map_err(LearnError::from)?;
    let of_shape = |((shape, &sequences), program): ((&ScoredShape, &u64), &Program)| {
        let batches = sequences.div_ceil(shape.sequences(spec.scored_tokens()) as u64);
        let of_a_rank = batches.div_ceil(spec.parallel.data_rank().world_size as u64);
        of_a_rank as f64 * Timeline::new(program, device, 1).seconds()
    };
    Ok(times as f64 * planned.scored.iter().zip(&programs).map(of_shape).sum::<f64>())
}

impl fmt::Display for RunTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}", self.without_source(), self.source)?;
        if self.spans_nodes {
            f.write_str("; not measured on several nodes")?;
        }
        if self.lacks_tasks {
            f.write_str("; without eval.tasks, whose tokens are not known yet")?;
        }
        f.write_str(")")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::collections::BTreeMap;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;
    use xtrain_step::scored_shape::ScoredLength;

    #[test]
    fn the_time_of_a_run_includes_its_tasks_or_says_that_it_does_not() {
        let text = "[model]\ndim = 256\nlayers = 2\nheads = 4\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\nseq_len = 128\n\
                    [train]\nsteps = 10\nbatch_size = 4\nmicro_batch_size = 4\n[eval]\ntasks = ['t.jsonl']\ntasks_every = 4\n";
        let parsed = Config::parse::<&str>(Path::new("run.toml"), text.as_bytes(), &[]).expect("a run file");
        let device = Device::model("h100").expect("it is in the table");
        let unknown = plan_alone(&parsed, Target::Cuda, Rank::ALONE).expect("a plan");
        let program = programs::training(&unknown.spec).expect("a step");
        let time =
            |planned: &Planned, done| RunTime::estimate(planned, &program, &device, done).expect("a time");
        let without = time(&unknown, 0);
        assert!(without.to_string().contains("without eval.tasks"), "{without}");
        // Ten sequences of up to 128 tokens are three batches of 512 tokens.
        let shape = ScoredShape::of(ScoredLength { inputs: 120, targets: 3 });
        let planned = unknown.clone().with_scored(BTreeMap::from([(shape, 10)]));
        let scored = programs::scored(&planned.spec).expect("programs");
        let batch = Timeline::new(&scored[0], &device, 1).seconds();
        let changed = planned.clone().changed(|config| config.train.seed += 1).expect("a plan");
        // After steps 4, 8 and 10.
        for (done, scorings) in [(0, 3.0), (4, 2.0), (7, 2.0), (8, 1.0), (10, 0.0)] {
            for planned in [&planned, &changed] {
                let tasks = time(planned, done).seconds.zip(time(&unknown, done).seconds);
                let tasks = tasks.map(|(with, without)| with - without).expect("a length");
                assert!((tasks - scorings * 3.0 * batch).abs() < 1e-9 * (1.0 + tasks), "{done}: {tasks}");
            }
        }
        assert!(!time(&planned, 0).to_string().contains("without"), "{}", time(&planned, 0));
    }
}
