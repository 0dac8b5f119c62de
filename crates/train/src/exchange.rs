//! Import and export: Hugging Face folders to masters, and masters to Hugging Face folders.

use crate::error::RunError;
use crate::source::{CONFIG_FILE, GENERATION_FILE};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use xtrain_checkpoint::hf::{self, ADAPTER_CONFIG, ExportDtype, ExportOptions, NameEntry, NameMap};
use xtrain_checkpoint::{BoxError, Checkpoint};
use xtrain_config::{Config, OptimizerKind};
use xtrain_data::Tokenizer;
use xtrain_model::hf::{HfConfig, Notes};
use xtrain_model::{Architecture, Numerics};
use xtrain_planner::hf_names;
use xtrain_program::StateKind;
use xtrain_step::weights::Weights;

/// Metadata of a Hugging Face folder: everything but the weights.
pub struct Identity {
    config: HfConfig,
    /// The folder of the model under adapters, as the run file names it.
    base: Option<String>,
}

impl Identity {
    /// The identity of adapters of the model in `folder`.
    pub(crate) fn of_base(self, folder: Option<&str>) -> Identity {
        Identity { base: folder.map(str::to_owned), ..self }
    }

    /// The description of `model`, based on that of the folder it came from, if any, with the weight of the
    /// balance loss with which its experts were trained, if any.
    ///
    /// # Errors
    ///
    /// A model that no config.json describes.
    pub fn new(
        source: Option<HfConfig>,
        model: &Architecture,
        tokenizer: &Tokenizer,
        balance_loss: Option<f64>,
    ) -> Result<Self, RunError> {
        let model =
            model.description().map_err(|error| RunError::Model { place: "the model".into(), error })?;
        let bos_token_id = tokenizer.begin_of_sequence();
        let mut eos_token_ids = tokenizer.stop_tokens().to_vec();
        let (mut source, mut generation) = source.map(|hf| (hf.source, hf.generation)).unwrap_or_default();
        if let Some(end) = tokenizer.end_of_turn() {
            // Engines pad with the first, and some read only one file.
            eos_token_ids.sort_by_key(|id| *id != end);
            for file in [&mut source, &mut generation] {
                file.insert("eos_token_id".into(), serde_json::json!(eos_token_ids));
            }
        }
        let notes = Notes::default();
        let config = HfConfig { model, bos_token_id, eos_token_ids, balance_loss, notes, source, generation };
        Ok(Identity { config, base: None })
    }

    /// The description of a folder without a tokenizer.
    pub(crate) fn of_folder(config: HfConfig) -> Identity {
        Identity { config, base: None }
    }

    /// The description of weights that `optimizer` trained.
    pub(crate) fn trained_by(mut self, optimizer: OptimizerKind) -> Self {
        self.config.set_of_muon(optimizer == OptimizerKind::Muon);
        self
    }

    /// config.json and generation_config.json for weights of this type, exported as `names` says.
    fn files(&self, dtype: ExportDtype, names: &NameMap) -> Vec<(String, Vec<u8>)> {
        let config = match dtype {
            ExportDtype::Fp32 => self.config.to_json("float32"),
            ExportDtype::Bf16 => self.config.to_json("bfloat16"),
            ExportDtype::Fp8 => self.config.to_fp8_json(&hf_names::modules_in_bf16(names)),
        };
        vec![
            (CONFIG_FILE.into(), config.into_bytes()),
            (GENERATION_FILE.into(), self.config.generation_json().into_bytes()),
        ]
    }
}

/// The model that the Hugging Face folder `folder` describes as `hf`, after a check of the headers of
/// its files: memory is only allocated for a model whose tensors are there.
///
/// # Errors
///
/// Tensors that are missing, unknown, of other shapes or of types that are not read.
pub(crate) fn checked_model(folder: &Path, hf: &HfConfig) -> Result<Architecture, RunError> {
    /// The longest list of names that is compared with any folder: names of experts, as a config.json claims
    /// them, could fill memory.
    const LISTED: usize = 1 << 16;
    let model = hf.model.architecture();
    let model = model.map_err(|error| RunError::Model { place: folder.display().to_string(), error })?;
    let parameters = model.parameters();
    if parameters.iter().map(|p| p.parts.count()).sum::<usize>() > LISTED {
        let least: usize =
            parameters.iter().map(|p| if p.whole.is_some() { 1 } else { p.parts.count() }).sum();
        let found = hf::tensor_count(folder)?;
        if found < least {
            return Err(RunError::Refused(format!(
                "{}: config.json describes a model of at least {least} tensors, but the folder has {found}; check that \
                 config.json belongs to this folder, and that the download is complete",
                folder.display()
            )));
        }
    }
    hf::check(folder, &hf_names::name_map(&model))?;
    Ok(model)
}

/// Reads the weights of the Hugging Face folder `folder`: all of them, or the rows of this rank.
pub fn import(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let vocab_size = weights.model().vocab_size;
    import_grown(weights, folder, vocab_size)
}

