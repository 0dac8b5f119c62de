//! Hugging Face folders: `model.safetensors`, or shards with an index, imported and exported by a name map.
//!
//! A name map is data: it lists the Hugging Face tensors that, stacked along dimension 0, form each tensor of
//! the model. FP8 is E4M3 with block scales (see `fp8`); other quantised weights are refused.
//! Invariant: imported and exported weights are finite. An infinity or a NaN is an error that names the
//! element.
//! Deliberately absent: `config.json` and the tokenizer, which belong to the model and data crates.
//! [`export`] writes their bytes unchanged.

mod export;
mod folder;
mod fp8;
mod hub;
mod import;
mod nearest_name;
mod no_weights;
mod replace_folder;
mod standard_names;

pub use export::{ExportDtype, ExportOptions, export, peak_bytes};
pub use folder::tensor_count;
pub use hub::{hub_id, looks_like_a_hub_id};
pub use import::{WeightReader, check, import, import_rows, lossless_dtype};
pub use no_weights::{not_a_model, only_an_adapter, warn_of_adapter};
pub use xtrain_tensor::NamePart;

use std::collections::HashSet;

use rayon::prelude::*;

use crate::error::{CheckpointError, Result};
use crate::files::is_plain_name;

/// The weights of a model in one file.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";

/// The weights of an adapter of PEFT's.
pub(crate) const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// The description of an adapter, beside its weights.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// The index of a model in shards.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The folder in a model's folder with its named chat templates, each a file that ends with `.jinja`.
pub const TEMPLATES_FOLDER: &str = "additional_chat_templates";

/// True for the name of a file with a named chat template, `additional_chat_templates/<name>.jinja`.
pub fn is_named_template(name: &str) -> bool {
    let file = name.strip_prefix(TEMPLATES_FOLDER).and_then(|rest| rest.strip_prefix('/'));
    file.is_some_and(|file| is_plain_name(file) && file.ends_with(".jinja"))
}

/// The weights that a folder holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FolderKind {
    /// A model, in one file or several. Its names may have other prefixes.
    #[default]
    Model,
    /// An adapter of PEFT's, in one file, with the names of the map.
    Adapter,
}

impl FolderKind {
    /// The name of the file, if one holds all tensors.
    pub(crate) fn single_file(self) -> &'static str {
        match self {
            FolderKind::Model => SINGLE_FILE,
            FolderKind::Adapter => ADAPTER_FILE,
        }
    }

    /// The thing whose tensors these are, for a message.
    fn noun(self) -> &'static str {
        match self {
            FolderKind::Model => "model",
            FolderKind::Adapter => "adapter",
        }
    }
}

/// The mapping between the model's tensors and those of a Hugging Face folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameMap {
    /// The files of the folder.
    pub kind: FolderKind,
    /// The model's tensors, each once.
    pub entries: Vec<NameEntry>,
    /// Entries that are exported in fp32, whatever the type of the others.
    pub in_fp32: Vec<String>,
    /// Other tensors that a folder may have in place of all parts of an entry. They are never exported.
    pub whole: Vec<WholeName>,
    /// Hugging Face tensors that repeat the values of another one.
    pub tied: Vec<TiedName>,
    /// The prefix of the tensors that belong to the base model ("model."), which folders may lack or have
    /// behind another prefix; empty if names must be as they are here.
    pub base: String,
    /// Suffixes of Hugging Face tensors that hold no trained weights and are ignored ("rotary_emb.inv_freq").
    pub ignorable_suffixes: Vec<String>,
}

/// A tensor of the model: Hugging Face tensors stacked along dimension 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameEntry {
    /// Name in the model.
    pub name: String,
    /// Shape in the model. The rows of the parts add up to its first dimension; a scalar has one part.
    pub shape: Vec<usize>,
    /// The Hugging Face tensors, top to bottom.
    pub parts: Vec<NamePart>,
    /// The scales to export a matrix with as [`ExportDtype::Fp8`]; without them it is exported as bf16.
    /// Import ignores this, because the files say which tensors are FP8.
    pub fp8: Option<Fp8Scales>,
}

