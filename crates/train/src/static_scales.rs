//! Static scales of a run: from the file that `precision.static_scales` names when it begins, from its
//! checkpoint afterwards.
//!
//! Every checkpoint has the scales, so a resumed run, evaluation and generation do not need the file. A file
//! that has changed under the same name is refused, unless the command line names it.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::paths::Sources;
use crate::position::{STATIC_SCALES, config_of, document, newest};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::Checkpoint;
use xtrain_config::{Config, Parsed, ScalesFile, files, set_text};
use xtrain_data::shell_path;
use xtrain_planner::static_scales::KEY;
use xtrain_step::training_spec::TrainingSpec;

/// The text of a file of scales, and its path.
pub(crate) type ScalesText = (PathBuf, String);

/// The scales in the file that the configuration names, if it names one.
pub(crate) fn of_file(sources: &Sources<'_>) -> Result<Option<ScalesFile>, RunError> {
    let Some(path) = &sources.static_scales else { return Ok(None) };
    Ok(Some(ScalesFile::parse(path, read(sources, path)?.as_bytes())?))
}

/// The scales of the run `parsed`, whose paths are in `sources`, that begins or goes on in the folder `run`.
pub(crate) fn of_run(
    parsed: &Parsed,
    sources: &Sources<'_>,
    run: Option<&RunFolder>,
) -> Result<Option<ScalesText>, RunError> {
    let Some(path) = sources.static_scales.clone() else { return Ok(None) };
    let checkpoint = run.map(newest).transpose()?.flatten();
    let saved = match &checkpoint {
        Some(checkpoint) => text_of_checkpoint(checkpoint)?,
        None => None,
    };
    let Some((saved_path, saved, before)) = saved else {
        let text = read(sources, &path)?;
        return Ok(Some((path, text)));
    };
    let is_same_path = Sources::resolve(&before).static_scales.is_some_and(|before| is_same(&before, &path));
    let is_asked = parsed.is_argument(KEY) || !is_same_path;
    let text = match files::read_text(&path, ScalesFile::MAX_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound && is_same_path => {
            return Ok(Some((saved_path, saved)));
        }
        _ => read(sources, &path)?,
    };
    let (old, new) =
        (ScalesFile::parse(&saved_path, saved.as_bytes())?, ScalesFile::parse(&path, text.as_bytes())?);
    match new.scales.differences(&old.scales) {
        0 => Ok(Some((saved_path, saved))),
        tensors if is_asked => {
            tracing::info!(
                "{}: the static scales of {} differ from those of the checkpoint",
                path.display(),
                counted(tensors)
            );
            Ok(Some((path, text)))
        }
        tensors => Err(RunError::Refused(format!(
            "{} has changed since the run began: the scales of {} are not those of the checkpoint; continue with the scales in the \
             file with {}, or restore it",
            path.display(),
            counted(tensors),
            set_text(KEY, &path.to_string_lossy())
        ))),
    }
}

fn counted(tensors: usize) -> String {
    if tensors == 1 { "1 tensor".to_owned() } else { format!("{tensors} tensors") }
}

/// The scales in a text, if there is one.
pub(crate) fn parse(text: Option<ScalesText>) -> Result<Option<ScalesFile>, RunError> {
    Ok(text.map(|(path, text)| ScalesFile::parse(&path, text.as_bytes())).transpose()?)
}

/// The scales with which the steps before a checkpoint were computed, if these were static.
pub fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Option<ScalesFile>, RunError> {
    parse(text_of_checkpoint(checkpoint)?.map(|(path, text, _)| (path, text)))
}

/// The document with the static scales of the step of `spec`, if it has any.
pub(crate) fn document_of(spec: &TrainingSpec) -> Option<(String, serde_json::Value)> {
    let scales = spec.fp8.static_scales.as_deref()?;
    Some((STATIC_SCALES.to_owned(), serde_json::json!(ScalesFile::text(scales))))
}

/// The static scales in a checkpoint, with the document's path and the checkpoint's configuration.
fn text_of_checkpoint(checkpoint: &Checkpoint) -> Result<Option<(PathBuf, String, Config)>, RunError> {
    let config = config_of(checkpoint)?;
    if config.precision.static_scales.is_none() {
        return Ok(None);
    }
    let path = checkpoint.path().join(format!("{STATIC_SCALES}.json"));
    Ok(Some((path, document(checkpoint, STATIC_SCALES)?, config)))
}

fn is_same(a: &Path, b: &Path) -> bool {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    absolute(a) == absolute(b)
}

fn read(sources: &Sources<'_>, path: &Path) -> Result<String, RunError> {
    files::read_text(path, ScalesFile::MAX_BYTES).map_err(|error| match error.kind() {
        ErrorKind::NotFound => RunError::Refused(format!(
            "{KEY}: there is no file {} ({} the current folder); write it with xtrain inspect RUN --write-scales {}",
            path.display(),
            sources.places(),
            shell_path(path)
        )),
        _ => RunError::Refused(format!("{KEY}: cannot read {}: {error}{}", path.display(), files::advice(&error))),
    })
}
