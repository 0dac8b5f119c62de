//! The stages of a run that begins: it refuses what cannot work before it writes anything.

use super::settings::run_time;
use super::setup::Setup;
use crate::corpus::Corpus;
use crate::error::RunError;
use crate::{exchange, source, spec};
use xtrain_config::{Config, TokenizerChoice};
use xtrain_planner::estimate::Device;
use xtrain_planner::{choose, fit};
use xtrain_report::metrics::format;
use xtrain_step::engine::Processor;

impl Setup<'_> {
    /// Refuses to begin in a folder that is not empty, because the run would replace files of the same name.
    pub(super) fn check_free(&self) -> Result<(), RunError> {
        if self.resumed().is_some() {
            return Ok(());
        }
        let place = self.folder.path().display();
        if self.folder.is_begun() {
            return Err(RunError::Refused(format!(
                "{place} already holds a run; continue with --resume, choose another folder with --out FOLDER, or delete it"
            )));
        }
        match self.folder.foreign()? {
            None => Ok(()),
            Some(name) => Err(RunError::Refused(format!(
                "{place} is not empty (it holds {name}), and a run would mix with what is there; choose a new or an empty folder with \
                 --out FOLDER"
            ))),
        }
    }

    /// Refuses a run that the processor cannot compute or that does not fit, and warns of one that takes
    /// days, before its text is tokenized, which may take long. A vocabulary that is still to be learned
    /// counts at its upper bound, with which a run is not refused. Checks nothing if the text must be read to
    /// count its characters. Returns the measured device; `None` for a resumed run.
    pub(super) fn check_before_text(&self, processor: &Processor) -> Result<Option<Device>, RunError> {
        if self.resumed().is_some() {
            return Ok(None);
        }
        let Setup { parsed, sources, process_group, .. } = self;
        let config = &parsed.config;
        let device = self.measured_device(config, processor);
        let is_given = config.model.vocab_size.is_some() || config.model.init_from.is_some();
        let is_counted = matches!(sources.tokenizer, TokenizerChoice::Chars);
        if is_counted && !is_given && source::shards(sources)?.is_none() {
            return Ok(Some(device));
        }
        let planned = spec::plan_sources(parsed, sources, processor.target(), process_group.rank())?;
        processor.check(planned.spec.recipe)?;
        let (planned, _) = choose::decide(planned, &device)?;
        if planned.vocabulary_bound.is_none() {
            fit::check(&planned, processor, process_group.processes_here())?;
        }
        let time = run_time(&planned, &device, 0)?;
        if time.is_long() {
            tracing::warn!(
                "the run takes {time}; a smaller model, fewer steps or a faster device would shorten it"
            );
        }
        Ok(Some(device))
    }

    /// Writes the files that a run folder has from its beginning, and warns of what the run will not do.
    pub(super) fn write_beginning(
        &self,
        config: &Config,
        steps: u64,
        corpus: &Corpus,
    ) -> Result<(), RunError> {
        if self.resumed().is_some() {
            return Ok(());
        }
        warn_of_passes(config, steps, corpus);
        corpus.tokenizer.save(&self.folder.tokenizer())?;
        if let Some(from) = &self.sources.init_from {
            source::save_init(from, &self.folder)?;
            exchange::warn_of_unexported_files(from, Some(&corpus.tokenizer));
        }
        Ok(())
    }
}

/// Passes over its data of which a run warns.
const MANY_PASSES: u64 = 1_000;

/// Warns of a text that is so short that a model memorises it.
fn warn_of_passes(config: &Config, steps: u64, corpus: &Corpus) {
    let tokens = corpus.loader.epoch_tokens();
    let passes = steps.saturating_mul(config.step_tokens()) / tokens.max(1);
    if passes >= MANY_PASSES {
        tracing::warn!(
            "the run passes {} times over its {} training tokens, so the model memorises them; give more text, or fewer steps",
            format::grouped(passes),
            format::grouped(tokens)
        );
    }
}
