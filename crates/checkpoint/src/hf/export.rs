//! Export to a folder that transformers, vLLM and llama.cpp load. The folder appears atomically.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use xtrain_tensor::TILE;
use xtrain_tensor::formats::narrow_bf16;

use super::{
    FolderKind, Fp8Scales, INDEX_FILE, NameEntry, NameMap, NamePart, TEMPLATES_FOLDER, first_position, fp8,
    is_named_template, replace_folder,
};
use crate::error::{BoxError, CheckpointError, Result};
use crate::files::{create_folders, is_plain_name, sync_folder, write_new};
use crate::temporary::{self, Temporary};
use crate::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter, split_into_shards};

/// The element type of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportDtype {
    /// Four bytes per weight, not rounded.
    Fp32,
    /// Two bytes per weight, rounded to nearest even.
    Bf16,
    /// One byte per weight of linear layers, E4M3 with a scale for each block of 128 x 128, as DeepSeek-V3
    /// and Qwen3-FP8 are published; all other weights as bf16.
    Fp8,
}

impl ExportDtype {
    /// All element types.
    pub const ALL: [ExportDtype; 3] = [ExportDtype::Fp32, ExportDtype::Bf16, ExportDtype::Fp8];

    /// Name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            ExportDtype::Fp32 => "fp32",
            ExportDtype::Bf16 => "bf16",
            ExportDtype::Fp8 => "fp8",
        }
    }
}

/// Elements that are cast at a time, so that an export needs little memory besides the values.
const CHUNK_ELEMENTS: usize = 1 << 20;

/// Options of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// The element type of the tensors.
    pub dtype: ExportDtype,
    /// Maximum size of a shard; a larger tensor gets its own shard. An adapter has one file.
    pub max_shard_bytes: u64,
    /// Permission to replace an existing model.
    pub overwrite: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { dtype: ExportDtype::Bf16, max_shard_bytes: 5_000_000_000, overwrite: false }
    }
}

/// Writes a Hugging Face folder: the weights, and `files` (name and content: `config.json`, the tokenizer).
/// Calls `source` for the values (row-major) of each entry of `names`, once and in order. Holds the values of
/// one entry at a time ([`peak_bytes`]), so `source` may read or gather them one by one.
///
/// The folder is complete or absent. An old folder is replaced atomically, if the file system can exchange
/// names; otherwise it is complete under `<name>.old-<pid>` for a moment.
///
/// # Errors
/// A target that exists (without `overwrite`) or holds more than a model; a value that is not finite before
/// or after rounding ([`CheckpointError::Unsupported`], with the tensor and element); a failing disk; errors
/// of `source`; [`CheckpointError::Internal`] for a wrong number of values or an invalid file name.
pub fn export(
    folder: &Path,
    names: &NameMap,
    source: &mut dyn FnMut(&str) -> std::result::Result<Vec<f32>, BoxError>,
    files: &[(String, Vec<u8>)],
    options: &ExportOptions,
) -> Result<()> {
    names.check()?;
    let taken = |name: &str| name.starts_with("model") && name.contains(".safetensors");
    let is_valid = |name: &str| is_plain_name(name) && !taken(name) || is_named_template(name);
    if let Some((name, _)) = files.iter().find(|(name, _)| !is_valid(name)) {
        return Err(CheckpointError::Internal(format!(
            "'{name}' is not a valid name for a file beside the weights"
        )));
    }
    let target = resolve(folder)?;
    replace_folder::recover(&target)?;
    replace_folder::check_target(&target, options.overwrite)?;
    let temporary = Temporary::folder(&target)?;
    write_weights(temporary.path(), &target, names, source, options)?;
    let templates = temporary.path().join(TEMPLATES_FOLDER);
    if files.iter().any(|(name, _)| is_named_template(name)) {
        create_folders(&templates)?;
    }
    for (name, bytes) in files {
        write_new(&temporary.path().join(name), bytes)?;
    }
    if templates.is_dir() {
        sync_folder(&templates)?;
    }
    replace_folder::publish(temporary, &target)
}

/// Bytes of host memory that an export holds at its peak: the values of the largest entry, besides a few MiB.
pub fn peak_bytes(names: &NameMap) -> usize {
    names.entries.iter().map(|entry| entry.numel() * size_of::<f32>()).max().unwrap_or(0)
}

