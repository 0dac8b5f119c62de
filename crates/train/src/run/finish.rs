//! The end of a run: export, samples, summary and report.

use super::Run;
use super::observer::{Observer, Outcome};
use super::prompts::SamplePrompt;
use super::watch::Watch;
use crate::error::RunError;
use crate::exchange;
use crate::process_group::ProcessGroup;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};
use xtrain_data::SpecialTokens;
use xtrain_planner::describe::describe;
use xtrain_report::RunSummary;
use xtrain_report::metrics::Sample;
use xtrain_step::generate::{GeneratedToken, Generator, Sampling};

impl Run {
    /// Writes the export if all steps are done, and the samples unless the run was stopped; summary and
    /// report always, even if the others fail. Returns how the run ended: it may be asked to stop once more
    /// while samples are generated.
    pub(super) fn finish(
        &mut self,
        outcome: Outcome,
        watch: &Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, RunError> {
        if !self.process_group.is_first() {
            // Rank 0 writes the end; the others wait for it as their group ends.
            if self.position.step == self.schedule.steps() && self.sample_together(false)? {
                self.sample(watch, observer)?;
            }
            return Ok(outcome);
        }
        if self.position.step < self.schedule.steps() {
            self.report_end(outcome, observer)?;
            return Ok(outcome);
        }
        // The export and the samples use some of it.
        self.checkpoints.free_memory();
        // Files that an earlier process wrote after this step stay unchanged.
        let unwritten = self.folder.unwritten(self.position.step, &self.config)?;
        // Try all parts and report the first error.
        let exported = if unwritten.export { self.export(observer) } else { Ok(()) };
        let samples = unwritten.samples && outcome == Outcome::Finished;
        let samples = samples | self.sample_together(samples)?;
        let sampled = if samples { self.sample(watch, observer) } else { Ok(outcome) };
        let reported = self.report_end(*sampled.as_ref().unwrap_or(&outcome), observer);
        let ended = exported.and(sampled).and_then(|ended| reported.map(|()| ended))?;
        if ended == Outcome::Finished {
            self.folder.finished(self.position.step)?;
        }
        Ok(ended)
    }

    /// True if this rank and all others generate samples, because each has a part of the weights alone. Rank
    /// 0 decides it.
    fn sample_together(&self, samples: bool) -> Result<bool, RunError> {
        Ok(self.learner.layout().forward_needs_all_ranks() && self.process_group.decide(|| Ok(samples))?)
    }

    fn export(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let (path, options) = (self.folder.hf(), exchange::export_options(&self.config));
        let (identity, tokenizer) = (&self.identity, &self.corpus.tokenizer);
        self.folder.claim_hf()?;
        if self.learner.layout().has_parts_of_masters() {
            // No rank has all rows, but all have written theirs.
            let checkpoint = self.checkpoints.store.checkpoint(self.position.step)?;
            let numerics = self.learner.spec().numerics();
            let model = (&self.learner.spec().model, &numerics);
            exchange::export_checkpoint(&checkpoint, model, identity, tokenizer, &path, &options)?;
        } else {
            exchange::export(self.learner.weights(), identity, tokenizer, &path, &options)?;
        }
        self.folder.exported(self.position.step)?;
        observer.wrote("Hugging Face folder", &path);
        Ok(())
    }

    fn report_end(&mut self, outcome: Outcome, observer: &mut dyn Observer) -> Result<(), RunError> {
        if let Some((step, loss)) = self.position.best {
            let path = self.folder.checkpoints().join(format!("step-{step}"));
            let task = self.config.checkpoint.best_task();
            let worse = match task.is_none() && self.position.divergence.is_above(loss) {
                true => {
                    format!(
                        " (worse than guessing, {:.4}: the run diverged)",
                        self.position.divergence.guessing()
                    )
                }
                false => String::new(),
            };
            let name = task.map_or("validation loss".to_owned(), |task| format!("score on {task}"));
            observer.wrote(&format!("best checkpoint, {name} {loss:.4}{worse}"), &path);
        }
        // A page that is still being drawn would replace the last one.
        self.reports.live = None;
        self.summary(Some(outcome)).write(self.folder.path())?;
        if self.config.log.jsonl {
            observer.wrote("report", &xtrain_report::write(self.folder.path())?);
        }
        Ok(())
    }

    /// Continues the prompts and answers the questions. If the run is stopped meanwhile, the samples so far
    /// are written; a resumed run generates all of them again.
    fn sample(&mut self, watch: &Watch<'_>, observer: &mut dyn Observer) -> Result<Outcome, RunError> {
        let eval = self.config.eval.clone();
        // Samples are generated once.
        let prompts = std::mem::take(&mut self.evaluation.prompts);
        let Some(longest) = prompts.iter().map(|prompt| prompt.tokens.len()).max() else {
            return Ok(Outcome::Finished);
        };
        // One cache serves all prompts.
        let mut generator = Generator::new(self.learner.weights(), longest + eval.max_tokens)?;
        let stop = self.corpus.tokenizer.stop_tokens().to_vec();
        let process_group = if self.learner.layout().forward_needs_all_ranks() {
            self.process_group.clone()
        } else {
            ProcessGroup::alone()
        };
        let (mut ended, mut failed) = (None, None);
        let mut text = String::new();
        for (number, SamplePrompt { text: prompt, tokens, is_chat }) in prompts.into_iter().enumerate() {
            ended = first_stop_request(&process_group, ended.or_else(|| watch.ended(Duration::ZERO)))?;
            if ended.is_some() {
                break;
            }
            generator.reset();
            // An answer ends where the context is full; a text goes on without its older half.
            let max_tokens = match is_chat {
                true => eval.max_tokens.min(generator.room_after(tokens.len())),
                false => eval.max_tokens,
            };
            let sampling = Sampling {
                temperature: eval.temperature,
                top_k: 0,
                top_p: 1.0,
                seed: self.config.train.seed + number as u64,
            };
            let (mut slowest, mut begun) = (Duration::ZERO, Instant::now());
            let mut on_token = |_: GeneratedToken<'_>| {
                slowest = slowest.max(begun.elapsed());
                begun = Instant::now();
                match first_stop_request(&process_group, watch.ended(slowest)) {
                    Ok(request) => ended = request,
                    Err(error) => failed = Some(error),
                }
                match ended.is_some() || failed.is_some() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            };
            let weights = self.learner.weights();
            let made = generator.generate(weights, &tokens, max_tokens, sampling, &stop, &mut on_token)?;
            if let Some(error) = failed {
                return Err(error);
            }
            let written = self.corpus.tokenizer.decode_after(&tokens, &made, SpecialTokens::Hide)?;
            let sample = Sample { step: self.position.step, prompt, text: written, is_chat };
            text.push_str(&format!("{}\n\n", sample.whole()));
            self.record(sample, observer)?;
        }
        if self.process_group.is_first() && (!text.is_empty() || ended.is_none()) {
            self.folder.write("sample.txt", &text)?;
        }
        Ok(ended.unwrap_or(Outcome::Finished))
    }

