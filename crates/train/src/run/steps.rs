//! The training loop.

use super::observer::{Observer, Outcome};
use super::reporting::{FinishedStep, Progress};
use super::watch::Watch;
use super::{Run, is_due};
use crate::error::RunError;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use xtrain_distributed::CommError;
use xtrain_evaluation::loss::Tally;
use xtrain_rank::Rank;
use xtrain_runtime::{EngineError, Ticket};
use xtrain_step::error::LearnError;
use xtrain_step::learner::{IN_FLIGHT, Overflow, Step};
use xtrain_step::spans::{span, step_span};

/// Steps whose results have not arrived, and the clock of the loop.
struct Flight {
    steps: VecDeque<StepInFlight>,
    /// Beginning of the current step: the end of the one before, whose report is part of this step.
    begun: Instant,
    /// Time since the last finished step that is not yet attributed to a step.
    waited: Duration,
}

/// A step in flight.
struct StepInFlight {
    /// Its number, from 1.
    step: u64,
    lr: f64,
    ticket: Ticket,
}

/// Finished steps, oldest first, and the first one that did not fit, after which no step is in flight.
type Landed<T> = (Vec<T>, Option<(u64, Overflow)>);

/// Work that follows the step that was launched last.
struct Due {
    /// True for the last step of the run.
    last: bool,
    evaluate: bool,
    /// True if tasks are scored.
    score: bool,
    /// End of the run after it, if it ends early.
    ended: Option<Outcome>,
    /// True if the results of all steps are needed, because the state is about to be read.
    all_results: bool,
}

impl Run {
    /// Runs steps until the end, the time limit or a stop. When it returns, the state is saved or being
    /// saved.
    pub(super) fn steps(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        if let Some(outcome) = self.complete_evaluation(watch, observer)? {
            return Ok(outcome);
        }
        if let Some(outcome) = self.evaluate_before_training(watch, observer)? {
            return Ok(outcome);
        }
        if self.position.step < self.schedule.steps() {
            self.checkpoints.prepare(&mut self.learner);
        }
        let mut flight = Flight { steps: VecDeque::new(), begun: Instant::now(), waited: Duration::ZERO };
        let mut progress = Progress::default();
        while self.position.step < self.schedule.steps() {
            if let Some(outcome) = self.before_step(&mut flight, watch, observer)? {
                return Ok(outcome);
            }
            self.launch_next(&mut flight)?;
            let due = self.due(watch)?;
            let (finished, overflow) = self.collect(&mut flight, watch, &due)?;
            // An update whose step is repeated leaves copies of weights that may differ.
            if overflow.is_none() {
                self.compare_states()?;
            }
            for (step, took) in finished {
                self.report_step(step, took, &mut progress, observer)?;
            }
            if let Some((step, overflow)) = overflow {
                self.make_room(step, overflow, observer)?;
                self.position.step = step - 1;
                flight.begun = Instant::now();
                continue;
            }
            if let Some(outcome) = self.after_step(due, &mut flight, &progress, watch, observer)? {
                return Ok(outcome);
            }
        }
        Ok(Outcome::Finished)
    }

    /// Starts a reference segment or changes the profiler, if due before the next step. Returns the outcome
    /// if the run is stopped meanwhile.
    fn before_step(
        &mut self,
        flight: &mut Flight,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let step = self.position.step;
        if self.is_reference_due(step) {
            if let Some(outcome) = self.reference(watch, observer)? {
                return Ok(Some(outcome));
            }
            flight.begun = Instant::now();
        }
        if let Some(profiler) = &mut self.profiler {
            let acts = profiler.acts(step);
            profiler.before_step(step, &mut self.learner, &self.folder, &self.reports.hardware.device)?;
            if acts {
                flight.begun = Instant::now();
            }
        }
        Ok(None)
    }

    fn launch_next(&mut self, flight: &mut Flight) -> Result<(), RunError> {
        let lr = self.schedule.lr(self.position.step);
        let ticket = self.launch(self.position.step, lr)?;
        self.position.step += 1;
        flight.steps.push_back(StepInFlight { step: self.position.step, lr, ticket });
        Ok(())
    }

    /// Launches the optimizer step that follows `number` others: all micro-batches of this rank, then the
    /// update. Rank r of the n of a stage takes micro-batches r, r + n, ...
    pub(super) fn launch(&mut self, number: u64, lr: f64) -> Result<Ticket, RunError> {
        let (batch_size, micro) = (self.config.train.batch_size, self.config.train.micro_batch_size());
        let Rank { index: rank, world_size } = self.learner.spec().parallel.data_rank();
        let first = number * batch_size as u64;
        let counts = self.corpus.loader.counts(first..first + batch_size as u64);
        let micro_steps = self.learner.spec().micro_steps(batch_size);
        assert!(micro_steps > 0, "a rank has no micro-batch of a step");
        let step = Step { number, lr, counts, micro_steps };
        let _step = step_span("step", step.number + 1);
        for n in 0..step.micro_steps {
            let prepare = span("prepare");
            let first = first + ((n * world_size + rank) * micro) as u64;
            let batch = self.corpus.loader.batch(first, micro)?;
            let sources = self.corpus.loader.sources(first..first + micro as u64);
            drop(prepare);
            let named = self.learner.name_sources(&sources);
            let done = named.and_then(|()| self.learner.micro_step(&step, n, &batch));
            done.map_err(|e| step_error(number + 1, e))?;
        }
        self.learner.fetch().map_err(|e| step_error(number + 1, e))
    }