/// A tensor of the exported files.
struct ExportedTensor {
    stored: StoredTensor,
    /// Index in the name map.
    entry: usize,
    numel: usize,
    encoding: Encoding,
}

/// Encoding of an exported tensor.
#[derive(Clone, Copy)]
enum Encoding {
    /// The values, in the element type of the tensor.
    Plain,
    /// The values in FP8.
    Fp8(Fp8Scales),
    /// The scales of the preceding FP8 tensor.
    Scales,
}

impl ExportedTensor {
    /// The tensors for a part: one, or an FP8 matrix and its scales.
    fn from_part(
        entry: &NameEntry,
        index: usize,
        part: &NamePart,
        dtype: ExportDtype,
    ) -> Vec<ExportedTensor> {
        let shape = entry.part_shape(part);
        let tensor = |name: &str, dtype: StoredDtype, shape: &[usize], encoding: Encoding| ExportedTensor {
            stored: StoredTensor { name: name.to_owned(), dtype, shape: shape.to_vec() },
            entry: index,
            numel: shape.iter().product(),
            encoding,
        };
        let name = &part.hf_name;
        match (dtype, entry.fp8, &shape[..]) {
            (ExportDtype::Fp8, Some(scales), &[rows, cols]) => vec![
                tensor(name, StoredDtype::F8_E4M3, &shape, Encoding::Fp8(scales)),
                tensor(
                    &fp8::scale_name(name),
                    StoredDtype::F32,
                    &fp8::block_grid(rows, cols),
                    Encoding::Scales,
                ),
            ],
            (ExportDtype::Fp32, ..) => vec![tensor(name, StoredDtype::F32, &shape, Encoding::Plain)],
            (ExportDtype::Bf16 | ExportDtype::Fp8, ..) => {
                vec![tensor(name, StoredDtype::BF16, &shape, Encoding::Plain)]
            }
        }
    }

    fn bytes(&self) -> u64 {
        (self.numel * self.stored.dtype.bitsize() / 8) as u64
    }
}

/// Writes the weights into `folder`. Errors about values name `target`, its final name.
fn write_weights(
    folder: &Path,
    target: &Path,
    names: &NameMap,
    source: &mut dyn FnMut(&str) -> std::result::Result<Vec<f32>, BoxError>,
    options: &ExportOptions,
) -> Result<()> {
    let mut exported = Vec::new();
    for (index, entry) in names.entries.iter().enumerate() {
        let parts = entry.parts.iter();
        let dtype = if names.in_fp32.contains(&entry.name) { ExportDtype::Fp32 } else { options.dtype };
        exported.extend(parts.flat_map(|part| ExportedTensor::from_part(entry, index, part, dtype)));
    }
    let most = match names.kind {
        FolderKind::Model => options.max_shard_bytes,
        FolderKind::Adapter => u64::MAX,
    };
    let mut shards = split_into_shards(exported.iter().map(ExportedTensor::bytes), most);
    if shards.is_empty() {
        shards.push(0..0);
    }
    let shards: Vec<&[ExportedTensor]> = shards.into_iter().map(|shard| &exported[shard]).collect();
    let shard_name = |shard: usize| match shards.len() {
        0 | 1 => names.kind.single_file().to_string(),
        n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
    };
    let mut values = ExportedValues {
        target,
        names,
        source,
        entry: None,
        of_entry: Vec::new(),
        offset: 0,
        scales: Vec::new(),
    };
    for (index, shard) in shards.iter().enumerate() {
        let stored: Vec<StoredTensor> = shard.iter().map(|out| out.stored.clone()).collect();
        let path = folder.join(shard_name(index));
        let mut writer = TensorFileWriter::create_in_place(&path, &stored, &[("format", "pt")])?;
        for out in *shard {
            values.write(out, &mut writer)?;
        }
        writer.finish()?;
    }
    if shards.len() > 1 {
        let total: u64 = exported.iter().map(ExportedTensor::bytes).sum();
        let weight_map: BTreeMap<&str, String> = shards
            .iter()
            .enumerate()
            .flat_map(|(i, shard)| shard.iter().map(move |out| (i, out)))
            .map(|(i, out)| (out.stored.name.as_str(), shard_name(i)))
            .collect();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
        write_new(&folder.join(INDEX_FILE), format!("{index:#}\n").as_bytes())?;
    }
    Ok(())
}