    /// Records in the report that an error ended the run.
    pub(super) fn report_error(&mut self, error: &RunError) {
        let Some(live) = self.reports.live.take() else { return };
        let outcome = Some(format!("ended by an error: {error}"));
        live.end(RunSummary { outcome, ..self.summary(None) });
    }

    /// The facts of the run; without an outcome, it is still running.
    pub(super) fn summary(&self, outcome: Option<Outcome>) -> RunSummary {
        RunSummary {
            model: Some(describe(self.learner.spec())),
            parameters: Some(self.learner.spec().model.parameter_count() as u64),
            precision: Some(self.learner.spec().recipe.name().into()),
            device: Some(self.reports.hardware.device.clone()),
            total_steps: Some(self.schedule.steps()),
            train_seconds: Some(self.position.train_seconds),
            unigram_entropy: self.position.unigram_entropy,
            best_step: self.position.best.map(|(step, _)| step),
            best_loss: self
                .position
                .best
                .filter(|_| !self.config.checkpoint.is_best_of_task())
                .map(|(_, loss)| loss),
            outcome: Some(match outcome {
                Some(Outcome::Finished | Outcome::FinishedBefore { .. }) => "finished".into(),
                Some(Outcome::Stopped) => "stopped on request".into(),
                Some(Outcome::TimeLimit) => "stopped at the time limit".into(),
                Some(Outcome::StoppedEarly) => "stopped before its first step".into(),
                None => RunSummary::running(self.position.step, self.schedule.steps()),
            }),
        }
    }
}

/// A request of any rank to stop, that of the time limit last.
pub(super) fn first_stop_request(
    process_group: &ProcessGroup,
    own: Option<Outcome>,
) -> Result<Option<Outcome>, RunError> {
    if process_group.is_alone() {
        return Ok(own);
    }
    let request = match own {
        None => 0,
        Some(Outcome::TimeLimit) => 1,
        Some(_) => 2,
    };
    let most = process_group.gather(&[request])?.concat().into_iter().max();
    Ok(match most {
        None | Some(0) => None,
        Some(1) => Some(Outcome::TimeLimit),
        Some(_) => Some(Outcome::Stopped),
    })
}
