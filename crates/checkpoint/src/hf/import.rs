//! Their tensors into ours: everything is checked before the first value is handed over.

use std::collections::HashSet;
use std::path::Path;

use super::folder::HfFolder;
use super::nearest::nearest;
use super::{ExportDtype, NameMap, TiedName, fp8, position_first};
use crate::error::{BoxError, CheckpointError, Result, listed};
use crate::tensor_file::{StoredDtype, TensorFile, TensorInfo};

/// Reads a Hugging Face folder: calls `sink` once for every entry of `names`, in order, with our name and its
/// values as `f32`, row-major. At most one tensor of ours is in memory at a time.
///
/// # Errors
/// Before the first call: a folder without safetensors, damaged files, tensors that are missing, of other shapes, unknown, quantised but not as
/// [`ExportDtype::Fp8`] is, or not equal though tied. During the calls: a value that is not finite, or too large for `f32`
/// ([`CheckpointError::Unsupported`] names tensor and element), a file that shrinks, and what `sink` returns.
pub fn import(
    folder: &Path,
    names: &NameMap,
    sink: &mut dyn FnMut(&str, &[f32]) -> std::result::Result<(), BoxError>,
) -> Result<()> {
    names.check()?;
    let source = HfFolder::open(folder)?;
    let aliases = Aliases { source: &source, tied: &names.tied };
    check_tensors(&source, names, &aliases)?;
    for tied in &names.tied {
        check_tied(&source, tied)?;
    }
    let mut values = Vec::new();
    for entry in &names.entries {
        values.resize(entry.numel(), 0.0);
        let mut rest = values.as_mut_slice();
        for part in &entry.parts {
            let Some((file, tensor)) = aliases.get(&part.hf_name) else {
                return Err(CheckpointError::Internal(format!("'{}' was checked and is gone", part.hf_name)));
            };
            let (now, later) = rest.split_at_mut(tensor.shape.iter().product());
            match fp8::is(tensor) {
                true => fp8::read(&source, file, tensor, now)?,
                false => file.read_f32(tensor, now)?,
            }
            if let Some(at) = position_first(now, |x| !x.is_finite()) {
                let what = format!("element {at} of {:?} is {}", tensor.shape, now[at]);
                let fix = "a model with such weights computes nothing: get the file again from its source";
                return Err(CheckpointError::unsupported(file.path(), &tensor.name, what, fix));
            }
            rest = later;
        }
        sink(&entry.ours, &values).map_err(CheckpointError::Caller)?;
    }
    Ok(())
}

/// The smallest element type that holds every weight in `folder` as it is, exported by `names`: FP8 where the matrices that `names` has
/// in FP8 are so with scales that are powers of two, and the rest is bf16; bf16 where all is bf16 or such FP8; else fp32.
///
/// # Errors
/// A folder without safetensors; damaged files.
pub fn lossless_dtype(folder: &Path, names: &NameMap) -> Result<ExportDtype> {
    let source = HfFolder::open(folder)?;
    let parts = names.entries.iter().filter(|entry| entry.fp8.is_some()).flat_map(|entry| &entry.parts);
    let fp8_there: HashSet<&str> = parts.map(|part| part.hf_name.as_str()).collect();
    let mut is_same_in_fp8 = true;
    let mut quantized = Vec::new();
    let is_ignorable =
        |name: &str| names.ignorable_suffixes.iter().any(|suffix| name.ends_with(suffix.as_str()));
    for (name, (_, tensor)) in source.names().filter_map(|name| Some((name, source.get(name)?))) {
        let is_scales =
            || fp8::scaled_name(name).and_then(|of| source.get(of)).is_some_and(|(_, of)| fp8::is(of));
        if is_ignorable(name) || is_scales() {
            continue;
        }
        match tensor.dtype {
            StoredDtype::BF16 => {}
            StoredDtype::F8_E4M3 => quantized.push(tensor),
            _ => return Ok(ExportDtype::Fp32),
        }
        is_same_in_fp8 &= fp8::is(tensor) == fp8_there.contains(name);
    }
    for tensor in &quantized {
        if !fp8::scales(&source, tensor)?.into_iter().all(fp8::is_exact) {
            return Ok(ExportDtype::Fp32);
        }
    }
    Ok(match is_same_in_fp8 && !quantized.is_empty() {
        true => ExportDtype::Fp8,
        false => ExportDtype::Bf16,
    })
}

/// Finds a tensor under its name, or under one that is tied to it.
struct Aliases<'a> {
    source: &'a HfFolder,
    tied: &'a [TiedName],
}