/// The values of one entry at a time, whose tensors may be in different shards.
struct ExportedValues<'a> {
    /// The exported folder, for errors.
    target: &'a Path,
    names: &'a NameMap,
    source: &'a mut dyn FnMut(&str) -> std::result::Result<Vec<f32>, BoxError>,
    /// The entry whose values these are.
    entry: Option<usize>,
    of_entry: Vec<f32>,
    /// The first value that is not written yet.
    offset: usize,
    /// The scales of the last FP8 matrix.
    scales: Vec<f32>,
}

impl ExportedValues<'_> {
    /// Writes a tensor in its encoding. Tensors come in the order of the entries and their parts.
    fn write(&mut self, out: &ExportedTensor, writer: &mut TensorFileWriter) -> Result<()> {
        if let Encoding::Scales = out.encoding {
            return writer.write(bytemuck::cast_slice(&self.scales));
        }
        self.read(out.entry)?;
        let part = &self.of_entry[self.offset..self.offset + out.numel];
        self.offset += out.numel;
        let refused = |at: usize, problem: String, advice: &str| {
            let problem = format!("element {at} of {:?} {problem}", out.stored.shape);
            CheckpointError::unsupported(self.target, &out.stored.name, problem, advice)
        };
        if let Some(at) = first_position(part, |x| !x.is_finite()) {
            let advice = "a model with such weights is useless: export an earlier checkpoint";
            return Err(refused(at, format!("is {}", part[at]), advice));
        }
        match (out.encoding, &out.stored.shape[..]) {
            (Encoding::Fp8(kind), &[_, cols]) => {
                self.scales.clear();
                // Whole rows of blocks.
                let band = (CHUNK_ELEMENTS / (TILE * cols).max(1)).max(1) * TILE * cols;
                writer.write_in_parts(|append| {
                    part.chunks(band.max(1)).try_for_each(|chunk| {
                        let (numbers, inverse) = fp8::quantize(chunk, cols, kind);
                        self.scales.extend(inverse);
                        append(&numbers)
                    })
                })
            }
            _ if out.stored.dtype == StoredDtype::F32 => writer.write(bytemuck::cast_slice(part)),
            _ => writer.write_in_parts(|append| {
                part.chunks(CHUNK_ELEMENTS).enumerate().try_for_each(|(index, chunk)| {
                    let rounded = to_bf16(chunk);
                    if let Some(at) = first_position(&rounded, |x| !x.is_finite()) {
                        let problem = format!("is {:e}, which is infinite in bf16", chunk[at]);
                        return Err(refused(index * CHUNK_ELEMENTS + at, problem, "export as fp32"));
                    }
                    append(bytemuck::cast_slice(&rounded))
                })
            }),
        }
    }

    /// Reads the values of an entry, unless they are those of the last call.
    fn read(&mut self, entry: usize) -> Result<()> {
        if self.entry == Some(entry) {
            return Ok(());
        }
        let NameEntry { name, shape, .. } = &self.names.entries[entry];
        // Freed before the next ones are read.
        drop(std::mem::take(&mut self.of_entry));
        self.of_entry = (self.source)(name).map_err(CheckpointError::Caller)?;
        let found = self.of_entry.len();
        if found != self.names.entries[entry].numel() {
            let problem = format!("'{name}' is {shape:?}, but the source returned {found} values");
            return Err(CheckpointError::Internal(problem));
        }
        (self.entry, self.offset) = (Some(entry), 0);
        Ok(())
    }
}

fn to_bf16(values: &[f32]) -> Vec<bf16> {
    const TASK_ELEMENTS: usize = 1 << 16;
    let mut out = vec![bf16::ZERO; values.len()];
    let tasks = out.par_chunks_mut(TASK_ELEMENTS).zip(values.par_chunks(TASK_ELEMENTS));
    tasks.for_each(|(dst, src)| narrow_bf16(src, dst));
    out
}

/// Resolves links in the path of the target, so that the rename replaces the real folder. Creates the parent
/// folder.
fn resolve(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        return fs::canonicalize(folder).map_err(CheckpointError::io(folder, "find"));
    }
    let Some(name) = folder.file_name() else {
        return Err(CheckpointError::folder(folder, "has no name", "name a folder to export to"));
    };
    let parent = temporary::parent(folder);
    create_folders(parent)?;
    let parent = fs::canonicalize(parent).map_err(CheckpointError::io(parent, "find"))?;
    Ok(parent.join(name))
}