/// As [`import`], from a folder whose embedding and head have `vocab_size` rows, at most as many as those of
/// `weights`. Each further row is the mean of the folder's.
pub(crate) fn import_grown(weights: &mut Weights, folder: &Path, vocab_size: usize) -> Result<(), RunError> {
    let model = Architecture { vocab_size, ..weights.model().base() };
    let names = hf_names::name_map(&model);
    let held = held_rows(weights, &hf_names::name_map(&weights.model().base()));
    let in_folder =
        |(entry, held): (&NameEntry, &Range<usize>)| held.start.min(entry.rows())..held.end.min(entry.rows());
    let rows: Vec<Range<usize>> = names.entries.iter().zip(&held).map(in_folder).collect();
    let new_rows: HashMap<&str, usize> = names
        .entries
        .iter()
        .zip(held.iter().zip(&rows))
        .map(|(entry, (held, rows))| (entry.name.as_str(), held.len() - rows.len()))
        .filter(|(_, new)| *new > 0)
        .collect();
    let means = mean_rows(folder, &names, &new_rows)?;
    hf::import_rows(folder, &names, &rows, &mut |name, values| {
        let write = |weights: &mut Weights, values: &[f32]| {
            if !weights.layout().has(name) {
                return Ok(());
            }
            let written = weights.write_parameter_rows(name, values);
            written.map_err(BoxError::from)
        };
        match (new_rows.get(name), means.get(name)) {
            (Some(&new), Some(mean)) => write(weights, &[values, &mean.repeat(new)].concat()),
            _ => write(weights, values),
        }
    })?;
    Ok(weights.refresh()?)
}

/// Reads A and B of the adapters in `folder`: all of them, or the rows of this rank.
pub(crate) fn import_adapters(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let names = hf_names::adapter_names(weights.model());
    let rows = held_rows(weights, &names);
    hf::import_rows(folder, &names, &rows, &mut |name, values| match weights.layout().has(name) {
        true => weights.write_parameter_rows(name, values).map_err(BoxError::from),
        false => Ok(()),
    })?;
    Ok(weights.refresh()?)
}

/// The rows of each entry that this rank holds.
fn held_rows(weights: &Weights, names: &NameMap) -> Vec<Range<usize>> {
    let held = |entry: &NameEntry| {
        let held = weights.layout().held(StateKind::Master, &entry.name);
        let all = if weights.layout().has(&entry.name) { 0..entry.rows() } else { 0..0 };
        held.map_or(all, |held| held.rows)
    };
    names.entries.iter().map(held).collect()
}

/// Elements that are read at a time for a mean.
const MEAN_ELEMENTS: usize = 1 << 24;

/// The mean of all rows of those entries of `names` that `wanted` has: in f64, row after row, whatever this
/// rank holds.
fn mean_rows(
    folder: &Path,
    names: &NameMap,
    wanted: &HashMap<&str, usize>,
) -> Result<HashMap<String, Vec<f32>>, RunError> {
    let entries = || names.entries.iter().filter(|entry| wanted.contains_key(entry.name.as_str()));
    let columns = |entry: &NameEntry| entry.shape.iter().skip(1).product::<usize>();
    let mut sums: HashMap<String, Vec<f64>> =
        entries().map(|entry| (entry.name.clone(), vec![0.0; columns(entry)])).collect();
    let most_rows = entries().map(NameEntry::rows).max().unwrap_or(0);
    let piece = (MEAN_ELEMENTS / entries().map(columns).max().unwrap_or(1).max(1)).max(1);
    for start in (0..most_rows).step_by(piece) {
        let rows = |entry: &NameEntry| match wanted.contains_key(entry.name.as_str()) {
            true => start.min(entry.rows())..(start + piece).min(entry.rows()),
            false => 0..0,
        };
        let rows: Vec<Range<usize>> = names.entries.iter().map(rows).collect();
        hf::import_rows(folder, names, &rows, &mut |name, values| {
            if let Some(sum) = sums.get_mut(name) {
                for row in values.chunks_exact(sum.len().max(1)) {
                    sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += f64::from(*value));
                }
            }
            Ok(())
        })?;
    }
    let mean = |(name, sum): (String, Vec<f64>)| {
        let rows = names.entries.iter().find(|entry| entry.name == name).map_or(1, NameEntry::rows).max(1);
        (name, sum.into_iter().map(|sum| (sum / rows as f64) as f32).collect())
    };
    Ok(sums.into_iter().map(mean).collect())
}

/// Writes the masters as the Hugging Face folder `folder`, with the tokenizer.
pub fn export(
    weights: &mut Weights,
    identity: &Identity,
    tokenizer: &Tokenizer,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), RunError> {
    let (model, numerics) = (weights.model().clone(), weights.numerics().clone());
    let mut master = |name: &str| weights.read_parameter(name).map_err(BoxError::from);
    write(&model, &numerics, &mut master, identity, Some(tokenizer), folder, options)
}

