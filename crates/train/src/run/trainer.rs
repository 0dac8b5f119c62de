//! The training loop.

use super::open::Opened;
use super::reference::Aside;
use super::snapshot::Saved;
use super::writing::Written;
use crate::corpus::Corpus;
use crate::corpus::Notice;
use crate::error::LearnError;
use crate::error::RunError;
use crate::evaluate::{Evaluator, Tally};
use crate::exchange;
use crate::folder::RunFolder;
use crate::learner::{IN_FLIGHT, Learner, Step, StepResult};
use crate::position::Position;
use crate::profile::{ProfileOptions, Profiler};
use crate::schedule::Schedule;
use crate::spans::{doing, doing_step};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use xtrain_config::{Config, Parsed};
use xtrain_data::DataError;
use xtrain_report::metrics::{Checkpoint, EvalMetrics, Event, MetricsSink, SkippedStep, StepMetrics};
use xtrain_runtime::{EngineError, Ticket};

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
    /// They were done before, and all that their end writes was written: nothing was changed.
    FinishedBefore {
        /// Steps that the run has made.
        done: u64,
        /// Steps that it was asked for now, no more than those.
        steps: u64,
    },
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
    /// The run is about to take its first step; where none is left, to write what is left of its end.
    fn started(&mut self, config: &Config, model: &str, device: &str, first_step: u64, steps: u64);
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
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
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
    train_profiled(parsed, start, None, stop, observer)
}

/// The same, with a trace of some steps in `trace.json` of the run folder.
pub fn train_profiled(
    parsed: &Parsed,
    start: Start,
    profile: Option<ProfileOptions>,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let begun = Instant::now();
    let limit = parsed.config.train.max_time.map(|t| t.duration());
    let time_is_up = || limit.is_some_and(|limit| begun.elapsed() >= limit);
    let opened = Run::open(parsed, start, observer, &time_is_up);
    let mut run = match opened {
        Err(RunError::Data(DataError::Interrupted)) => return Ok(Outcome::StoppedEarly),
        opened => match opened? {
            Opened::Run(run) => run,
            Opened::Finished { done, steps } => return Ok(Outcome::FinishedBefore { done, steps }),
        },
    };
    run.profiler = profile.map(|options| Profiler::new(options, run.at.step, run.steps));
    run.go(Watch::new(stop, begun, limit), observer)
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
    /// What it runs on, for people.
    pub(super) device: String,
    pub(super) memory_total: Option<u64>,
    /// Operations a second that the processor can do at most, where that is known.
    pub(super) peak_flops: Option<f64>,
    pub(super) evaluator: Option<Evaluator>,
    /// Whether this process has seen what is evaluated, whose entropy the position holds.
    pub(super) entropy_is_known: bool,
    /// Where the state is while reference segments are made, if any are.
    pub(super) aside: Option<Aside>,
    /// The tokens of `eval.prompts`.
    pub(super) prompts: Vec<Vec<u32>>,
    /// What makes a trace, where one is asked for.
    pub(super) profiler: Option<Profiler>,
}

impl Run {
    /// Makes the steps that are left, and what comes at their end.
    pub(super) fn go(
        &mut self,
        mut watch: Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        let ended = self.steps(&mut watch, observer);
        // However the steps ended: what is being saved is saved.
        let saved = self.settle(&mut watch, observer);
        if let (Err(_), Err(error)) = (&ended, &saved) {
            tracing::error!("{error}");
        }
        let outcome = ended.and_then(|outcome| saved.map(|()| outcome))?;
        if let Some(profiler) = &mut self.profiler {
            profiler.finish(&mut self.learner, &self.folder, &self.device)?;
        }
        self.finish(outcome, &watch, observer)
    }

