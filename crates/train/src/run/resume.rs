//! Resumes a run from its latest checkpoint.

use super::assemble::{
    Opened, Parts, Prepared, assemble, check_export, check_fits, initial_weights, load, measured_device,
    prepare, processor, report_lines,
};
use super::choices;
use super::observer::Observer;
use super::settings::{Settings, agree};
use super::snapshot::CheckpointWriter;
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::paths::locate;
use crate::position::{self, Position};
use crate::process_group::{Facts, ProcessGroup};
use crate::source;
use std::collections::BTreeMap;
use xtrain_checkpoint::remove_leftovers;
use xtrain_config::{Change, Config, MAX_FILE_BYTES, Parsed, TokenizerChoice, diff, files};
use xtrain_data::Tokenizer;
use xtrain_planner::{choose, fp8_skip};
use xtrain_report::metrics::{DroppedRecords, Resumed, SinkStart};

/// Opens the run in `folder` at its latest checkpoint, or at its first step if it has none.
pub(super) fn resume(
    parsed: &Parsed,
    folder: RunFolder,
    process_group: &ProcessGroup,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Opened, RunError> {
    process_group.check_shared(&folder)?;
    if process_group.is_first() {
        check_export(parsed, &folder)?;
    }
    let hf = source::saved_init(&parsed.config, &folder)?;
    let processor = processor(&parsed.config, process_group)?;
    let before = position::config(&folder)?;
    // A run keeps its precision on every device.
    let Prepared { corpus, prompts, planned, steps, command } =
        prepare(parsed, &folder, hf.as_ref(), before.precision.recipe, process_group, observer, time_is_up)?;
    check_tokenizer(&folder, &planned.resolved.config, &corpus.tokenizer)?;
    if let Some(done) = process_group.decide(|| finished(&folder, &planned.resolved.config, steps))? {
        return Ok(Opened::Finished { done, steps });
    }
    processor.check(planned.spec.recipe)?;
    let config = &planned.resolved.config;
    let device = process_group.is_first().then(|| measured_device(config, &processor, process_group));
    let Settings { planned, report_lines } =
        agree(planned, device.as_ref(), process_group, |planned, device| {
            let is_asked = |key: &str| parsed.is_argument(key);
            let (planned, choice) = choose::decide_for_resumed(planned, &before, is_asked, device)?;
            let is_kept = choice.is_none() && !planned.chosen.is_empty();
            let planned = fp8_skip::decide_for_resumed(planned, &before.precision, &processor)?;
            let fits = check_fits(&planned, &processor, process_group);
            fits.map_err(|error| if is_kept { choosing_again(error) } else { error })?;
            let done = position::position(&folder)?.map_or(0, |at| at.step);
            let report_lines = report_lines(&planned, choice, device, done)?;
            Ok(Settings { planned, report_lines })
        })?;
    if !process_group.is_first() {
        check_fits(&planned, &processor, process_group)?;
    }
    let before = before.precision;
    let (config, chosen) = (planned.resolved.config, planned.chosen);
    process_group.compare(&Facts::collect(&config, &planned.spec, &corpus, &processor)?, &processor)?;
    let recorded = if process_group.is_first() { choices::recorded(&folder) } else { BTreeMap::new() };
    let mut loaded = load(planned.spec, &config, processor, &corpus, process_group, recorded)?;
    let mut checkpoints = CheckpointWriter::open(&folder, true, process_group)?;
    report_lines.iter().for_each(|line| tracing::info!("{line}"));
    let position = match checkpoints.restore(&mut loaded.learner, &corpus.loader, &config)? {
        Some(position) => position,
        None => {
            initial_weights(&mut loaded.learner, &config)?;
            Position::default()
        }
    };
    // The run file may request fewer steps than the run has made.
    let steps = steps.max(position.step);
    let is_at_its_end = position.step == steps;
    let recipes = before.recipe.zip(config.precision.recipe).map(|(before, now)| [before, now]);
    let switched = recipes.filter(|[before, now]| position.step > 0 && before != now);
    let dropped = DroppedRecords {
        after: position.step,
        // Before the first checkpoint, the initial weights are evaluated again.
        evaluation: position.evaluation.is_some() || position.step == 0,
        samples: is_at_its_end && folder.unwritten(position.step, &config)?.samples,
        switched,
    };
    let parts = Parts {
        process_group: process_group.clone(),
        resumed: Some(Resumed { step: position.step, switched }),
        sink: SinkStart::Resumed(dropped),
        records_choices: !is_at_its_end,
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
        position,
    };
    Ok(Opened::Run(Box::new(assemble(parts, observer)?)))
}

/// Advice for a run that does not fit with the settings chosen when it began.
fn choosing_again(error: RunError) -> RunError {
    match error {
        RunError::Refused(why) => RunError::Refused(format!(
            "{why}; the run keeps the settings that were chosen when it began: --set train.recompute=auto chooses again"
        )),
        other => other,
    }
}

/// The number of steps that the run in `folder` has made, if it has made all requested steps and its end is
/// completely written.
fn finished(folder: &RunFolder, config: &Config, steps: u64) -> Result<Option<u64>, RunError> {
    let position = position::position(folder)?.filter(|at| at.step >= steps && at.evaluation.is_none());
    let Some(position) = position else { return Ok(None) };
    let is_finished = folder.unwritten(position.step, config)?.is_nothing();
    if is_finished && let Err(error) = remove_leftovers(folder.path(), |_| true) {
        // The folder may be read-only by now, and leftovers of a killed process do no harm.
        tracing::debug!("{}: cannot remove leftovers: {error}", folder.path().display());
    }
    Ok(is_finished.then_some(position.step))
}

/// Refuses to resume with a tokenizer other than `kept`, with which the run in `folder` began: its weights
/// know only the tokens of that one. Both configurations are resolved. The same tokenizer at another path is
/// accepted.
fn check_tokenizer(folder: &RunFolder, config: &Config, kept: &Tokenizer) -> Result<(), RunError> {
    let path = folder.config();
    let text = files::read(&path, MAX_FILE_BYTES).map_err(RunError::io(&path, "read"))?;
    // An unreadable configuration cannot show what changed; the run keeps its tokenizer in any case.
    let Ok(before) = Config::parse::<&str>(&path, &text, &[]) else { return Ok(()) };
    let of = |config: &Config| (config.tokenizer(), config.data.bpe_vocab_size);
    let is_kept = match config.tokenizer() {
        _ if of(&before.config) == of(config) => true,
        TokenizerChoice::Path(path) => {
            let end = config.data.end_of_document.as_deref();
            let named = source::load_tokenizer(&locate(config, &path), end, source::OWN_TOKENIZERS);
            named.is_ok_and(|tokenizer| tokenizer.hash() == kept.hash())
        }
        TokenizerChoice::Bytes => Tokenizer::bytes().hash() == kept.hash(),
        TokenizerChoice::Bpe | TokenizerChoice::Chars => false,
    };
    if is_kept {
        return Ok(());
    }
    let changes: Vec<String> = diff(&before.config, config)
        .iter()
        .filter(|change| ["data.tokenizer", "data.bpe_vocab_size"].contains(&change.key.as_str()))
        .map(Change::to_string)
        .collect();
    Err(RunError::Refused(format!(
        "the run in {} began with another tokenizer ({}), and its weights fit only that one; resume with it, or begin a new run",
        folder.path().display(),
        changes.join(", ")
    )))
}
