//! Begins a run in a folder of its own.

use super::Run;
use super::assemble::{
    Parts, Prepared, assemble, check_export, check_fits, initial_weights, load, measured_device, prepare,
    processor, report_lines, run_time,
};
use super::observer::Observer;
use super::settings::{Settings, agree};
use super::snapshot::CheckpointWriter;
use crate::corpus::Corpus;
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::position::Position;
use crate::process_group::{Facts, ProcessGroup};
use crate::{exchange, source, spec};
use std::collections::BTreeMap;
use xtrain_config::{Config, Parsed, TokenizerChoice};
use xtrain_planner::estimate::Device;
use xtrain_planner::{choose, fit, fp8_skip};
use xtrain_report::metrics::{SinkStart, format};
use xtrain_step::engine::Processor;

/// Begins the run of `parsed` in `folder`. A refusal writes nothing.
pub(super) fn begin(
    parsed: &Parsed,
    folder: RunFolder,
    process_group: &ProcessGroup,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Run, RunError> {
    if process_group.is_first() {
        check_free(&folder)?;
        check_export(parsed, &folder)?;
    }
    let hf = source::init(&parsed.config)?;
    if let (Some(from), Some(hf)) = (source::init_folder(&parsed.config), &hf) {
        exchange::checked_model(&from, hf)?;
        if process_group.is_first() {
            source::warn_of_training(&from, hf);
        }
    }
    let processor = processor(&parsed.config, process_group)?;
    // Only the rank that decides needs to know how fast it is.
    let device = process_group.is_first().then(|| measured_device(&parsed.config, &processor, process_group));
    if let Some(device) = &device {
        check_before_text(parsed, &processor, device, process_group)?;
    }
    let recipe = Some(processor.target().recipe());
    let Prepared { corpus, prompts, planned, steps, command } =
        prepare(parsed, &folder, hf.as_ref(), recipe, process_group, observer, time_is_up)?;
    processor.check(planned.spec.recipe)?;
    let Settings { planned, report_lines } =
        agree(planned, device.as_ref(), process_group, |planned, device| {
            let (planned, choice) = choose::decide(planned, device)?;
            let planned = fp8_skip::decide(planned, &processor)?;
            let report_lines = report_lines(&planned, choice, device, 0)?;
            Ok(Settings { planned, report_lines })
        })?;
    check_fits(&planned, &processor, process_group)?;
    let (config, chosen) = (planned.resolved.config, planned.chosen);
    process_group.compare(&Facts::collect(&config, &planned.spec, &corpus, &processor)?, &processor)?;
    let mut loaded = load(planned.spec, &config, processor, &corpus, process_group, BTreeMap::new())?;
    // Before the folder is created, so that a refusal leaves none.
    initial_weights(&mut loaded.learner, &config)?;
    let checkpoints = CheckpointWriter::open(&folder, false, process_group)?;
    if process_group.is_first() {
        // Check again, now that no other process can write here.
        check_free(&folder)?;
        report_lines.iter().for_each(|line| tracing::info!("{line}"));
        warn_of_passes(&config, steps, &corpus);
        corpus.tokenizer.save(&folder.tokenizer())?;
        source::save_init(&parsed.config, &folder)?;
        if let Some(from) = source::init_folder(&parsed.config) {
            exchange::warn_of_unexported_files(&from, &corpus.tokenizer);
        }
    }
    let parts = Parts {
        process_group: process_group.clone(),
        config,
        chosen,
        steps,
        folder,
        corpus,
        prompts,
        command,
        hf,
        loaded,
        checkpoints,
        position: Position::default(),
        sink: SinkStart::Fresh,
        resumed: None,
        records_choices: true,
    };
    assemble(parts, observer)
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

/// Refuses a folder that is not empty, because the run would replace files of the same name.
fn check_free(folder: &RunFolder) -> Result<(), RunError> {
    let place = folder.path().display();
    if folder.is_begun() {
        return Err(RunError::Refused(format!(
            "{place} already holds a run; continue with --resume, choose another folder with --out FOLDER, or delete it"
        )));
    }
    match folder.foreign()? {
        None => Ok(()),
        Some(name) => Err(RunError::Refused(format!(
            "{place} is not empty (it holds {name}), and a run would mix with what is there; choose a new or an empty folder with \
             --out FOLDER"
        ))),
    }
}

/// Refuses a run that the processor cannot compute or that does not fit, and warns of one that takes days,
/// before its text is tokenized, which may take long. A vocabulary that is still to be learned counts at its
/// upper bound, with which a run is not refused. Checks nothing if the text must be read to count its
/// characters.
fn check_before_text(
    parsed: &Parsed,
    processor: &Processor,
    device: &Device,
    process_group: &ProcessGroup,
) -> Result<(), RunError> {
    let config = &parsed.config;
    let is_given = config.model.vocab_size.is_some() || config.model.init_from.is_some();
    let is_counted = matches!(config.tokenizer(), TokenizerChoice::Chars);
    if is_counted && !is_given && source::shards(config)?.is_none() {
        return Ok(());
    }
    let planned = spec::plan_for(parsed, processor.target(), process_group.rank())?;
    processor.check(planned.spec.recipe)?;
    let (planned, _) = choose::decide(planned, device)?;
    if planned.vocabulary_bound.is_none() {
        fit::check(&planned, processor, process_group.processes_here())?;
    }
    let time = run_time(&planned, device, 0)?;
    if time.is_long() {
        tracing::warn!(
            "the run takes {time}; a smaller model, fewer steps or a faster device would shorten it"
        );
    }
    Ok(())
}
