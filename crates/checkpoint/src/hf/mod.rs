//! Hugging Face folders: `model.safetensors`, or shards with an index, read and written by a name map.
//!
//! A name map is data: which of their tensors, stacked along dimension 0, make one of ours.
//! FP8 is E4M3 with scales of blocks, as `fp8` has it; other quantised weights are refused.
//! Invariant: weights are finite, on the way in and out. An infinity or a NaN is an error that names it.
//! Deliberately absent: `config.json` and the tokenizer. They belong to the model and data crates, and pass through
//! [`export`] as finished bytes.

mod export;
mod folder;
mod fp8;
mod import;
mod nearest;
mod swap;

pub use export::{ExportDtype, ExportOptions, export};
pub use import::{import, lossless_dtype};
pub use xtrain_tensor::NamePart;

use std::collections::HashSet;

use rayon::prelude::*;

use crate::error::{CheckpointError, Result};

/// The single file of a small model.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";

/// The index of a sharded model.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// How our tensors are called in a Hugging Face folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameMap {
    /// Every tensor of ours, once.
    pub entries: Vec<NameEntry>,
    /// Names of theirs that share the values of another one.
    pub tied: Vec<TiedName>,
    /// Names of theirs that end so hold nothing that is learnt, and may be left over ("rotary_emb.inv_freq").
    pub ignorable_suffixes: Vec<String>,
}

/// One tensor of ours: their parts stacked along dimension 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NameEntry {
    /// Our name.
    pub ours: String,
    /// Our shape. The rows of the parts add up to its first dimension; a scalar has one part.
    pub shape: Vec<usize>,
    /// Their tensors, top to bottom.
    pub parts: Vec<NamePart>,
    /// How they go out as [`ExportDtype::Fp8`], where they are matrices; without it as bf16. Of no account on the way in, where their
    /// files say what is FP8.
    pub fp8: Option<Fp8Scales>,
}

/// The scales of a matrix in FP8, one for each block of 128 x 128: 448 over the block's largest magnitude.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fp8Scales {
    /// Rounded down to powers of two: scaling then rounds nothing, the numbers are exact in bf16 too, and casting them again
    /// gives them again.
    PowersOfTwo,
    /// As they are.
    Exact,
}

/// A name of theirs whose values are another's (`lm_head.weight`, of a tied head).
///
/// It may be absent, or present and equal to `same_as` to the bit. Where only it is present, it is read in place of
/// `same_as`. It is never exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TiedName {
    /// The name that may be absent.
    pub theirs: String,
    /// Their name (one of the parts) for the tensor that it repeats.
    pub same_as: String,
}

impl NameMap {
    /// Checks that the map makes sense in itself; anything else is our own bug.
    pub(crate) fn check(&self) -> Result<()> {
        let mut names = HashSet::new();
        let mut theirs = HashSet::new();
        for entry in &self.entries {
            let NameEntry { ours, shape, parts, fp8 } = entry;
            let rows: usize = parts.iter().map(|part| part.rows).sum();
            if parts.is_empty() || rows != shape.first().copied().unwrap_or(1) {
                return Err(internal(format!("'{ours}' {shape:?} has parts of {rows} rows in all")));
            }
            if shape.is_empty() && parts.len() != 1 {
                return Err(internal(format!("the scalar '{ours}' has {} parts", parts.len())));
            }
            if fp8.is_some() && shape.len() != 2 {
                return Err(internal(format!("'{ours}' {shape:?} is no matrix and has no blocks for FP8")));
            }
            if !names.insert(ours) {
                return Err(internal(format!("our name '{ours}' stands twice")));
            }
            if let Some(part) = parts.iter().find(|part| !theirs.insert(&part.hf_name)) {
                return Err(internal(format!("their name '{}' stands twice", part.hf_name)));
            }
        }
        for TiedName { theirs: name, same_as } in &self.tied {
            if theirs.contains(name) || !theirs.contains(same_as) {
                return Err(internal(format!("'{name}' cannot be tied to '{same_as}'")));
            }
        }
        Ok(())
    }
}

impl NameEntry {
    /// The shape that one of the parts has in their files.
    pub(crate) fn part_shape(&self, part: &NamePart) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = part.rows;
        }
        shape
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The position of the first value of which `is` holds, searched on all cores.
fn position_first<T: Sync>(values: &[T], is: impl Fn(&T) -> bool + Sync) -> Option<usize> {
    const TASK_ELEMENTS: usize = 1 << 16;
    let tasks = values.par_chunks(TASK_ELEMENTS).enumerate();
    tasks.find_map_first(|(i, values)| Some(i * TASK_ELEMENTS + values.iter().position(&is)?))
}

fn internal(what: String) -> CheckpointError {
    CheckpointError::Internal(format!("name map: {what}"))
}
