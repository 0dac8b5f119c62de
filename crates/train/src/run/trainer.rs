//! The training loop.

use super::corpus::Corpus;
use super::saved::{Position, Saved};
use super::{Notice, RunError, RunFolder};
use crate::config::{Config, Parsed};
use crate::evaluate::{Evaluator, Tally};
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
    /// It was asked to stop, or its time was up, before its first step; what was made of the data until then is kept.
    StoppedEarly,
}

/// Who watches a run: the terminal, or `()`, who does not.
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

/// Watches nothing.
impl Observer for () {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, _: u64, _: u64) {}
    fn event(&mut self, _: &Event, _: u64) {}
    fn wrote(&mut self, _: &str, _: &Path) {}
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
        Err(RunError::Data(DataError::Interrupted)) => return Ok(Outcome::StoppedEarly),
        opened => opened?,
    };
    let mut watch =
        Watch { stop, begun, limit, step: Duration::ZERO, batch: Duration::ZERO, save: Duration::ZERO };
    let outcome = run.steps(&mut watch, observer)?;
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
    /// Whether this process has seen what is evaluated, whose entropy the position holds.
    pub(super) entropy_is_known: bool,
    /// The tokens of `eval.prompts`.
    pub(super) prompts: Vec<Vec<u32>>,
}

impl Run {
    /// Steps until the end, the time limit or a stop. The state is saved when it returns.
    fn steps(&mut self, watch: &mut Watch<'_>, observer: &mut dyn Observer) -> Result<Outcome, RunError> {
        let (every, eval_every) = (self.config.checkpoint.every, self.config.eval.every.unwrap_or(0));
        if self.at.evaluation.is_some() {
            if let Some(outcome) = self.evaluate(watch, observer)? {
                return Ok(outcome);
            }
            // The checkpoint of this step still says that the evaluation is due.
            self.saved.outdate();
            self.save(watch, observer)?;
        }
        let mut window = Window::open();
        let mut nonfinite_in_a_row = 0;
        while self.at.step < self.steps {
            let step_begun = Instant::now();
            let lr = self.schedule.lr(self.at.step);
            let result = self.step(lr)?;
            self.at.step += 1;
            let took = step_begun.elapsed();
            self.at.train_seconds += took.as_secs_f64();
            watch.step = watch.step.max(took);
            window.steps += 1;
            window.busy += took;
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
                self.at.evaluation = Some(Tally::default());
                if let Some(outcome) = self.evaluate(watch, observer)? {
                    return Ok(outcome);
                }
            }
            let ended = watch.ended(watch.step + watch.save).filter(|_| !last);
            // Skipped steps change nothing that is worth a checkpoint, and must not push out the good ones.
            let worth_saving = due(self.at.step, every) && nonfinite_in_a_row == 0;
            if worth_saving || last || ended.is_some() {
                self.save(watch, observer)?;
            }
            if let Some(outcome) = ended {
                return Ok(outcome);
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

    /// Makes the evaluation that is due, or what is left of it. Where it is asked to stop meanwhile, it saves how far it is and says how
    /// the run ends.
    fn evaluate(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let due = self.at.evaluation.take();
        let (Some(mut tally), Some(validation), Some(evaluator)) =
            (due, self.corpus.validation.clone(), self.evaluator)
        else {
            return Ok(None);
        };
        let tokens = self.config.eval.tokens.unwrap_or(0);
        let sequences = if tokens == 0 { u64::MAX } else { tokens.div_ceil(self.config.data.seq_len as u64) };
        let (mut ended, mut batch_begun) = (None, None);
        let mut go_on = || {
            if let Some(begun) = batch_begun.replace(Instant::now()) {
                watch.batch = watch.batch.max(begun.elapsed());
            }
            ended = watch.ended(watch.batch + watch.save);
            if ended.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let validation = validation.at_most(sequences);
        let _ = evaluator.add(self.learner.weights(), &validation, &mut tally, &mut go_on)?;
        if ended.is_some() {
            // JSON has no infinities: such a sum is made again.
            self.at.evaluation = Some(if tally.loss_sum.is_finite() { tally } else { Tally::default() });
            self.saved.outdate();
            self.save(watch, observer)?;
            return Ok(ended);
        }
        if !self.entropy_is_known {
            // Once a process: the run file may name other data by now.
            self.at.unigram_entropy = Some(validation.unigram_entropy_nats()?);
            self.entropy_is_known = true;
        }
        let loss = tally.mean();
        let bits = loss * tally.targets as f64 / std::f64::consts::LN_2;
        let bits_per_byte = validation.text_bytes()?.map(|bytes| bits / bytes);
        self.record(EvalMetrics { step: self.at.step, loss, bits_per_byte }, observer)?;
        if self.is_best(loss) {
            self.at.best = Some((self.at.step, loss));
            self.save(watch, observer)?;
        }
        Ok(None)
    }

    /// Whether the state that was just evaluated is to be kept as the best: its loss is the lowest of those that were, and it is saved
    /// anyway or its turn has come. Without turns a run that still learns fast would do little but save.
    fn is_best(&self, loss: f64) -> bool {
        let (step, every) = (self.at.step, self.config.checkpoint.every);
        let (last, lowest) = self.at.best.unwrap_or((0, f64::INFINITY));
        let is_saved_anyway = due(step, every) || step == self.steps;
        let is_in_turn = every > 0 && step - last >= every;
        self.config.checkpoint.keep_best == Some(true) && loss < lowest && (is_saved_anyway || is_in_turn)
    }

    fn save(&mut self, watch: &mut Watch<'_>, observer: &mut dyn Observer) -> Result<(), RunError> {
        let begun = Instant::now();
        self.sink.sync()?;
        let saved = self.saved.save(&mut self.learner, &self.corpus.loader, &self.config, &self.at)?;
        watch.save = watch.save.max(begun.elapsed());
        match saved {
            Some(path) => self.record(Checkpoint { step: self.at.step, path }, observer),
            None => Ok(()),
        }
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

/// What may end a run before its last step: its signal and its clock. It ends early enough to save within its time.
struct Watch<'a> {
    stop: &'a AtomicBool,
    begun: Instant,
    limit: Option<Duration>,
    /// What a step, a batch of an evaluation and a save took at most.
    step: Duration,
    batch: Duration,
    save: Duration,
}

impl Watch<'_> {
    /// How the run ends now; nothing where it may go on with what takes `next`.
    fn ended(&self, next: Duration) -> Option<Outcome> {
        if self.stop.load(Ordering::Relaxed) {
            return Some(Outcome::Stopped);
        }
        let is_over = self.limit.is_some_and(|limit| self.begun.elapsed() + next >= limit);
        is_over.then_some(Outcome::TimeLimit)
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
