//! Import and export: Hugging Face folders to masters, and masters to Hugging Face folders.

use crate::error::RunError;
use crate::saved;
use crate::source::{CONFIG_FILE, GENERATION_FILE};
use std::collections::HashMap;
use std::path::Path;
use xtrain_checkpoint::hf::{
    self, ExportDtype, ExportOptions, Fp8Scales, NameEntry, NameMap, NamePart, TiedName, WholeName,
};
use xtrain_checkpoint::{BoxError, Checkpoint};
use xtrain_config::Config;
use xtrain_data::Tokenizer;
use xtrain_model::hf::{HfConfig, IGNORABLE_SUFFIXES, Notes};
use xtrain_model::{Architecture, Bf16Reason, Numerics, ParameterSpec, ROUTER};
use xtrain_program::{Quantization, StateKind};
use xtrain_step::linear_gemms::fprops;
use xtrain_step::weights::Weights;
use xtrain_tensor::{NameWhole, Scaling, TILE};

/// Metadata of a Hugging Face folder: everything but the weights.
pub struct Identity {
    config: HfConfig,
}

impl Identity {
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
        let eos_token_ids = tokenizer.stop_tokens().to_vec();
        let (source, generation) = source.map(|hf| (hf.source, hf.generation)).unwrap_or_default();
        let notes = Notes::default();
        let config = HfConfig { model, bos_token_id, eos_token_ids, balance_loss, notes, source, generation };
        Ok(Identity { config })
    }

    /// config.json and generation_config.json for weights of this type, exported as `names` says.
    fn files(&self, dtype: ExportDtype, names: &NameMap) -> Vec<(String, Vec<u8>)> {
        let config = match dtype {
            ExportDtype::Fp32 => self.config.to_json("float32"),
            ExportDtype::Bf16 => self.config.to_json("bfloat16"),
            ExportDtype::Fp8 => self.config.to_fp8_json(&modules_in_bf16(names)),
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
    hf::check(folder, &name_map(&model))?;
    Ok(model)
}

/// Reads the weights of the Hugging Face folder `folder`: all of them, or the rows of this rank.
pub fn import(weights: &mut Weights, folder: &Path) -> Result<(), RunError> {
    let names = name_map(weights.model());
    let rows = |entry: &NameEntry| {
        let held = weights.layout().held(StateKind::Master, &entry.name);
        held.map_or(0..entry.rows(), |held| held.rows)
    };
    let rows: Vec<_> = names.entries.iter().map(rows).collect();
    hf::import_rows(folder, &names, &rows, &mut |name, values| {
        let rows = weights.write_rows(StateKind::Master, name, bytemuck::cast_slice(values));
        rows.map_err(BoxError::from)
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
    let (model, numerics) = (weights.model().clone(), weights.numerics().clone());
    let mut master = |name: &str| weights.read_master(name).map_err(BoxError::from);
    write(&model, &numerics, &mut master, identity, tokenizer, folder, options)
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
    let mut master = |name: &str| -> Result<Vec<f32>, BoxError> {
        let shape = &shapes[name];
        let mut values = vec![0.0; shape.iter().product()];
        let tensor = saved::prefix(StateKind::Master) + name;
        checkpoint.read_rows(&tensor, 0..shape[0], bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    };
    write(model, numerics, &mut master, identity, tokenizer, folder, options)
}

/// The masters by name.
type Masters<'a> = dyn FnMut(&str) -> Result<Vec<f32>, BoxError> + 'a;

fn write(
    model: &Architecture,
    numerics: &Numerics,
    master: &mut Masters<'_>,
    identity: &Identity,
    tokenizer: &Tokenizer,
    folder: &Path,
    options: &ExportOptions,
) -> Result<(), RunError> {
    let names = match options.dtype {
        ExportDtype::Fp8 => {
            let names = fp8_names(model, numerics);
            check_fp8(&names)?;
            warn_of_bf16(&names);
            names
        }
        ExportDtype::Fp32 | ExportDtype::Bf16 => name_map(model),
    };
    let mut files = identity.files(options.dtype, &names);
    files.extend(tokenizer.files().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    Ok(hf::export(folder, &names, master, &files, options)?)
}

/// Bytes of host memory that an export of `model` holds at its peak: those of one tensor.
pub fn export_bytes(model: &Architecture) -> usize {
    hf::peak_bytes(&name_map(model))
}

/// Logs the files of the Hugging Face folder `folder` that an export does not contain: model cards, licences,
/// weights in other formats.
pub fn warn_of_unexported_files(folder: &Path, tokenizer: &Tokenizer) {
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

/// Names of the parameters of `model` in a Hugging Face folder.
pub fn name_map(model: &Architecture) -> NameMap {
    let whole = |p: &ParameterSpec| {
        let NameWhole { hf_name, groups } = p.whole.clone()?;
        let groups = groups.map(|groups| [groups, p.shape[0] / groups]);
        let shape = groups.map_or(p.shape.clone(), |groups| [&groups, &p.shape[1..]].concat());
        Some(WholeName { entry: p.name.clone(), hf_name, shape })
    };
    let parameters = model.parameters();
    let wholes = parameters.iter().filter_map(whole).collect();
    let in_fp32 = parameters.iter().filter(|p| !p.group.is_trained()).map(|p| p.name.clone()).collect();
    let entry =
        |p: ParameterSpec| NameEntry { name: p.name, shape: p.shape, parts: p.parts.list(), fp8: None };
    let tied = TiedName { hf_name: "lm_head.weight".into(), same_as: "model.embed_tokens.weight".into() };
    NameMap {
        entries: parameters.into_iter().map(entry).collect(),
        in_fp32,
        whole: wholes,
        base: "model.".into(),
        tied: if model.tie_embeddings { vec![tied] } else { Vec::new() },
        ignorable_suffixes: IGNORABLE_SUFFIXES.map(String::from).to_vec(),
    }
}

/// Names of an FP8 export. The linear layers of the blocks are FP8, except those that an FP8 recipe leaves in
/// bf16 in the forward and those that do not consist of whole blocks of 128 x 128.
///
/// Readers differ on partial blocks: transformers 5 infers the block size from the number of scales, and so
/// reads 192 rows as two blocks of 96; vLLM and SGLang refuse most such layers. Parts that form one layer
/// there (q, k, v; gate, up) must have one type.
pub(crate) fn fp8_names(model: &Architecture, numerics: &Numerics) -> NameMap {
    let fprops = fprops(model, numerics);
    let mut names = name_map(model);
    for entry in &mut names.entries {
        entry.fp8 = match fprops.get(&entry.name) {
            _ if partial_part(entry).is_some() => None,
            Some(Ok(gemm)) => Some(scales(gemm.operands[1])),
            Some(Err(Bf16Reason::Recipe)) => Some(Fp8Scales::PowersOfTwo),
            Some(Err(_)) | None => None,
        };
    }
    names
}

/// Scales of FP8 weights: those of training if they were per block; else powers of two, which lose the least:
/// another cast gives the same numbers, bf16 holds them exactly, and some GPUs accept no other scales.
fn scales(trained: Quantization) -> Fp8Scales {
    match trained.scaling == Scaling::Block && !trained.pow2_scales {
        true => Fp8Scales::Exact,
        false => Fp8Scales::PowersOfTwo,
    }
}

/// Refuses an FP8 export that would contain no FP8 layer.
pub(crate) fn check_fp8(names: &NameMap) -> Result<(), RunError> {
    if names.entries.iter().any(|entry| entry.fp8.is_some()) {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "exported as \"fp8\", none of the linear layers of this model would be FP8: {}; use \"bf16\"",
        why_bf16(&without_routers(linear_in_bf16(names)))
    )))
}

/// Warns of the linear layers that an export as FP8 holds in bf16. Those of routers always are.
fn warn_of_bf16(names: &NameMap) {
    let linears = names.entries.iter().filter(|entry| is_linear(entry) && !is_router(entry));
    let (kept, all) = (without_routers(linear_in_bf16(names)), linears.count());
    if !kept.is_empty() {
        tracing::warn!("{} of {all} linear layers are exported as bf16: {}", kept.len(), why_bf16(&kept));
    }
}

/// The linear layers of the blocks that are not in FP8.
fn linear_in_bf16(names: &NameMap) -> Vec<&NameEntry> {
    names.entries.iter().filter(|entry| is_linear(entry) && entry.fp8.is_none()).collect()
}

/// The layers but for routers.
fn without_routers(mut layers: Vec<&NameEntry>) -> Vec<&NameEntry> {
    layers.retain(|entry| !is_router(entry));
    layers
}

/// The reasons why `layers` are exported as bf16, each with the name of a layer.
fn why_bf16(layers: &[&NameEntry]) -> String {
    let partial: Vec<_> = layers.iter().filter_map(|entry| Some((entry, partial_part(entry)?))).collect();
    let mut reasons = Vec::new();
    if let [(entry, part), ..] = partial.as_slice() {
        let (name, rows, columns) = (&part.hf_name, part.rows, entry.shape.get(1).copied().unwrap_or(1));
        let others = match entry.parts.len() {
            1 => "",
            _ => "; parts of one fused layer share one type",
        };
        reasons.push(format!(
            "{} with sizes that are not multiples of {TILE} ({name} is {rows} x {columns}{others})",
            partial.len()
        ));
    }
    if let Some(left) = layers.iter().find(|entry| partial_part(entry).is_none()) {
        let count = layers.len() - partial.len();
        reasons.push(format!("{count} that the run computed in bf16 ({})", left.name));
    }
    reasons.join("; ")
}

/// The first part of a layer that does not consist of whole blocks of 128 x 128.
fn partial_part(entry: &NameEntry) -> Option<&NamePart> {
    let is_whole = |size: usize| size.is_multiple_of(TILE);
    let columns = entry.shape.get(1).copied().unwrap_or(TILE);
    entry.parts.iter().find(|part| !is_whole(part.rows) || !is_whole(columns))
}

/// True for the matrix of a linear layer in a block.
fn is_linear(entry: &NameEntry) -> bool {
    entry.name.starts_with("blocks.") && entry.shape.len() == 2
}

/// True for the matrix of a router.
fn is_router(entry: &NameEntry) -> bool {
    entry.name.ends_with(&format!(".{ROUTER}.weight"))
}

/// Hugging Face's names of the linear layers that `names` does not export in FP8. The head is always among
/// them, even if it is tied.
fn modules_in_bf16(names: &NameMap) -> Vec<String> {
    let parts = linear_in_bf16(names).into_iter().flat_map(|entry| &entry.parts);
    let module = |part: &NamePart| part.hf_name.strip_suffix(".weight").unwrap_or(&part.hf_name).to_owned();
    std::iter::once("lm_head".to_owned()).chain(parts.map(module)).collect()
}