impl Aliases<'_> {
    fn get(&self, name: &str) -> Option<(&TensorFile, &TensorInfo)> {
        self.source.get(name).or_else(|| {
            let mut tied = self.tied.iter().filter(|tied| tied.same_as == name);
            tied.find_map(|tied| self.source.get(&tied.theirs))
        })
    }
}

/// Names, shapes and element types, of what we want and of what is left over.
fn check_tensors(source: &HfFolder, names: &NameMap, aliases: &Aliases<'_>) -> Result<()> {
    let known: HashSet<&str> = names
        .entries
        .iter()
        .flat_map(|entry| entry.parts.iter().map(|part| part.hf_name.as_str()))
        .chain(names.tied.iter().map(|tied| tied.theirs.as_str()))
        .collect();
    // Scales belong to a tensor that is there.
    let are_scales =
        |name: &str| fp8::scaled_name(name).is_some_and(|of| known.contains(of) && source.get(of).is_some());
    let is_known = |name: &str| known.contains(name) || are_scales(name);
    let left: Vec<&str> = source
        .names()
        .filter(|name| !is_known(name))
        .filter(|name| !names.ignorable_suffixes.iter().any(|suffix| name.ends_with(suffix.as_str())))
        .collect();
    let mut missing = Vec::new();
    let mut misshapen = Vec::new();
    for (entry, part) in names.entries.iter().flat_map(|entry| entry.parts.iter().map(move |p| (entry, p))) {
        let Some((file, tensor)) = aliases.get(&part.hf_name) else {
            missing.push(part.hf_name.as_str());
            continue;
        };
        let expected = entry.part_shape(part);
        if tensor.shape == expected {
            fp8::check(source, file, tensor)?;
            continue;
        }
        if !fp8::is(tensor) {
            file.check_readable(tensor)?;
        }
        let (name, found) = (&tensor.name, &tensor.shape);
        misshapen.push(format!("'{name}' is {found:?} and should be {expected:?}"));
    }
    let folder = source.path();
    if !missing.is_empty() {
        let named: Vec<String> = missing
            .iter()
            .enumerate()
            // The comparison is slow, and only the first few are shown.
            .map(|(i, name)| match (i < 5).then(|| nearest(name, left.iter().copied())).flatten() {
                Some(near) => format!("'{name}' (nearest: '{near}')"),
                None => format!("'{name}'"),
            })
            .collect();
        let all: usize = names.entries.iter().map(|entry| entry.parts.len()).sum();
        let n = missing.len();
        let what = format!("{n} of the model's {all} tensors are missing: {}", listed(&named));
        let fix = "check that config.json is this folder's own, and that the download is complete";
        return Err(CheckpointError::tensors(folder, what, fix));
    }
    if !misshapen.is_empty() {
        let what = format!("{} tensors have other shapes: {}", misshapen.len(), listed(&misshapen));
        let fix = "check that config.json is this folder's own";
        return Err(CheckpointError::tensors(folder, what, fix));
    }
    if !left.is_empty() {
        let quoted: Vec<String> = left.iter().map(|name| format!("'{name}'")).collect();
        let what = format!("{} tensors have no place in the model: {}", left.len(), listed(&quoted));
        let fix = "the folder holds another architecture than its config.json says, or one not supported";
        return Err(CheckpointError::tensors(folder, what, fix));
    }
    Ok(())
}

/// A tied name that is present must say what the other one says, to the bit.
fn check_tied(source: &HfFolder, tied: &TiedName) -> Result<()> {
    let (Some((file, tensor)), Some((other_file, other))) =
        (source.get(&tied.theirs), source.get(&tied.same_as))
    else {
        return Ok(());
    };
    file.check_readable(tensor)?;
    let same = tensor.shape == other.shape && {
        /// Compared piece by piece: these are the largest tensors of a model.
        const PIECE: usize = 1 << 20;
        let numel: usize = tensor.shape.iter().product();
        let (mut values, mut others) = (vec![0.0f32; numel.min(PIECE)], vec![0.0f32; numel.min(PIECE)]);
        let mut same = true;
        for start in (0..numel).step_by(PIECE) {
            let len = PIECE.min(numel - start);
            file.read_f32_part(tensor, start, &mut values[..len])?;
            other_file.read_f32_part(other, start, &mut others[..len])?;
            let mut pairs = values[..len].iter().zip(&others[..len]);
            same &= pairs.all(|(a, b)| a.to_bits() == b.to_bits());
        }
        same
    };
    if same {
        return Ok(());
    }
    let what = format!("'{}' differs from '{}', and the config ties them", tied.theirs, tied.same_as);
    let fix = "set tie_word_embeddings to false in config.json, or remove the wrong one of the two";
    Err(CheckpointError::tensors(source.path(), what, fix))
}