    /// Steps until the end, the time limit or a stop. The state is saved, or being saved, when it returns.
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
        if self.at.step < self.steps {
            self.saved.prepare(&mut self.learner);
        }
        let mut flight = Flight::default();
        // A step lasts from the end of the one before, what is told of others in between included.
        let mut step_begun = Instant::now();
        while self.at.step < self.steps {
            if self.is_reference_due(self.at.step) {
                if let Some(outcome) = self.reference(watch, observer)? {
                    return Ok(outcome);
                }
                step_begun = Instant::now();
            }
            if let Some(profiler) = &mut self.profiler {
                let acts = profiler.acts(self.at.step);
                profiler.before_step(self.at.step, &mut self.learner, &self.folder, &self.device)?;
                if acts {
                    step_begun = Instant::now();
                }
            }
            let lr = self.schedule.lr(self.at.step);
            let ticket = self.put_step(self.at.step, lr)?;
            self.at.step += 1;
            flight.steps.push_back(Flying { step: self.at.step, lr, ticket });
            let last = self.at.step == self.steps;
            let evaluate = if last { self.config.eval.at_end } else { due(self.at.step, eval_every) };
            let mut ended = watch.ended(watch.step + self.saving(watch)).filter(|_| !last);
            // Whoever looks at the state wants to know what became of the steps that made it.
            let traced = self.profiler.as_ref().is_some_and(|profiler| profiler.acts(self.at.step));
            let reference = self.is_reference_due(self.at.step);
            let all = last || evaluate || traced || reference || ended.is_some() || due(self.at.step, every);
            let landed = self.land(&mut flight.steps, if all { 0 } else { IN_FLIGHT })?;
            let now = Instant::now();
            let took = now - std::mem::replace(&mut step_begun, now);
            self.at.train_seconds += took.as_secs_f64();
            watch.step = watch.step.max(took);
            flight.waited += took;
            let each = flight.waited / landed.len().max(1) as u32;
            for step in landed {
                flight.waited -= each;
                flight.window.add(each);
                self.tell_step(step, &mut flight, observer)?;
            }
            if self.saved.is_written() {
                self.settle(watch, observer)?;
            }
            if evaluate {
                self.at.evaluation = Some(Tally::default());
                if let Some(outcome) = self.evaluate(watch, observer)? {
                    return Ok(outcome);
                }
                ended = ended.or_else(|| watch.ended(watch.step + self.saving(watch))).filter(|_| !last);
                step_begun = Instant::now();
            }
            // Skipped steps change nothing that is worth a checkpoint, and must not push out the good ones.
            let worth_saving = due(self.at.step, every) && flight.nonfinite_in_a_row == 0;
            if worth_saving || last || ended.is_some() {
                self.save(watch, observer)?;
                step_begun = Instant::now();
            }
            if let Some(outcome) = ended {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Finished)
    }

    /// Puts the optimizer step that follows `number` others in line: all its micro-batches, then the update.
    pub(super) fn put_step(&mut self, number: u64, lr: f64) -> Result<Ticket, RunError> {
        let (batch_size, micro) = (self.config.train.batch_size, self.config.train.micro_batch_size());
        let first = number * batch_size as u64;
        let valid_targets = self.corpus.loader.valid_targets(first..first + batch_size as u64) as usize;
        let step = Step { number, lr, valid_targets, micro_steps: batch_size / micro };
        let _step = doing_step("step", step.number + 1);
        for n in 0..step.micro_steps {
            let prepare = doing("prepare");
            let batch = self.corpus.loader.batch(first + (n * micro) as u64, micro)?;
            drop(prepare);
            let done = self.learner.micro_step(&step, n, &batch);
            done.map_err(|e| during_step(number + 1, e))?;
        }
        self.learner.fetch().map_err(|e| during_step(number + 1, e))
    }

    /// The results of the steps that are done, oldest first; waits until no more than `most` are under way.
    fn land(&mut self, flying: &mut VecDeque<Flying>, most: usize) -> Result<Vec<Landed>, RunError> {
        let mut landed = Vec::new();
        while let Some(oldest) = flying.front() {
            if flying.len() <= most && !self.learner.is_ready(&oldest.ticket)? {
                break;
            }
            let Some(Flying { step, lr, ticket }) = flying.pop_front() else { break };
            let result = self.learner.collect(ticket).map_err(|e| during_step(step, e))?;
            landed.push(Landed { step, lr, result });
        }
        Ok(landed)
    }