/// As [`export`], with the masters of a checkpoint of this model.
pub fn export_checkpoint(
    checkpoint: &Checkpoint,
    (model, numerics): (&Architecture, &Numerics),
    identity: &Identity,
    tokenizer: &Tokenizer,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), RunError> {
    let shapes: HashMap<String, Vec<usize>> =
        model.parameters().into_iter().map(|p| (p.name, p.shape)).collect();
    let mut master = |name: &str| read_master(checkpoint, name, &shapes[name]);
    write(model, numerics, &mut master, identity, Some(tokenizer), folder, options)
}

/// The master of this shape in a checkpoint.
pub(crate) fn read_master(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<Vec<f32>, BoxError> {
    let mut values = vec![0.0; shape.iter().product()];
    let tensor = StateKind::Master.prefix() + name;
    checkpoint.read_rows(&tensor, 0..shape[0], bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

/// The masters by name.
pub(crate) type Masters<'a> = dyn FnMut(&str) -> Result<Vec<f32>, BoxError> + 'a;

/// As [`export`], with masters that come one by one.
pub(crate) fn write(
    model: &Architecture,
    numerics: &Numerics,
    master: &mut Masters<'_>,
    identity: &Identity,
    tokenizer: Option<&Tokenizer>,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), RunError> {
    let tokenizer_files = tokenizer.map(Tokenizer::export_files).transpose()?.unwrap_or_default();
    if let Some(adapter) = &model.adapter {
        let names = hf_names::adapter_names(model);
        let description = adapter.to_json(model, identity.base.as_deref());
        let mut files = vec![(ADAPTER_CONFIG.to_owned(), description.into_bytes())];
        files.extend(tokenizer_files);
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..options.clone() };
        return Ok(hf::export(folder, &names, master, &files, &options)?);
    }
    let names = match options.dtype {
        ExportDtype::Fp8 => {
            let names = hf_names::fp8_names(model, numerics);
            hf_names::check_fp8(&names)?;
            hf_names::warn_of_bf16(&names);
            names
        }
        ExportDtype::Fp32 | ExportDtype::Bf16 => hf_names::name_map(model),
    };
    let mut files = identity.files(options.dtype, &names);
    files.extend(tokenizer_files);
    Ok(hf::export(folder, &names, master, &files, options)?)
}

/// Bytes of host memory that an export of `model` holds at its peak: those of one tensor.
pub fn export_bytes(model: &Architecture) -> usize {
    hf::peak_bytes(&hf_names::name_map(model))
}

/// Logs the files of the Hugging Face folder `folder` that an export does not contain: model cards, licences,
/// weights in other formats.
pub fn warn_of_unexported_files(folder: &Path, tokenizer: Option<&Tokenizer>) {
    let is_carried = |name: &str| {
        let mut files = tokenizer.into_iter().flat_map(Tokenizer::files);
        let beside = files.any(|(file, _)| file.split('/').next() == Some(name))
            || [CONFIG_FILE, GENERATION_FILE].contains(&name);
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

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_model::Recipe;
    use xtrain_runtime::Checks;
    use xtrain_step::engine::Processor;

    /// A model with an embedding and a head of `vocab_size` rows.
    fn weights(vocab_size: usize) -> Weights {
        let config = format!(
            r#"{{"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": {vocab_size}}}"#
        );
        let model = HfConfig::parse(&config).expect("a config").model.architecture().expect("a model");
        let engine = Processor::Cpu.engine(Checks::default()).expect("an engine");
        Weights::new(engine, model, Recipe::Fp32).expect("weights")
    }

    #[test]
    fn new_rows_are_the_mean_of_the_old_ones() {
        let dir = tempfile::tempdir().expect("a folder");
        let (folder, tokenizer) = (dir.path().join("hf"), Tokenizer::bytes());
        let mut old = weights(300);
        old.initialize(7, 0.02).expect("initial weights");
        let identity = Identity::new(None, old.model(), &tokenizer, None).expect("a description");
        let options = ExportOptions { dtype: ExportDtype::Fp32, ..ExportOptions::default() };
        export(&mut old, &identity, &tokenizer, &folder, &options).expect("an export");
        let mut grown = weights(384);
        import_grown(&mut grown, &folder, 300).expect("an import");
        for name in ["embed.weight", "lm_head.weight"] {
            let (before, after) =
                (old.read_parameter(name).expect("rows"), grown.read_parameter(name).expect("rows"));
            assert_eq!(before, after[..300 * 16], "{name}");
            let mean: Vec<f32> = (0..16)
                .map(|column| {
                    let values = before.chunks_exact(16).map(|row| f64::from(row[column]));
                    (values.fold(0.0, |sum, value| sum + value) / 300.0) as f32
                })
                .collect();
            assert!(after[300 * 16..].chunks_exact(16).all(|row| row == mean), "{name}");
        }
        let norm = |weights: &mut Weights| weights.read_parameter("norm.weight").expect("a norm");
        assert_eq!(norm(&mut old), norm(&mut grown));
        assert!(import(&mut grown, &folder).is_err(), "the shapes differ");
    }
}
