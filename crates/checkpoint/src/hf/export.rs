//! Ours into a folder that transformers, vLLM and llama.cpp load: written aside, then put in place whole.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use half::bf16;
use rayon::prelude::*;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use xtrain_tensor::formats::narrow_bf16;

use super::{Fp8Scales, INDEX_FILE, NameEntry, NameMap, NamePart, SINGLE_FILE, fp8, position_first, swap};
use crate::aside::{self, Aside};
use crate::error::{BoxError, CheckpointError, Result};
use crate::files::{create_folders, is_plain_name, write_new};
use crate::tensor_file::{StoredDtype, StoredTensor, TensorFileWriter};

/// The element type of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExportDtype {
    /// Four bytes a weight, as they are.
    Fp32,
    /// Two bytes a weight, rounded to nearest even.
    Bf16,
    /// The matrices of linear layers in one byte a weight, E4M3 with a scale for each block of 128 x 128, as DeepSeek-V3 and
    /// Qwen3-FP8 are published; the rest as bf16.
    Fp8,
}

impl ExportDtype {
    /// All of them.
    pub const ALL: [ExportDtype; 3] = [ExportDtype::Fp32, ExportDtype::Bf16, ExportDtype::Fp8];

    /// Its name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            ExportDtype::Fp32 => "fp32",
            ExportDtype::Bf16 => "bf16",
            ExportDtype::Fp8 => "fp8",
        }
    }
}

/// How a folder is exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// The element type of the tensors.
    pub dtype: ExportDtype,
    /// A shard takes tensors up to this size; a larger tensor gets a shard of its own.
    pub max_shard_bytes: u64,
    /// Whether a model that is there already may be replaced.
    pub overwrite: bool,
}

impl Default for ExportOptions {
    fn default() -> Self {
        Self { dtype: ExportDtype::Bf16, max_shard_bytes: 5_000_000_000, overwrite: false }
    }
}

/// Writes a Hugging Face folder: calls `source` once for every entry of `names`, in order, for its values
/// (row-major), and adds `files` (name and content: `config.json`, the tokenizer) beside the weights.
///
/// The folder is complete or absent. One that is replaced is whole until the new one is in place, which is one step
/// where the file system has it; elsewhere it is for a moment whole under `<name>.old-<pid>`.
///
/// # Errors
/// A target that exists (without `overwrite`) or is more than a model; a value that is not finite, or not after it has
/// been rounded ([`CheckpointError::Unsupported`] names tensor and element); a disk that refuses; what `source`
/// returns; [`CheckpointError::Internal`] for values of another number, or files whose names are not plain.
pub fn export(
    folder: &Path,
    names: &NameMap,
    source: &mut dyn FnMut(&str) -> std::result::Result<Vec<f32>, BoxError>,
    files: &[(String, Vec<u8>)],
    options: &ExportOptions,
) -> Result<()> {
    names.check()?;
    let taken = |name: &str| name.starts_with("model") && name.contains(".safetensors");
    if let Some((name, _)) = files.iter().find(|(name, _)| !is_plain_name(name) || taken(name)) {
        return Err(CheckpointError::Internal(format!("'{name}' is no name for a file beside the weights")));
    }
    let target = resolve(folder)?;
    swap::recover(&target)?;
    swap::check_target(&target, options.overwrite)?;
    let aside = Aside::folder(&target)?;
    write_weights(aside.path(), &target, names, source, options)?;
    for (name, bytes) in files {
        write_new(&aside.path().join(name), bytes)?;
    }
    swap::publish(aside, &target)
}

/// One tensor of theirs on its way out.
struct Outgoing {
    stored: StoredTensor,
    entry: usize,
    numel: usize,
    form: Form,
}

/// What is written of a part.
#[derive(Clone, Copy)]
enum Form {
    /// Its values, in the type of the tensor.
    Plain,
    /// Its values in FP8.
    Fp8(Fp8Scales),
    /// The scales of the part before.
    Scales,
}

impl Outgoing {
    /// The tensors that a part becomes: one, or a matrix in FP8 and its scales.
    fn of_part(entry: &NameEntry, index: usize, part: &NamePart, dtype: ExportDtype) -> Vec<Outgoing> {
        let shape = entry.part_shape(part);
        let tensor = |name: &str, dtype: StoredDtype, shape: &[usize], form: Form| Outgoing {
            stored: StoredTensor { name: name.to_owned(), dtype, shape: shape.to_vec() },
            entry: index,
            numel: shape.iter().product(),
            form,
        };
        let name = &part.hf_name;
        match (dtype, entry.fp8, &shape[..]) {
            (ExportDtype::Fp8, Some(scales), &[rows, cols]) => vec![
                tensor(name, StoredDtype::F8_E4M3, &shape, Form::Fp8(scales)),
                tensor(&fp8::scale_name(name), StoredDtype::F32, &fp8::blocks(rows, cols), Form::Scales),
            ],
            (ExportDtype::Fp32, ..) => vec![tensor(name, StoredDtype::F32, &shape, Form::Plain)],
            (ExportDtype::Bf16 | ExportDtype::Fp8, ..) => {
                vec![tensor(name, StoredDtype::BF16, &shape, Form::Plain)]
            }
        }
    }