    /// Shows and counts what became of a step.
    fn tell_step(
        &mut self,
        landed: Landed,
        flight: &mut Flight,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Landed { step, result, .. } = landed;
        let _metrics = doing_step("metrics", step);
        observer.stepped(step, self.steps);
        if result.skipped {
            self.at.skipped += 1;
            flight.nonfinite_in_a_row += 1;
            let StepResult { loss, grad_norm, .. } = result;
            self.record(SkippedStep { step, loss, grad_norm, skipped: self.at.skipped }, observer)?;
            self.stop_if_diverged(step, flight.nonfinite_in_a_row)?;
        } else {
            flight.nonfinite_in_a_row = 0;
        }
        if step.is_multiple_of(self.config.log.every) || step == self.steps || step == 1 {
            let metrics = self.metrics(landed, &flight.window);
            self.record(metrics, observer)?;
            flight.window = Window::default();
        }
        if let Some(reference) = self.at.reference.as_mut().and_then(|segment| segment.add(step, result.loss))
        {
            self.at.reference = None;
            self.record(reference, observer)?;
        }
        Ok(())
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
        let _evaluation = doing_step("evaluation", self.at.step);
        if let Some(profiler) = &mut self.profiler {
            profiler.before_evaluation(&mut self.learner)?;
        }
        let sequences = self.config.eval.sequences(self.config.data.seq_len);
        let (mut ended, mut batch_begun, saving) = (None, None, self.saving(watch));
        let mut go_on = || {
            if let Some(begun) = batch_begun.replace(Instant::now()) {
                watch.batch = watch.batch.max(begun.elapsed());
            }
            ended = watch.ended(watch.batch + saving);
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

    /// Begins to save the state, unless this step is saved already; first waits for the save that is under way.
    pub(super) fn save(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        if self.saved.holds(self.at.step) {
            return Ok(());
        }
        let _save = doing_step("save", self.at.step);
        self.settle(watch, observer)?;
        let metrics = self.sink.unsynced()?;
        let written =
            self.saved.begin(&mut self.learner, &self.corpus.loader, &self.config, &self.at, metrics)?;
        self.tell_saved(written, watch, observer)
    }

    /// Waits for the save that is under way, if there is one.
    fn settle(&mut self, watch: &mut Watch<'_>, observer: &mut dyn Observer) -> Result<(), RunError> {
        let written = self.saved.finish()?;
        self.tell_saved(written, watch, observer)
    }

    fn tell_saved(
        &mut self,
        written: Option<Written>,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Some(Written { step, path, took }) = written else { return Ok(()) };
        self.folder.write("config.toml", &self.config.to_toml())?;
        watch.save = watch.save.max(took);
        self.record(Checkpoint { step, path }, observer)
    }

    /// The time that a save takes which begins now: it waits for the one that is under way.
    pub(super) fn saving(&self, watch: &Watch<'_>) -> Duration {
        if self.saved.is_writing() { 2 * watch.save } else { watch.save }
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

    fn metrics(&mut self, landed: Landed, window: &Window) -> StepMetrics {
        let Landed { step, lr, result } = landed;
        let step_tokens = self.config.step_tokens();
        let seconds = window.busy.as_secs_f64().max(1e-9) / window.steps as f64;
        let tokens_per_second = step_tokens as f64 / seconds;
        let flops = self.learner.spec().model.flops_per_token(self.config.data.seq_len);
        let samples = step * self.config.train.batch_size as u64;
        let epoch = self.corpus.loader.epochs(samples).into_iter().fold(0.0, f64::max);
        StepMetrics {
            step,
            loss: result.loss,
            grad_norm: result.grad_norm,
            lr,
            memory_bytes: self.learner.memory_bytes() as u64,
            memory_total_bytes: self.memory_total,
            tokens_per_second,
            tflops: tokens_per_second * flops / 1e12,
            mfu: self.peak_flops.map(|peak| tokens_per_second * flops / peak),
            tokens: step * step_tokens,
            epoch,
            step_ms: seconds * 1e3,
            skipped: self.at.skipped,
            seconds_left: Some((self.steps - step) as f64 * seconds),
        }
    }

    fn stop_if_diverged(&self, step: u64, in_a_row: u64) -> Result<(), RunError> {
        let limit = self.config.train.max_nonfinite_steps;
        if limit == 0 || in_a_row < limit {
            return Ok(());
        }
        let place = self.folder.checkpoints();
        let how = match self.saved.has_any() {
            true => format!(
                "go on with --resume from the latest checkpoint in {} (delete it to go on from the one before)",
                place.display()
            ),
            false => "begin again with --resume, as nothing was saved yet".to_owned(),
        };
        Err(RunError::Diverged(format!(
            "step {step}: the loss or the gradient norm was not finite in {in_a_row} steps in a row; lower optimizer.lr and {how}, or find the \
             operation with train.check_numerics = true"
        )))
    }
}

/// What may end a run before its last step: its signal and its clock. It ends early enough to save within its time.
pub(super) struct Watch<'a> {
    stop: &'a AtomicBool,
    begun: Instant,
    limit: Option<Duration>,
    /// What a step, a batch of an evaluation and a save took at most.
    pub(super) step: Duration,
    batch: Duration,
    save: Duration,
}

impl<'a> Watch<'a> {
    pub(super) fn new(stop: &'a AtomicBool, begun: Instant, limit: Option<Duration>) -> Self {
        Watch { stop, begun, limit, step: Duration::ZERO, batch: Duration::ZERO, save: Duration::ZERO }
    }

    /// How the run ends now; nothing where it may go on with what takes `next`.
    pub(super) fn ended(&self, next: Duration) -> Option<Outcome> {
        if self.stop.load(Ordering::Relaxed) {
            return Some(Outcome::Stopped);
        }
        let is_over = self.limit.is_some_and(|limit| self.begun.elapsed() + next >= limit);
        is_over.then_some(Outcome::TimeLimit)
    }
}

/// The steps whose results are not here yet, and what was seen of those before them.
#[derive(Default)]
struct Flight {
    steps: VecDeque<Flying>,
    nonfinite_in_a_row: u64,
    /// The time that is not counted yet: since the last step that landed.
    waited: Duration,
    window: Window,
}

/// A step under way.
struct Flying {
    /// Its number, from 1.
    step: u64,
    lr: f64,
    ticket: Ticket,
}

/// A step that was made.
#[derive(Clone, Copy)]
struct Landed {
    step: u64,
    lr: f64,
    result: StepResult,
}

/// The time of the steps that landed since the last report.
#[derive(Default)]
struct Window {
    steps: u64,
    busy: Duration,
}

impl Window {
    fn add(&mut self, step: Duration) {
        self.steps += 1;
        self.busy += step;
    }
}

/// What stopped a step.
pub(super) fn during_step(step: u64, error: LearnError) -> RunError {
    match error {
        LearnError::Engine(EngineError::NonFinite { .. }) => RunError::Diverged(format!(
            "step {step}: {error}; look at the numbers that it reads: a lower optimizer.lr, or other data or weights to start from, keep \
             them small"
        )),
        other => other.into(),
    }
}

pub(super) fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
