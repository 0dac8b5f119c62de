//! The model under the adapters of a run. It is not trained and not saved: a run reads it again from the
//! folder of `model.init_from`, and a hash tells whether that is still the same model.

use crate::error::RunError;
use crate::exchange;
use crate::paths::Sources;
use crate::source::read_hf_config;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::hf::WeightReader;
use xtrain_config::Config;
use xtrain_model::Architecture;
use xtrain_planner::hf_names;
use xtrain_step::weights::Weights;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// The folder of the model under the adapters of a run with this resolved configuration, if it trains some.
pub(crate) fn folder(config: &Config) -> Option<PathBuf> {
    Sources::resolve(config).init_from.filter(|_| config.adapter.rank.is_some())
}

/// Reads the model in `folder`, also as that under the adapters of `weights`.
pub(crate) fn import(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let rows = read_hf_config(folder)?.model.vocab_size;
    exchange::import_grown(weights, folder, rows)
}

/// The hash of the weights of `model` in `folder`, in hexadecimal. It depends on the numbers alone, whatever
/// their type there and in the run. One tensor is in memory at a time.
pub(crate) fn hash(folder: &Path, model: &Architecture) -> Result<String, RunError> {
    let names = hf_names::name_map(&model.base());
    let reader = WeightReader::open_whole(folder, &names)?;
    let (mut sum, mut values) = (0_u64, Vec::new());
    for (index, entry) in names.entries.iter().enumerate() {
        reader.read(index, &mut values)?;
        let of_values = xxh3_64_with_seed(bytemuck::cast_slice(&values), xxh3_64(entry.name.as_bytes()));
        sum = sum.wrapping_add(of_values);
    }
    Ok(format!("{sum:016x}"))
}

/// Refuses a folder whose weights have another hash than those with which the adapters of a run were
/// `trained`. `option` names another folder.
pub(crate) fn check(
    folder: &Path,
    model: &Architecture,
    trained: &str,
    option: &str,
) -> Result<(), RunError> {
    let found = hash(folder, model)?;
    match trained == found {
        true => Ok(()),
        false => Err(RunError::Refused(format!(
            "{} has changed since the adapters of this run were trained on it (hash {trained} then, {found} now); restore the folder, \
             or name the same model with {option}",
            folder.display()
        ))),
    }
}
