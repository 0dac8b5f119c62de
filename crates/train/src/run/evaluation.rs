//! Evaluation during a run, and saving of the best state.

use super::observer::{Observer, Outcome};
use super::prompts::SamplePrompt;
use super::steps::exchange_error;
use super::tasks::RunTasks;
use super::watch::Watch;
use super::{Run, is_due};
use crate::error::RunError;
use xtrain_data::Validation;
use xtrain_evaluation::loss::{Evaluator, SourceTally, Tally};
use xtrain_report::metrics::{EvalMetrics, SourceMetrics};
use xtrain_step::spans::step_span;

/// The evaluation of a run: its program for validation data, and its prompts.
pub(super) struct Evaluation {
    /// For validation data, if there are any.
    pub(super) evaluator: Option<Evaluator>,
    /// True if the entropy in the position is that of the validation data that this process reads.
    pub(super) entropy_is_known: bool,
    /// Those of `eval.prompts` and `eval.chats`.
    pub(super) prompts: Vec<SamplePrompt>,
    /// Those of `eval.tasks`.
    pub(super) tasks: RunTasks,
}

impl Run {
    /// Completes the evaluation that was stopped, by an earlier process or at the last step. Returns how the
    /// run ends if it is stopped again.
    pub(super) fn complete_evaluation(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        if self.position.evaluation.is_none() && !self.position.tasks_due {
            return Ok(None);
        }
        if self.position.step == self.schedule.steps() {
            watch.lift_limit();
        }
        if let Some(outcome) = self.evaluate_and_score(watch, observer)? {
            return Ok(Some(outcome));
        }
        // The checkpoint of this step still records the evaluation as due.
        self.checkpoints.outdate();
        self.save(watch, observer)?;
        Ok(None)
    }

    /// Runs the evaluation that is due, then scores the tasks that are. Returns the outcome if the run is
    /// stopped meanwhile.
    pub(super) fn evaluate_and_score(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        match self.evaluate(watch, observer)? {
            None => self.score_tasks(watch, observer),
            outcome => Ok(outcome),
        }
    }

    /// Ends an evaluation that was cut: the next process makes the rest. Returns how the run ends; `request`
    /// is that of this rank, and one of the others may have asked for it.
    pub(super) fn cut_evaluation(
        &mut self,
        request: Option<Outcome>,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        let is_stopped = self.process_group.any(request.is_some_and(|own| own != Outcome::TimeLimit))?;
        self.checkpoints.outdate();
        self.save(watch, observer)?;
        Ok(if is_stopped { Outcome::Stopped } else { Outcome::TimeLimit })
    }

    /// Runs the evaluation that is due, or the rest of it. If the run is asked to stop meanwhile, it saves
    /// its progress and returns the outcome.
    pub(super) fn evaluate(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let due = self.position.evaluation.take();
        let (Some(mut tally), Some(validation), Some(evaluator)) =
            (due, self.corpus.validation.clone(), self.evaluation.evaluator)
        else {
            return Ok(None);
        };
        let _evaluation = step_span("evaluation", self.position.step);
        if let Some(profiler) = &mut self.profiler {
            profiler.before_evaluation(&mut self.learner)?;
        }
        let sequences = self.config.eval.sequences(self.config.data.seq_len);
        let (mut stop_request, mut batch_begun, saving) = (None, None, self.saving(watch));
        let mut check = || watch.check_batch(&mut batch_begun, &mut stop_request, saving);
        let validation = validation.at_most(sequences);
        let weights = self.learner.weights();
        let ended = evaluator.add(weights, &validation, &mut tally, &self.process_group, &mut check);
        let ended = ended.map_err(|error| exchange_error(self.position.step, "evaluation", error.into()))?;
        if ended.is_break() {
            // JSON has no infinities: such a sum is computed again.
            self.position.evaluation = Some(if tally.is_finite() { tally } else { Tally::default() });
            return self.cut_evaluation(stop_request, watch, observer).map(Some);
        }
        if !self.evaluation.entropy_is_known {
            // Once per process, because the run file may name other data by now.
            self.position.unigram_entropy = Some(validation.unigram_entropy_nats()?);
            self.evaluation.entropy_is_known = true;
        }
        let loss = tally.mean();
        let bits = loss * tally.targets as f64 / std::f64::consts::LN_2;
        let bits_per_byte = validation.text_bytes()?.map(|bytes| bits / bytes);
        let token_accuracy = Some(tally.token_accuracy());
        let step = self.position.step;
        self.record(EvalMetrics { step, loss, bits_per_byte, token_accuracy }, observer)?;
        self.position.evaluated_initial |= self.position.step == 0;
        self.record_sources(&tally, &validation, observer)?;
        if let Some(text) = self.position.divergence.evaluated(loss, self.position.step) {
            self.warn_of_divergence(self.position.step, text, observer)?;
        }
        if !self.config.checkpoint.is_best_of_task() && self.is_best(loss, true) {
            self.position.best = Some((self.position.step, loss));
            self.save(watch, observer)?;
        }
        Ok(None)
    }