    fn bytes(&self) -> u64 {
        (self.numel * self.stored.dtype.bitsize() / 8) as u64
    }
}

/// Writes the weights into `folder`; errors about values name `target`, where it is going to be.
fn write_weights(
    folder: &Path,
    target: &Path,
    names: &NameMap,
    source: &mut dyn FnMut(&str) -> std::result::Result<Vec<f32>, BoxError>,
    options: &ExportOptions,
) -> Result<()> {
    let mut outgoing = Vec::new();
    for (index, entry) in names.entries.iter().enumerate() {
        let parts = entry.parts.iter();
        outgoing.extend(parts.flat_map(|part| Outgoing::of_part(entry, index, part, options.dtype)));
    }
    let shards = cut(&outgoing, options.max_shard_bytes);
    let shard_name = |shard: usize| match shards.len() {
        0 | 1 => SINGLE_FILE.to_string(),
        n => format!("model-{:05}-of-{n:05}.safetensors", shard + 1),
    };
    // The values of one entry, of which parts may fall into two shards.
    let mut current: Option<usize> = None;
    let mut values = Vec::new();
    let mut at = 0;
    // Those of the matrix that was written last, which may be in another shard.
    let mut scales = Vec::new();
    for (index, shard) in shards.iter().enumerate() {
        let stored: Vec<StoredTensor> = shard.iter().map(|out| out.stored.clone()).collect();
        let path = folder.join(shard_name(index));
        let mut writer = TensorFileWriter::create_in_place(&path, &stored, &[("format", "pt")])?;
        for out in *shard {
            if let Form::Scales = out.form {
                writer.write(bytemuck::cast_slice(&scales))?;
                continue;
            }
            if current != Some(out.entry) {
                let entry = &names.entries[out.entry];
                values = source(&entry.ours).map_err(CheckpointError::Caller)?;
                if values.len() != entry.numel() {
                    let (ours, shape, found) = (&entry.ours, &entry.shape, values.len());
                    let what = format!("'{ours}' is {shape:?}, and {found} values were handed over");
                    return Err(CheckpointError::Internal(what));
                }
                (current, at) = (Some(out.entry), 0);
            }
            let part = &values[at..at + out.numel];
            at += out.numel;
            let refused = |at: usize, is: String, fix: &str| {
                let what = format!("element {at} of {:?} {is}", out.stored.shape);
                CheckpointError::unsupported(target, &out.stored.name, what, fix)
            };
            if let Some(at) = position_first(part, |x| !x.is_finite()) {
                let fix = "a model with such weights computes nothing: export an earlier checkpoint";
                return Err(refused(at, format!("is {}", part[at]), fix));
            }
            match (out.form, &out.stored.shape[..]) {
                (Form::Fp8(kind), &[_, cols]) => {
                    let numbers;
                    (numbers, scales) = fp8::quantize(part, cols, kind);
                    writer.write(&numbers)?;
                }
                _ if out.stored.dtype == StoredDtype::F32 => writer.write(bytemuck::cast_slice(part))?,
                _ => {
                    let rounded = rounded(part);
                    if let Some(at) = position_first(&rounded, |x| !x.is_finite()) {
                        let is = format!("is {:e}, which is infinite in bf16", part[at]);
                        return Err(refused(at, is, "export as fp32"));
                    }
                    writer.write(bytemuck::cast_slice(&rounded))?;
                }
            }
        }
        writer.finish()?;
    }
    if shards.len() > 1 {
        let total: u64 = outgoing.iter().map(Outgoing::bytes).sum();
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

/// Cuts the tensors into runs of at most `max_bytes`, or of one tensor; there is always one run.
fn cut(outgoing: &[Outgoing], max_bytes: u64) -> Vec<&[Outgoing]> {
    let mut shards = Vec::new();
    let (mut start, mut bytes) = (0, 0u64);
    for (i, out) in outgoing.iter().enumerate() {
        let more = out.bytes();
        if i > start && bytes.saturating_add(more) > max_bytes {
            shards.push(&outgoing[start..i]);
            (start, bytes) = (i, 0);
        }
        bytes += more;
    }
    shards.push(&outgoing[start..]);
    shards
}

fn rounded(values: &[f32]) -> Vec<bf16> {
    const TASK_ELEMENTS: usize = 1 << 16;
    let mut out = vec![bf16::ZERO; values.len()];
    let tasks = out.par_chunks_mut(TASK_ELEMENTS).zip(values.par_chunks(TASK_ELEMENTS));
    tasks.for_each(|(dst, src)| narrow_bf16(src, dst));
    out
}

/// The folder to export to with links followed, so that the rename replaces what is meant; its parent exists.
fn resolve(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        return fs::canonicalize(folder).map_err(CheckpointError::io(folder, "find"));
    }
    let Some(name) = folder.file_name() else {
        return Err(CheckpointError::folder(folder, "has no name", "name a folder to export to"));
    };
    let parent = aside::parent(folder);
    create_folders(parent)?;
    let parent = fs::canonicalize(parent).map_err(CheckpointError::io(parent, "find"))?;
    Ok(parent.join(name))
}