/// Scales of an FP8 matrix, one for each block of 128 x 128: 448 / amax of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// Rounded down to powers of two. Scaling is then exact, bf16 holds the dequantized values exactly, and a
    /// second cast reproduces the same FP8.
    PowersOfTwo,
    /// Not rounded.
    Exact,
}

/// A Hugging Face tensor that repeats another one (`lm_head.weight` of a tied head).
///
/// It may be absent, or present and bit-identical to `same_as`. If `same_as` is absent, it is read in its
/// place. It is never exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedName {
    /// The tensor that may be absent.
    pub hf_name: String,
    /// The tensor that it repeats, one of the parts.
    pub same_as: String,
}

/// A Hugging Face tensor that holds an entry as a whole, such as the weights of all experts of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WholeName {
    /// The entry, by its name in the model.
    pub entry: String,
    /// The name in a Hugging Face folder.
    pub hf_name: String,
    /// The shape there, of as many elements in the same order.
    pub shape: Vec<usize>,
}

impl NameMap {
    /// Checks that the map is consistent; an error is a bug of the caller.
    pub(crate) fn check(&self) -> Result<()> {
        let mut names = HashSet::new();
        let mut hf_names = HashSet::new();
        for entry in &self.entries {
            let NameEntry { name, shape, parts, fp8 } = entry;
            let rows: usize = parts.iter().map(|part| part.rows).sum();
            if parts.is_empty() || rows != entry.rows() {
                return Err(internal(format!("'{name}' {shape:?} has parts with {rows} rows in total")));
            }
            if shape.is_empty() && parts.len() != 1 {
                return Err(internal(format!("the scalar '{name}' has {} parts", parts.len())));
            }
            if fp8.is_some() && shape.len() != 2 {
                return Err(internal(format!("'{name}' {shape:?} is not a matrix, so it cannot be FP8")));
            }
            if !names.insert(name) {
                return Err(internal(format!("the name '{name}' appears twice")));
            }
            if let Some(part) = parts.iter().find(|part| !hf_names.insert(&part.hf_name)) {
                return Err(internal(format!("the Hugging Face name '{}' appears twice", part.hf_name)));
            }
        }
        for WholeName { entry: name, hf_name, shape } in &self.whole {
            let entry = self.entries.iter().find(|entry| entry.name == *name);
            let is_whole = entry.is_some_and(|entry| entry.numel() == shape.iter().product::<usize>());
            if !is_whole || !hf_names.insert(hf_name) {
                return Err(internal(format!("'{hf_name}' {shape:?} cannot stand for '{name}'")));
            }
        }
        for TiedName { hf_name, same_as } in &self.tied {
            if hf_names.contains(hf_name) || !hf_names.contains(same_as) {
                return Err(internal(format!("'{hf_name}' cannot be tied to '{same_as}'")));
            }
        }
        Ok(())
    }
}

impl NameEntry {
    /// The shape of a part in the Hugging Face files.
    pub(crate) fn part_shape(&self, part: &NamePart) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = part.rows;
        }
        shape
    }

    /// Number of rows: the size of dimension 0, or 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The position of the first value for which `predicate` holds, searched on all cores.
fn first_position<T: Sync>(values: &[T], predicate: impl Fn(&T) -> bool + Sync) -> Option<usize> {
    const TASK_ELEMENTS: usize = 1 << 16;
    let tasks = values.par_chunks(TASK_ELEMENTS).enumerate();
    tasks.find_map_first(|(i, values)| Some(i * TASK_ELEMENTS + values.iter().position(&predicate)?))
}

fn internal(problem: String) -> CheckpointError {
    CheckpointError::Internal(format!("name map: {problem}"))
}
