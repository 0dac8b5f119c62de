//! Static scales of a run: from the file that `precision.static_scales` names when it begins, from its
//! checkpoint afterwards.
//!
//! Every checkpoint has the scales, so a resumed run, evaluation and generation do not need the file. A file
//! that has changed under the same name is refused, unless the command line names it.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::paths::{locate, places};
use crate::position::{STATIC_SCALES, config_of, document, newest};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use xtrain_checkpoint::Checkpoint;
use xtrain_config::{Config, Parsed, Resolved, ScalesFile, files, set_text};
use xtrain_data::shell_path;
use xtrain_model::{StaticScales, in_block};
use xtrain_program::{CastOperand, LinearGemm};
use xtrain_step::linear_gemms::linear_gemms;
use xtrain_step::training_spec::TrainingSpec;

/// The text of a file of scales, and its path.
pub(crate) type ScalesText = (PathBuf, String);

/// The scales in the file that `config` names, if it names one.
pub(crate) fn of_file(config: &Config) -> Result<Option<ScalesFile>, RunError> {
    let Some(path) = path_of(config) else { return Ok(None) };
    let text = read(config, &path)?;
    parse(Some((path, text)))
}

/// The scales of a run that begins, or that goes on in the folder `run`.
pub(crate) fn of_run(parsed: &Parsed, run: Option<&RunFolder>) -> Result<Option<ScalesText>, RunError> {
    let config = &parsed.config;
    let Some(path) = path_of(config) else { return Ok(None) };
    let checkpoint = run.map(newest).transpose()?.flatten();
    let saved = match &checkpoint {
        Some(checkpoint) => text_of_checkpoint(checkpoint)?,
        None => None,
    };
    let Some((saved_path, saved, before)) = saved else {
        let text = read(config, &path)?;
        return Ok(Some((path, text)));
    };
    let is_same_path = path_of(&before).is_some_and(|before| is_same(&before, &path));
    let is_asked = parsed.is_argument(KEY) || !is_same_path;
    let text = match files::read_text(&path, ScalesFile::MAX_BYTES) {
        Err(error) if error.kind() == ErrorKind::NotFound && is_same_path => {
            return Ok(Some((saved_path, saved)));
        }
        _ => read(config, &path)?,
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

const KEY: &str = "precision.static_scales";

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

/// The scales of `resolved` for a step of `spec`, whose formats are complete but for them.
///
/// # Errors
/// The scales have not been read, are of another model, are no powers of two although `pow2_scales` is set,
/// or lack a tensor that the step casts. While it is open which layers stay in bf16 because FP8 is slower,
/// that is left to [`complete`], and the step has no static scales.
pub(crate) fn check(resolved: &Resolved, spec: &TrainingSpec) -> Result<Option<Arc<StaticScales>>, RunError> {
    let Some(name) = &resolved.config.precision.static_scales else { return Ok(None) };
    let Some(file) = &resolved.static_scales else {
        return Err(RunError::Refused(format!("{KEY}: the scales in {name} have not been read")));
    };
    file.check(&spec.model, spec.fp8.pow2_scales == Some(true))?;
    let missing = missing(file, spec);
    match (missing.is_empty(), &resolved.config.precision.skip_slower) {
        (true, _) => Ok(Some(file.scales.clone())),
        (false, None) => Ok(None),
        (false, Some(_)) => Err(file.missing(&missing).into()),
    }
}

/// Refuses scales that lack a tensor of a step whose layers are all decided.
pub(crate) fn complete(file: Option<&ScalesFile>, spec: &TrainingSpec) -> Result<(), RunError> {
    match file {
        Some(file) if spec.fp8.static_scales.is_none() => Err(file.missing(&missing(file, spec)).into()),
        _ => Ok(()),
    }
}

/// The tensors that a step casts and `file` has no scale for.
fn missing(file: &ScalesFile, spec: &TrainingSpec) -> Vec<(String, CastOperand)> {
    tensors(spec).into_iter().filter(|(layer, of)| file.scales.of(layer, *of).is_none()).collect()
}

/// The tensors that the linear layers of a step cast to FP8: layer and operand, in the order of the blocks.
fn tensors(spec: &TrainingSpec) -> Vec<(String, CastOperand)> {
    let mut all = Vec::new();
    for linear in linear_gemms(spec) {
        let is_fp8 = |gemm: LinearGemm| linear.gemms[gemm as usize].is_ok();
        let [fprop, dgrad, wgrad] = LinearGemm::ALL.map(is_fp8);
        // Without a scale of its own, the input of wgrad has that of the input.
        let of_wgrad = if linear.is_head() { CastOperand::Input } else { CastOperand::WgradInput };
        let operands = [
            (fprop, CastOperand::Input),
            (wgrad && !fprop, of_wgrad),
            (fprop || dgrad, CastOperand::Weight),
            (dgrad || wgrad, CastOperand::OutputGradient),
        ];
        let operands = operands.into_iter().filter(|(is_cast, _)| *is_cast);
        let blocks = linear.blocks.clone().map(Some).chain(linear.is_head().then_some(None));
        for (block, (_, operand)) in blocks.flat_map(|block| operands.clone().map(move |of| (block, of))) {
            let layer = block.map_or_else(|| linear.site.clone(), |block| in_block(block, &linear.site));
            all.push((block, layer, operand));
        }
    }
    // The head comes last.
    all.sort_by_key(|(block, ..)| block.unwrap_or(usize::MAX));
    all.into_iter().map(|(_, layer, operand)| (layer, operand)).collect()
}

fn path_of(config: &Config) -> Option<PathBuf> {
    config.precision.static_scales.as_deref().map(|path| locate(config, path))
}

fn is_same(a: &Path, b: &Path) -> bool {
    let absolute = |path: &Path| std::path::absolute(path).ok();
    absolute(a) == absolute(b)
}

fn read(config: &Config, path: &Path) -> Result<String, RunError> {
    files::read_text(path, ScalesFile::MAX_BYTES).map_err(|error| match error.kind() {
        ErrorKind::NotFound => RunError::Refused(format!(
            "{KEY}: there is no file {} ({} the current folder); write it with xtrain inspect RUN --write-scales {}",
            path.display(),
            places(config),
            shell_path(path)
        )),
        _ => RunError::Refused(format!("{KEY}: cannot read {}: {error}{}", path.display(), files::advice(&error))),
    })
}