    /// Determines the work that follows the step that was launched last. It is the same on all ranks: a rank
    /// that is asked to end the run asks all, and all end after the same step.
    fn due(&mut self, watch: &Watch<'_>) -> Result<Due, RunError> {
        let step = self.position.step;
        let last = step == self.schedule.steps();
        let evaluate = match last {
            true => self.config.eval.at_end,
            false => is_due(step, self.config.eval.every.unwrap_or(0)),
        };
        let score =
            !self.evaluation.tasks.tasks.is_empty() && (last || is_due(step, self.config.eval.tasks_every));
        let ended = match self.process_group.is_alone() {
            true => watch.ended(watch.step + self.saving(watch)),
            false => self.agreed_end(watch)?,
        };
        let ended = ended.filter(|_| !last);
        let traced = self.profiler.as_ref().is_some_and(|profiler| profiler.acts(step));
        let all_results = last
            || self.is_comparison_due()
            || evaluate
            || score
            || traced
            || ended.is_some()
            || self.is_reference_due(step)
            || is_due(step, self.config.checkpoint.every);
        Ok(Due { last, evaluate, score, ended, all_results })
    }

    /// Collects the finished steps, oldest first. Each gets its share of the time since the last ones.
    fn collect(
        &mut self,
        flight: &mut Flight,
        watch: &mut Watch<'_>,
        due: &Due,
    ) -> Result<Landed<(FinishedStep, Duration)>, RunError> {
        let most = if due.all_results { 0 } else { IN_FLIGHT };
        let (finished, overflow) = self.land(&mut flight.steps, most)?;
        let now = Instant::now();
        let took = now - std::mem::replace(&mut flight.begun, now);
        self.position.train_seconds += took.as_secs_f64();
        watch.step = watch.step.max(took);
        flight.waited += took;
        let each = flight.waited / finished.len().max(1) as u32;
        flight.waited -= each * finished.len() as u32;
        Ok((finished.into_iter().map(|step| (step, each)).collect(), overflow))
    }

    /// Collects the results of finished steps, oldest first; waits until at most `most` are in flight. After
    /// a step whose rows of experts did not fit, it waits for all and leaves their results out.
    fn land(
        &mut self,
        steps: &mut VecDeque<StepInFlight>,
        most: usize,
    ) -> Result<Landed<FinishedStep>, RunError> {
        let mut finished = Vec::new();
        while let Some(oldest) = steps.front() {
            if steps.len() <= most && !self.learner.is_ready(&oldest.ticket)? {
                break;
            }
            let Some(StepInFlight { step, lr, ticket }) = steps.pop_front() else { break };
            let result = self.learner.collect(ticket).map_err(|e| step_error(step, e))?;
            self.process_group.first_step_is_done();
            if let Some(overflow) = result.overflow {
                for StepInFlight { step, ticket, .. } in steps.drain(..) {
                    self.learner.collect(ticket).map_err(|e| step_error(step, e))?;
                }
                return Ok((finished, Some((step, overflow))));
            }
            self.note_stop_request(step, &result);
            finished.push(FinishedStep { step, lr, result });
        }
        Ok((finished, None))
    }

    /// Runs the evaluation and the save that are due after a step. Returns the outcome if the run ends early.
    fn after_step(
        &mut self,
        due: Due,
        flight: &mut Flight,
        progress: &Progress,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let Due { last, evaluate, score, mut ended, .. } = due;
        if self.checkpoints.is_written() {
            self.settle(watch, observer)?;
        }
        if evaluate || score {
            self.position.evaluation = evaluate.then(Tally::default);
            self.position.tasks_due = score;
            let cut = match self.evaluate_and_score(watch, observer)? {
                // Nothing but the end is left, and the state is saved.
                Some(Outcome::TimeLimit) if last => self.complete_evaluation(watch, observer)?,
                cut => cut,
            };
            if cut.is_some() {
                return Ok(cut);
            }
            if self.process_group.is_alone() {
                ended = ended.or_else(|| watch.ended(watch.step + self.saving(watch))).filter(|_| !last);
            }
            flight.begun = Instant::now();
        }
        // The state after skipped steps needs no checkpoint, and must not replace good ones.
        let worth_saving =
            is_due(self.position.step, self.config.checkpoint.every) && progress.nonfinite_in_a_row == 0;
        if worth_saving || last || ended.is_some() {
            self.save(watch, observer)?;
            flight.begun = Instant::now();
        }
        Ok(ended)
    }
}

/// The error of a run in which ranks exchanged messages after `step`, in the `part` of the run.
pub(super) fn exchange_error(step: u64, part: &str, error: RunError) -> RunError {
    match error {
        RunError::Ranks(cause @ (CommError::Timeout { .. } | CommError::Left { .. })) => RunError::Ranks(
            CommError::System(format!("step {step}: all_gather failed in the {part}: {cause}")),
        ),
        other => other,
    }
}

/// The error of a run whose step failed.
pub(super) fn step_error(step: u64, error: LearnError) -> RunError {
    match error {
        LearnError::Engine(EngineError::NonFinite { .. }) => RunError::Diverged(format!(
            "step {step}: {error}; try a lower optimizer.lr, or other data or initial weights"
        )),
        LearnError::Engine(EngineError::Collective { error: ref cause, .. }) => {
            RunError::Ranks(match &**cause {
                CommError::Aborted(_) => CommError::clone(cause),
                _ => CommError::System(format!("step {step}: {error}")),
            })
        }
        other => other.into(),
    }
}
