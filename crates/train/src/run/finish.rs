//! The end of a run: export, samples, summary and report.

use super::RunError;
use super::open::describe;
use super::trainer::{Observer, Outcome, Run};
use crate::exchange;
use crate::generate::{Generator, Sampling};
use crate::metrics::Sample;
use crate::report::{self, RunSummary};
use std::ops::ControlFlow;
use xtrain_data::SpecialTokens;

impl Run {
    /// Export and samples where all steps are done; summary and report always, whatever becomes of the others.
    pub(super) fn finish(&mut self, outcome: Outcome, observer: &mut dyn Observer) -> Result<(), RunError> {
        if outcome != Outcome::Finished {
            return self.tell(outcome, observer);
        }
        // What an earlier process wrote after this step is left as it is.
        let unwritten = self.folder.unwritten(self.at.step, &self.config)?;
        // All is tried; the first error is told.
        let exported = if unwritten.export { self.export(observer) } else { Ok(()) };
        let sampled = if unwritten.samples { self.sample(observer) } else { Ok(()) };
        let told = self.tell(outcome, observer);
        exported.and(sampled).and(told)?;
        self.folder.finished(self.at.step)
    }

    fn export(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let (path, options) = (self.folder.hf(), exchange::export_options(&self.config));
        self.folder.claim_hf()?;
        exchange::export(self.learner.weights(), &self.hf, &self.corpus.tokenizer, &path, &options)?;
        observer.wrote("Hugging Face folder", &path);
        Ok(())
    }

    fn tell(&mut self, outcome: Outcome, observer: &mut dyn Observer) -> Result<(), RunError> {
        if let Some((step, loss)) = self.at.best {
            let path = self.folder.checkpoints().join(format!("step-{step}"));
            observer.wrote(&format!("best checkpoint, validation loss {loss:.4}"), &path);
        }
        self.summary(outcome).write(self.folder.path())?;
        if self.config.log.jsonl {
            observer.wrote("report", &report::write(self.folder.path())?);
        }
        Ok(())
    }

    fn sample(&mut self, observer: &mut dyn Observer) -> Result<(), RunError> {
        let eval = self.config.eval.clone();
        let Some(longest) = self.prompts.iter().map(Vec::len).max() else { return Ok(()) };
        // One cache serves all prompts.
        let mut generator = Generator::new(self.learner.weights(), longest + eval.max_tokens)?;
        let mut text = String::new();
        for (number, (prompt, tokens)) in eval.prompts.iter().zip(self.prompts.clone()).enumerate() {
            if tokens.is_empty() {
                continue;
            }
            generator.reset();
            let sampling = Sampling {
                temperature: eval.temperature,
                top_k: 0,
                top_p: 1.0,
                seed: self.config.train.seed + number as u64,
            };
            let stop = self.corpus.tokenizer.stop_tokens().to_vec();
            let made = generator.generate(
                self.learner.weights(),
                &tokens,
                eval.max_tokens,
                sampling,
                &stop,
                &mut |_| ControlFlow::Continue(()),
            )?;
            let written = self.corpus.tokenizer.decode(&made, SpecialTokens::Hide)?;
            text.push_str(&format!("{prompt}{written}\n\n"));
            self.record(Sample { step: self.at.step, prompt: prompt.clone(), text: written }, observer)?;
        }
        self.folder.write("sample.txt", &text)
    }

    fn summary(&self, outcome: Outcome) -> RunSummary {
        RunSummary {
            model: Some(describe(self.learner.spec())),
            parameters: Some(self.learner.spec().model.parameter_count() as u64),
            precision: Some(self.learner.spec().recipe.name().into()),
            device: Some(format!("CPU, {} threads", rayon::current_num_threads())),
            total_steps: Some(self.steps),
            train_seconds: Some(self.at.train_seconds),
            unigram_entropy: self.at.unigram_entropy,
            best_step: self.at.best.map(|(step, _)| step),
            best_loss: self.at.best.map(|(_, loss)| loss),
            outcome: Some(
                match outcome {
                    Outcome::Finished | Outcome::FinishedBefore { .. } => "finished",
                    Outcome::Stopped => "stopped on request",
                    Outcome::TimeLimit => "stopped at the time limit",
                    Outcome::StoppedEarly => "stopped before its first step",
                }
                .into(),
            ),
        }
    }
}
