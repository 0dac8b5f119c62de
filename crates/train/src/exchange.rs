//! Models in and out: Hugging Face folders to and from masters.

use crate::config::Config;
use crate::run::RunError;
use crate::run::setup::{CONFIG_FILE, GENERATION_FILE};
use crate::weights::Weights;
use std::path::Path;
use xtrain_checkpoint::BoxError;
use xtrain_checkpoint::hf::{self, ExportDtype, ExportOptions, NameEntry, NameMap, NamePart, TiedName};
use xtrain_data::Tokenizer;
use xtrain_model::Architecture;
use xtrain_model::hf::{HfConfig, IGNORABLE_SUFFIXES};

/// What a Hugging Face folder says of a model beside its weights.
pub struct Identity {
    config: HfConfig,
}

impl Identity {
    /// The description of `model`, on top of that of the folder it came from, if any.
    pub fn new(source: Option<HfConfig>, model: &Architecture, tokenizer: &Tokenizer) -> Self {
        let bos_token_id = tokenizer.begin_of_sequence();
        let eos_token_ids = tokenizer.stop_tokens().to_vec();
        let (source, generation) = source.map(|hf| (hf.source, hf.generation)).unwrap_or_default();
        Identity {
            config: HfConfig { model: model.clone(), bos_token_id, eos_token_ids, source, generation },
        }
    }

    /// config.json and generation_config.json beside weights of this type.
    fn files(&self, dtype: ExportDtype) -> Vec<(String, Vec<u8>)> {
        let dtype = match dtype {
            ExportDtype::Fp32 => "float32",
            ExportDtype::Bf16 => "bfloat16",
        };
        vec![
            (CONFIG_FILE.into(), self.config.to_json(dtype).into_bytes()),
            (GENERATION_FILE.into(), self.config.generation_json().into_bytes()),
        ]
    }
}

/// Reads the weights of the Hugging Face folder `folder`.
pub fn import(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let names = name_map(weights.model());
    hf::import(folder, &names, &mut |name, values| {
        weights.write_master(name, values).map_err(BoxError::from)
    })?;
    Ok(weights.refresh()?)
}

/// Writes the masters as the Hugging Face folder `folder`, with the tokenizer.
pub fn export(
    weights: &mut Weights,
    identity: &Identity,
    tokenizer: &Tokenizer,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), RunError> {
    let names = name_map(weights.model());
    let mut files = identity.files(options.dtype);
    files.extend(tokenizer.files().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    let mut source = |name: &str| weights.read_master(name).map_err(BoxError::from);
    Ok(hf::export(folder, &names, &mut source, &files, options)?)
}

/// Names in the log what the Hugging Face folder `folder` holds and an export does not: model cards, licences, weights in other formats.
pub fn warn_of_what_stays(folder: &Path, tokenizer: &Tokenizer) {
    let is_carried = |name: &str| {
        let beside =
            tokenizer.files().any(|(file, _)| file == name) || [CONFIG_FILE, GENERATION_FILE].contains(&name);
        beside
            || name.starts_with('.')
            || name.ends_with(".safetensors")
            || name.ends_with(".safetensors.index.json")
    };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    let mut names: Vec<String> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !is_carried(name))
        .collect();
    names.sort();
    if !names.is_empty() {
        let place = folder.display();
        tracing::warn!(
            "{place}: an export holds the model, its configuration and its tokenizer, but not {}; copy what is still needed",
            names.join(", ")
        );
    }
}

/// The options of the export at the end of a run.
pub fn export_options(config: &Config) -> ExportOptions {
    let dtype = config.checkpoint.export_dtype.unwrap_or(ExportDtype::Fp32);
    ExportOptions { dtype, overwrite: true, ..ExportOptions::default() }
}

/// What the parameters of `model` are called in a Hugging Face folder.
pub fn name_map(model: &Architecture) -> NameMap {
    let entry = |p: xtrain_model::ParameterSpec| NameEntry {
        ours: p.name,
        shape: p.shape,
        parts: p.parts.into_iter().map(|part| NamePart { theirs: part.name, rows: part.rows }).collect(),
    };
    let tied = TiedName { theirs: "lm_head.weight".into(), same_as: "model.embed_tokens.weight".into() };
    NameMap {
        entries: model.parameters().into_iter().map(entry).collect(),
        tied: if model.tie_embeddings { vec![tied] } else { Vec::new() },
        ignorable_suffixes: IGNORABLE_SUFFIXES.map(String::from).to_vec(),
    }
}
