//! The training loop.

use super::corpus::Corpus;
use super::saved::{Position, Saved};
use super::{Notice, RunError, RunFolder};
use crate::config::{Config, Parsed};
use crate::evaluate::Evaluator;
use crate::exchange;
use crate::learner::{Learner, StepResult};
use crate::metrics::{Checkpoint, EvalMetrics, Event, MetricsSink, SkippedStep, StepMetrics};
use crate::schedule::Schedule;
use crate::weights::LearnError;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use xtrain_data::DataError;
use xtrain_runtime::EngineError;

/// Whether a run begins or goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// In a folder that is empty or not there.
    New,
    /// From the latest complete checkpoint, else from the start.
    Resume,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// It was asked to stop; the state is saved.
    Stopped,
    /// Its time was up; the state is saved.
    TimeLimit,
}

/// Who watches a run: the terminal.
pub trait Observer {
    /// Something that happens before the first step; [`ControlFlow::Break`] stops it.
    fn notice(&mut self, notice: Notice) -> ControlFlow<()>;
    /// The run is about to take its first step.
    fn started(&mut self, config: &Config, model: &str, first_step: u64, steps: u64);
    /// A step is done: how many are, of how many.
    fn stepped(&mut self, done: u64, steps: u64);
    /// Something that is also in the metrics files.
    fn event(&mut self, event: &Event, steps: u64);
    /// A file or folder was written at the end.
    fn wrote(&mut self, what: &str, path: &Path);
}

/// Runs the run file `parsed` to its end, to its time limit, or until `stop` is set.
pub fn train(
    parsed: &Parsed,
    start: Start,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let begun = Instant::now();
    let limit = parsed.config.train.max_time.map(|t| t.duration());
    let time_is_up = || limit.is_some_and(|limit| begun.elapsed() >= limit);
    let opened = Run::open(parsed, start, observer, &time_is_up);
    let mut run = match opened {
        // What is tokenized until now is kept, like the checkpoint of a run that has begun.
        Err(RunError::Data(DataError::Interrupted)) if time_is_up() => return Ok(Outcome::TimeLimit),
        Err(RunError::Data(DataError::Interrupted)) => return Ok(Outcome::Stopped),
        opened => opened?,
    };
    let outcome = run.steps(stop, begun, observer)?;
    run.finish(outcome, observer)?;
    Ok(outcome)
}

/// A run that is open: `open` makes it, `finish` ends it.
pub(super) struct Run {
    pub(super) config: Config,
    pub(super) steps: u64,
    pub(super) folder: RunFolder,
    pub(super) corpus: Corpus,
    pub(super) learner: Learner,
    pub(super) schedule: Schedule,
    pub(super) saved: Saved,
    pub(super) sink: MetricsSink,
    pub(super) at: Position,
    pub(super) hf: exchange::Identity,
    pub(super) memory_total: Option<u64>,
    pub(super) evaluator: Option<Evaluator>,
    /// The tokens of `eval.prompts`.
    pub(super) prompts: Vec<Vec<u32>>,
}

impl Run {
    /// Steps until the end, the time limit or a stop. The state is saved when it returns.
    fn steps(
        &mut self,
        stop: &AtomicBool,
        begun: Instant,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        let limit = self.config.train.max_time.map(|t| t.duration());
        let (every, eval_every) = (self.config.checkpoint.every, self.config.eval.every.unwrap_or(0));
        let mut window = Window::open();
        // What a step took at most, with its evaluation and its checkpoint.
        let mut longest = Duration::ZERO;
        let mut nonfinite_in_a_row = 0;
        while self.at.step < self.steps {
            let step_begun = Instant::now();
            let lr = self.schedule.lr(self.at.step);
            let result = self.step(lr)?;
            self.at.step += 1;
            self.at.train_seconds += step_begun.elapsed().as_secs_f64();
            window.steps += 1;
            window.busy += step_begun.elapsed();
            observer.stepped(self.at.step, self.steps);
            if result.skipped {
                self.at.skipped += 1;
                nonfinite_in_a_row += 1;
                self.record(self.skipped(result), observer)?;
                self.stop_if_diverged(nonfinite_in_a_row)?;
            } else {
                nonfinite_in_a_row = 0;
            }
            if self.at.step.is_multiple_of(self.config.log.every)
                || self.at.step == self.steps
                || self.at.step == 1
            {
                let metrics = self.metrics(result, lr, &window);
                self.record(metrics, observer)?;
                window = Window::open();
            }
            let last = self.at.step == self.steps;
            let evaluate = if last { self.config.eval.at_end } else { due(self.at.step, eval_every) };
            if evaluate {
                self.evaluate(observer)?;
            }
            longest = longest.max(step_begun.elapsed());
            let time_is_up = limit.is_some_and(|limit| begun.elapsed() + longest >= limit);
            let stopped = stop.load(Ordering::Relaxed);
            // Skipped steps change nothing that is worth a checkpoint, and must not push out the good ones.
            let worth_saving = due(self.at.step, every) && nonfinite_in_a_row == 0;
            if worth_saving || last || stopped || time_is_up {
                self.save(observer)?;
            }
            longest = longest.max(step_begun.elapsed());
            match (last, stopped, time_is_up) {
                (true, ..) => {}
                (_, true, _) => return Ok(Outcome::Stopped),
                (_, _, true) => return Ok(Outcome::TimeLimit),
                _ => {}
            }
        }
        Ok(Outcome::Finished)
    }

