//! A folder with an adapter, as PEFT and runs with `[adapter]` write it, checked against a model.

use crate::error::RunError;
use crate::exchange;
use crate::folder::RunFolder;
use crate::paths::Sources;
use crate::source::{MAX_CONFIG_BYTES, no_such_folder};
use std::path::{Path, PathBuf};
use xtrain_checkpoint::hf::{self, ADAPTER_CONFIG, WeightReader};
use xtrain_config::AdapterConfig;
use xtrain_config::files::read_text;
use xtrain_data::{Tokenizer, matches_whole, shell_path};
use xtrain_model::peft::PeftConfig;
use xtrain_model::{Adapter, Architecture, Description};
use xtrain_planner::hf_names;
use xtrain_step::weights::Weights;

/// The adapters of a folder.
#[derive(Debug)]
pub(crate) struct AdapterFolder {
    path: PathBuf,
    /// The description.
    pub(crate) config: PeftConfig,
    /// The adapters, without dropout.
    pub(crate) adapter: Adapter,
}

impl AdapterFolder {
    /// Reads the description in `folder`, and checks it and the headers of its weights against the model
    /// `base`, whose own adapters do not count.
    ///
    /// # Errors
    /// A folder without an adapter; kinds that are not supported; tensors that are missing, unknown, of other
    /// shapes or of types that are not read; targets that are not in the model.
    pub(crate) fn open(folder: &Path, base: &Architecture) -> Result<AdapterFolder, RunError> {
        let config = read_config(folder)?;
        let refused = |error| RunError::Model { place: folder.display().to_string(), error };
        let targets = config.targets(base, &matches_whole).map_err(refused)?;
        let adapter = Adapter { rank: config.rank, alpha: config.alpha as f32, dropout: 0.0, targets };
        let model = Architecture { adapter: Some(adapter.clone()), ..base.clone() };
        hf::check(folder, &hf_names::adapter_names(&model))?;
        Ok(AdapterFolder { path: folder.to_owned(), config, adapter })
    }

    /// Warns of keys of the description that nothing reads.
    pub(crate) fn warn_of_unknown_keys(&self) {
        if !self.config.unknown.is_empty() {
            tracing::warn!(
                "{}: keys that nothing reads: {}; with PEFT the adapter may compute other results",
                self.path.join(ADAPTER_CONFIG).display(),
                xtrain_checkpoint::first_few(&self.config.unknown, 5)
            );
        }
    }

    /// Reads A and B for `weights`, whose model has these adapters: all rows, or those of this rank.
    pub(crate) fn import(&self, weights: &mut Weights) -> Result<(), RunError> {
        exchange::import_adapters(weights, &self.path)
    }

    /// The weights, by the names of the parameters of `model`, which has these adapters.
    pub(crate) fn reader(&self, model: &Architecture) -> Result<WeightReader, RunError> {
        Ok(WeightReader::open_whole(&self.path, &hf_names::adapter_names(model))?)
    }

    /// True if the folder, or that of the base model, has a tokenizer.
    pub(crate) fn has_tokenizer(&self, base: &Path) -> bool {
        has_tokenizer(&self.path) || has_tokenizer(base)
    }

    /// The tokenizer with which the adapters were trained: that of the folder, if it has one, or that of
    /// their base model.
    ///
    /// # Errors
    /// A tokenizer that cannot be read; one with more tokens than `model` has.
    pub(crate) fn tokenizer(&self, base: &Path, model: &Architecture) -> Result<Tokenizer, RunError> {
        if !has_tokenizer(&self.path) {
            return Ok(Tokenizer::load(base)?);
        }
        let tokenizer = Tokenizer::load(&self.path)?;
        let (tokens, rows) = (tokenizer.vocab_size(), model.vocab_size);
        match tokens > rows {
            true => Err(RunError::Refused(format!(
                "{}: the tokenizer has {tokens} tokens, but the model in {} only {rows}; adapters with new tokens are not supported, \
                 or the adapter is of another model",
                self.path.display(),
                base.display()
            ))),
            false => Ok(tokenizer),
        }
    }
}

fn has_tokenizer(folder: &Path) -> bool {
    folder.join("tokenizer.json").is_file()
}

/// Rank, alpha and targets of the adapters that a run begins with, if it names some; `base` is the model of
/// `model.init_from`.
///
/// # Errors
/// Those of [`AdapterFolder::open`].
pub(crate) fn settings(
    sources: &Sources<'_>,
    base: Option<&Description>,
) -> Result<Option<AdapterConfig>, RunError> {
    let (Some(folder), Some(base)) = (&sources.adapter, base) else { return Ok(None) };
    let refused = |error| RunError::Model { place: "model.init_from".into(), error };
    let found = AdapterFolder::open(folder, &base.architecture().map_err(refused)?)?;
    Ok(Some(AdapterConfig {
        rank: Some(found.config.rank),
        alpha: Some(found.config.alpha),
        targets: Some(found.adapter.targets.into()),
        ..AdapterConfig::default()
    }))
}

/// Reads the description in `folder`.
pub(crate) fn read_config(folder: &Path) -> Result<PeftConfig, RunError> {
    if !folder.exists() {
        return Err(no_such_folder(folder));
    }
    let file = folder.join(ADAPTER_CONFIG);
    if !file.is_file() {
        let run = RunFolder::new(folder);
        let advice = match run.is_begun() && run.hf().join(ADAPTER_CONFIG).is_file() {
            true => format!("the adapter of this run is in {}", shell_path(&run.hf())),
            false => "name the folder of an adapter, as PEFT or a run with [adapter] writes it".to_owned(),
        };
        return Err(RunError::Refused(format!("{} has no {ADAPTER_CONFIG}; {advice}", folder.display())));
    }
    let text = read_text(&file, MAX_CONFIG_BYTES).map_err(RunError::io(&file, "read"))?;
    PeftConfig::parse(&text).map_err(|error| RunError::Model { place: folder.display().to_string(), error })
}