    /// Evaluates the initial weights of a run with `model.init_from`. Returns the outcome if the run is
    /// stopped meanwhile.
    pub(super) fn evaluate_before_training(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let eval = &self.config.eval;
        let is_wanted = eval.at_end || eval.every.is_none_or(|every| every > 0);
        let is_done = self.position.step > 0 || self.position.evaluated_initial;
        if is_done || self.config.model.init_from.is_none() || !is_wanted {
            return Ok(None);
        }
        self.position.evaluation = Some(Tally::default());
        self.evaluate(watch, observer)
    }

    /// Reports the sources of a mixture: tokens taken from each, its training loss since the previous report,
    /// and its part of the evaluation.
    fn record_sources(
        &mut self,
        tally: &Tally,
        validation: &Validation,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let (step, loader) = (self.position.step, &self.corpus.loader);
        let names = loader.source_names();
        let samples = step * self.config.train.batch_size as u64;
        let mut sources: Vec<SourceMetrics> = Vec::new();
        // Of the steps since the last report.
        let trained = std::mem::take(&mut self.position.trained);
        if names.len() > 1 {
            let taken = loader.taken(samples).into_iter().zip(loader.epochs(samples));
            sources.extend(names.iter().zip(taken).enumerate().map(|(n, (name, (taken, epoch)))| {
                SourceMetrics {
                    step,
                    name: (*name).to_owned(),
                    tokens: Some(taken.inputs),
                    epoch: Some(epoch),
                    train_loss: trained.get(n).and_then(SourceTally::mean),
                    loss: None,
                    token_accuracy: None,
                }
            }));
        }
        let evaluated = validation.source_names();
        for (name, source) in evaluated.iter().zip(&tally.sources).filter(|_| evaluated.len() > 1) {
            let (loss, token_accuracy) = (source.mean(), source.token_accuracy());
            match sources.iter_mut().find(|known| known.name == *name) {
                Some(known) => (known.loss, known.token_accuracy) = (loss, token_accuracy),
                None => {
                    let name = (*name).to_owned();
                    sources.push(SourceMetrics {
                        step,
                        name,
                        loss,
                        token_accuracy,
                        ..SourceMetrics::default()
                    });
                }
            }
        }
        sources.into_iter().try_for_each(|source| self.record(source, observer))
    }

    /// True if the evaluated state is to be saved as the best: its loss or score, as `checkpoint.best` says,
    /// is the best so far, and either this step is saved anyway or `checkpoint.every` steps have passed since
    /// the last best. Without that interval, a run that improves fast would save at nearly every evaluation.
    pub(super) fn is_best(&self, value: f64, is_lower_better: bool) -> bool {
        let (step, every) = (self.position.step, self.config.checkpoint.every);
        let worst = if is_lower_better { f64::INFINITY } else { f64::NEG_INFINITY };
        let (last, best) = self.position.best.unwrap_or((0, worst));
        let is_better = if is_lower_better { value < best } else { value >= best };
        let is_saved_anyway = step > 0 && (is_due(step, every) || step == self.schedule.steps());
        let is_in_turn = every > 0 && step - last >= every;
        self.config.checkpoint.keep_best == Some(true) && is_better && (is_saved_anyway || is_in_turn)
    }
}