    /// One optimizer step: all its micro-batches, then the update.
    fn step(&mut self, lr: f64) -> Result<StepResult, RunError> {
        let (batch_size, micro) = (self.config.train.batch_size, self.config.train.micro_batch_size());
        let first = self.at.step * batch_size as u64;
        let targets = self.corpus.loader.valid_targets(first..first + batch_size as u64) as usize;
        for at in (0..batch_size).step_by(micro) {
            let batch = self.corpus.loader.batch(first + at as u64, micro)?;
            let first_token = at * self.config.data.seq_len;
            let done = self.learner.micro_step(&batch, self.at.step, first_token, targets);
            done.map_err(|e| self.during_step(e))?;
        }
        self.learner.update(lr).map_err(|e| self.during_step(e))
    }

    /// What stopped the step that is being made.
    fn during_step(&self, error: LearnError) -> RunError {
        match error {
            LearnError::Engine(EngineError::NonFinite { .. }) => RunError::Diverged(format!(
                "step {}: {error}; look at the numbers that it reads: a lower optimizer.lr, or other data or weights to start from, \
                 keep them small",
                self.at.step + 1
            )),
            other => other.into(),
        }
    }

    fn evaluate(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let (Some(validation), Some(evaluator)) = (self.corpus.validation.clone(), self.evaluator) else {
            return Ok(());
        };
        let tokens = self.config.eval.tokens.unwrap_or(0);
        let windows = if tokens == 0 { u64::MAX } else { tokens.div_ceil(self.config.data.seq_len as u64) };
        let (loss, _) = evaluator.mean_loss(self.learner.weights(), &validation.at_most(windows))?;
        let bits_per_byte = self.corpus.bytes_per_token.map(|bytes| loss / std::f64::consts::LN_2 / bytes);
        self.record(EvalMetrics { step: self.at.step, loss, bits_per_byte }, observer)?;
        let is_best = loss.is_finite() && self.at.best.is_none_or(|(_, best)| loss < best);
        if is_best {
            self.at.best = Some((self.at.step, loss));
            if self.config.checkpoint.keep_best == Some(true) {
                self.save(observer)?;
            }
        }
        Ok(())
    }

    fn save(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        self.sink.sync()?;
        let Some(path) = self.saved.save(&mut self.learner, &self.corpus.loader, &self.config, &self.at)?
        else {
            return Ok(());
        };
        self.record(Checkpoint { step: self.at.step, path }, observer)
    }

    /// Shows an event and writes it to the metrics files.
    pub(super) fn record(
        &mut self,
        event: impl Into<Event>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let event = event.into();
        observer.event(&event, self.steps);
        Ok(self.sink.record(event)?)
    }

    fn metrics(&mut self, result: StepResult, lr: f64, window: &Window) -> StepMetrics {
        let step_tokens = self.config.step_tokens();
        let seconds = window.busy.as_secs_f64().max(1e-9) / window.steps as f64;
        let tokens_per_second = step_tokens as f64 / seconds;
        let flops = self.learner.spec().model.flops_per_token(self.config.data.seq_len);
        let samples = self.at.step * self.config.train.batch_size as u64;
        let epoch = self.corpus.loader.epochs(samples).into_iter().fold(0.0, f64::max);
        StepMetrics {
            step: self.at.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            memory_bytes: self.learner.memory_bytes() as u64,
            memory_total_bytes: self.memory_total,
            tokens_per_second,
            tflops: tokens_per_second * flops / 1e12,
            mfu: None,
            tokens: self.at.step * step_tokens,
            epoch,
            step_ms: seconds * 1e3,
            skipped: self.at.skipped,
            seconds_left: Some((self.steps - self.at.step) as f64 * seconds),
        }
    }

    fn skipped(&self, result: StepResult) -> SkippedStep {
        SkippedStep {
            step: self.at.step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            skipped: self.at.skipped,
        }
    }

    fn stop_if_diverged(&self, in_a_row: u64) -> Result<(), RunError> {
        let limit = self.config.train.max_nonfinite_steps;
        if limit == 0 || in_a_row < limit {
            return Ok(());
        }
        Err(RunError::Diverged(format!(
            "step {}: the loss or the gradient norm was not finite in {in_a_row} steps in a row; lower optimizer.lr and go on with --resume from \
             the latest checkpoint in {} (delete it to go on from the one before), or find the operation with train.check_numerics = true",
            self.at.step,
            self.folder.checkpoints().display()
        )))
    }
}

/// The time of the steps since the last report.
struct Window {
    steps: u64,
    busy: Duration,
}

impl Window {
    fn open() -> Self {
        Window { steps: 0, busy: Duration::ZERO }
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
