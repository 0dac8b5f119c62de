//! Folders without a model in safetensors files: what they hold instead, and what to do.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::standard_names::MERGE;
use super::{ADAPTER_CONFIG, ADAPTER_FILE, INDEX_FILE, SINGLE_FILE};
use crate::error::{CheckpointError, Result};
use crate::files;

/// Files that hold the weights of an adapter.
const ADAPTERS: [&str; 4] = [ADAPTER_FILE, "adapter_model.bin", "adapters.safetensors", "adapters.npz"];

/// Beginnings of files that hold the state of a trainer.
const STATES: [&str; 5] = ["training_args", "optimizer", "scheduler", "scaler", "rng_state"];

/// Endings of files that hold a model under other names or in other formats, with advice.
const OTHER_FORMATS: [(&[&str], &str); 6] = [
    (&[".safetensors"], "download the complete folder (the index is missing, or the file has another name)"),
    (
        &[".bin"],
        "convert to safetensors first (from_pretrained, then save_pretrained of transformers), since pickles can run code",
    ),
    (
        &[".pt", ".pth", ".ckpt"],
        "convert to safetensors first (safetensors.torch.save_file, with the names that transformers gives the tensors), since \
         pickles can run code; or get the version of this model for transformers",
    ),
    (&[".gguf"], "get the safetensors version of this model"),
    (
        &[".distcp"],
        "convert it first (torch.distributed.checkpoint.format_utils, then save_pretrained of transformers)",
    ),
    (&[".h5", ".msgpack", ".onnx", ".npz"], "get the safetensors version of this model"),
];

/// The error for a folder without safetensors weights, with advice that depends on its other files.
pub(super) fn no_weights(folder: &Path) -> CheckpointError {
    let found = names(folder).and_then(|names| instead(folder, &names));
    match found {
        Err(error) => error,
        Ok(Some(error)) => error,
        Ok(None) => CheckpointError::folder(
            folder,
            no_safetensors(),
            "name a folder with a model in safetensors files",
        ),
    }
}

/// The error for a folder that lacks config.json, if it holds an adapter or a model in another format.
pub fn not_a_model(folder: &Path) -> Option<CheckpointError> {
    let names = names(folder).ok()?;
    let has_model = names.iter().any(|name| [SINGLE_FILE, INDEX_FILE].contains(&name.as_str()));
    if has_model { None } else { instead(folder, &names).ok().flatten() }
}

/// The error for a folder that holds an adapter in place of a model.
pub fn only_an_adapter(folder: &Path) -> Option<CheckpointError> {
    let names = names(folder).ok()?;
    is_adapter(&names).then(|| not_a_model(folder)).flatten()
}

/// Warns of an adapter beside a model: transformers reads its base and the adapter, not the model.
pub fn warn_of_adapter(folder: &Path) {
    if folder.join(ADAPTER_CONFIG).is_file() {
        tracing::warn!(
            "{}: {ADAPTER_CONFIG} is ignored, and the folder's own weights are read; transformers with peft reads the base \
             of the adapter and applies it",
            folder.display()
        );
    }
}

/// The problem with a folder without safetensors, for a message.
fn no_safetensors() -> String {
    format!("has neither {SINGLE_FILE} nor {INDEX_FILE}")
}

/// The error for a folder with these files, none of which is a model in safetensors files.
fn instead(folder: &Path, names: &[String]) -> Result<Option<CheckpointError>> {
    if is_adapter(names) {
        return Ok(Some(CheckpointError::folder(folder, format!("is {}", adapter(folder)), MERGE)));
    }
    let problem = no_safetensors();
    if names.iter().any(|name| name == "zero_to_fp32.py") {
        let advice = "convert it first: python zero_to_fp32.py . FOLDER --safe_serialization";
        return Ok(Some(CheckpointError::folder(
            folder,
            format!("{problem}, only a checkpoint of DeepSpeed"),
            advice,
        )));
    }
    let is_model = |name: &&String| name.starts_with("pytorch_model") || name.starts_with("consolidated");
    let sorted = |like: &dyn Fn(&&String) -> bool| {
        let preferred = names.iter().filter(like).find(is_model);
        preferred.or_else(|| names.iter().find(like)).cloned()
    };
    let of_format = |endings: &[&str]| {
        sorted(&|name| {
            endings.iter().any(|ending| name.ends_with(ending))
                && !STATES.iter().any(|start| name.starts_with(start))
        })
    };
    let found: Vec<(String, &str)> = OTHER_FORMATS
        .iter()
        .filter_map(|(endings, advice)| of_format(endings).map(|name| (name, *advice)))
        .collect();
    let Some((_, advice)) = found.first() else { return Ok(None) };
    let examples: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    let problem = format!("{problem}, only {}", examples.join(" and "));
    Ok(Some(CheckpointError::folder(folder, problem, *advice)))
}

fn is_adapter(names: &[String]) -> bool {
    names.iter().any(|name| name == ADAPTER_CONFIG || ADAPTERS.contains(&name.as_str()))
}

/// The adapter in a folder, as its description names it.
fn adapter(folder: &Path) -> String {
    /// More than any description; a limit for a file that is none.
    const MAX_BYTES: u64 = 1 << 20;
    let path = folder.join(ADAPTER_CONFIG);
    let is_small = fs::metadata(&path).is_ok_and(|found| found.len() <= MAX_BYTES);
    let text = if is_small { files::read(&path).unwrap_or_default() } else { Vec::new() };
    let json: Value = serde_json::from_slice(&text).unwrap_or_default();
    let named = |key: &str| json[key].as_str().filter(|name| !name.is_empty());
    let kind = match named("peft_type") {
        Some("LORA") | None => "a LoRA adapter".to_owned(),
        Some(other) => format!("an adapter ({})", other.escape_debug().take(40).collect::<String>()),
    };
    match named("base_model_name_or_path") {
        Some(base) => {
            let base: String = base.escape_debug().take(200).collect();
            format!("{kind} of the model '{base}', not a model")
        }
        None => format!("{kind}, not a model"),
    }
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))?;
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}
