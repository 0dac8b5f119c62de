//! Import of a Hugging Face folder. All names, shapes and types are checked before the first value is read.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use super::folder::{HfFolder, Stored};
use super::nearest_name::nearest_name;
use super::standard_names::scaled_name;
use super::{ExportDtype, FolderKind, NameEntry, NameMap, NamePart, TiedName, first_position, fp8};
use crate::error::{BoxError, CheckpointError, LISTED, Result};
use crate::first_few::first_few;
use crate::tensor_file::StoredDtype;

/// Reads a Hugging Face folder: calls `sink` with the name and values (`f32`, row-major) of each entry of
/// `names`, once and in order. At most one entry is in memory at a time.
///
/// # Errors
/// Before the first call: a folder without safetensors; damaged files; tensors that are missing, unknown, of
/// other shapes, quantised in another format than [`super::ExportDtype::Fp8`], or tied but not equal. During
/// the calls: a value that is not finite or too large for `f32` ([`CheckpointError::Unsupported`], with the
/// tensor and element), a file that shrinks, and errors of `sink`.
pub fn import(
    folder: &Path,
    names: &NameMap,
    sink: &mut dyn FnMut(&str, &[f32]) -> std::result::Result<(), BoxError>,
) -> Result<()> {
    let rows: Vec<_> = names.entries.iter().map(|entry| 0..entry.rows()).collect();
    import_rows(folder, names, &rows, sink)
}

/// [`import`] of the rows `rows[i]` (slices along dimension 0) of each entry `names.entries[i]`. Values of
/// other rows are neither read nor checked. Calls `sink` also for an entry without rows.
///
/// # Errors
/// Those of [`import`], and [`CheckpointError::Internal`] for rows that an entry does not have.
pub fn import_rows(
    folder: &Path,
    names: &NameMap,
    rows: &[Range<usize>],
    sink: &mut dyn FnMut(&str, &[f32]) -> std::result::Result<(), BoxError>,
) -> Result<()> {
    let reader = WeightReader::open(folder, names, rows)?;
    let mut values = Vec::new();
    for (index, entry) in names.entries.iter().enumerate() {
        reader.read(index, &mut values)?;
        sink(&entry.name, &values).map_err(CheckpointError::Caller)?;
    }
    Ok(())
}

/// A folder whose names, shapes and types are checked, and whose entries are read in any order.
#[derive(Debug)]
pub struct WeightReader {
    source: HfFolder,
    names: NameMap,
    rows: Vec<Range<usize>>,
}

impl WeightReader {
    /// Opens `folder` to read the rows `rows[i]` (slices along dimension 0) of each entry `names.entries[i]`.
    ///
    /// # Errors
    /// Those of [`import_rows`] before its first call.
    pub fn open(folder: &Path, names: &NameMap, rows: &[Range<usize>]) -> Result<WeightReader> {
        names.check()?;
        check_rows(names, rows)?;
        let source = HfFolder::open(folder, names)?;
        let names = in_its_form(&source, names)?;
        check_tensors(&source, &names, &Aliases { source: &source, tied: &names.tied })?;
        for (entry, rows) in names.entries.iter().zip(rows) {
            for (part, rows) in parts_of(entry, rows) {
                for tied in names.tied.iter().filter(|tied| tied.same_as == part.hf_name) {
                    check_tied(&source, tied, &rows)?;
                }
            }
        }
        Ok(WeightReader { source, names, rows: rows.to_vec() })
    }

    /// As [`WeightReader::open`], to read all rows.
    ///
    /// # Errors
    /// Those of [`WeightReader::open`].
    pub fn open_whole(folder: &Path, names: &NameMap) -> Result<WeightReader> {
        let rows: Vec<_> = names.entries.iter().map(|entry| 0..entry.rows()).collect();
        WeightReader::open(folder, names, &rows)
    }

    /// Replaces `values` by those of the rows of the entry `index` (row-major).
    ///
    /// # Errors
    /// A value that is not finite or too large for `f32` ([`CheckpointError::Unsupported`], with the tensor
    /// and element); a file that shrinks.
    pub fn read(&self, index: usize, values: &mut Vec<f32>) -> Result<()> {
        let (entry, rows) = (&self.names.entries[index], &self.rows[index]);
        let aliases = Aliases { source: &self.source, tied: &self.names.tied };
        let row = entry.numel() / entry.rows().max(1);
        values.resize(rows.len() * row, 0.0);
        let mut rest = values.as_mut_slice();
        for (part, rows) in parts_of(entry, rows) {
            let Some(stored) = aliases.get(&part.hf_name) else {
                return Err(CheckpointError::Internal(format!(
                    "'{}' passed the check and is now missing",
                    part.hf_name
                )));
            };
            let (values, later) = rest.split_at_mut(rows.len() * row);
            let Stored { file, tensor, .. } = stored;
            match fp8::is_e4m3(tensor) {
                true => fp8::read_dequantized(&self.source, stored, rows.start, values)?,
                false => file.read_f32_part(tensor, rows.start * row, values)?,
            }
            if let Some(at) = first_position(values, |x| !x.is_finite()) {
                let (place, value) = (rows.start * row + at, values[at]);
                let problem = format!("element {place} of {:?} is {value}", tensor.shape);
                let advice = match self.names.kind {
                    FolderKind::Model => "a model with such weights is useless: download the file again",
                    FolderKind::Adapter => {
                        "an adapter with such weights is useless: take an earlier one, or download it again"
                    }
                };
                return Err(CheckpointError::unsupported(file.path(), &tensor.name, problem, advice));
            }
            rest = later;
        }
        Ok(())
    }
}

/// Checks names, shapes and element types of the tensors in a folder as [`import`] does, from the headers of
/// its files. Warns of tensors that an index does not name, and of an index that is not read.
pub fn check(folder: &Path, names: &NameMap) -> Result<()> {
    names.check()?;
    let source = HfFolder::open(folder, names)?;
    source.log_warnings();
    let names = &in_its_form(&source, names)?;
    check_tensors(&source, names, &Aliases { source: &source, tied: &names.tied })
}

/// The names of the tensors in this folder: entries that it holds as a whole have one part.
fn in_its_form(source: &HfFolder, names: &NameMap) -> Result<NameMap> {
    let mut found = NameMap { whole: Vec::new(), ..names.clone() };
    for whole in names.whole.iter().filter(|whole| source.get(&whole.hf_name).is_some()) {
        let Some(entry) = found.entries.iter_mut().find(|entry| entry.name == whole.entry) else { continue };
        if let Some(part) = entry.parts.iter().find(|part| source.get(&part.hf_name).is_some()) {
            let problem =
                format!("has both '{}' and '{}', which hold the same weights", whole.hf_name, part.hf_name);
            let advice = "remove the files of one of the two forms, and the other names from the index";
            return Err(CheckpointError::tensors(source.path(), problem, advice));
        }
        entry.parts = vec![NamePart { hf_name: whole.hf_name.clone(), rows: entry.rows() }];
        found.whole.push(whole.clone());
    }
    Ok(found)
}

/// Checks that entries have these rows; otherwise it is a bug of the caller.
fn check_rows(names: &NameMap, rows: &[Range<usize>]) -> Result<()> {
    let mut pairs = names.entries.iter().zip(rows);
    match pairs.find(|(entry, rows)| rows.start > rows.end || rows.end > entry.rows()) {
        None if names.entries.len() == rows.len() => Ok(()),
        None => Err(CheckpointError::Internal(format!("rows of {} entries", rows.len()))),
        Some((entry, rows)) => {
            Err(CheckpointError::Internal(format!("'{}' has no rows {rows:?}", entry.name)))
        }
    }
}

/// The parts of an entry that overlap `rows`, and these rows as numbered within each part.
fn parts_of<'a>(
    entry: &'a NameEntry,
    rows: &Range<usize>,
) -> impl Iterator<Item = (&'a NamePart, Range<usize>)> {
    let (mut end, rows) = (0, rows.clone());
    let of_part = move |part: &'a NamePart| {
        let start = end;
        end += part.rows;
        let own = rows.start.clamp(start, end) - start..rows.end.clamp(start, end) - start;
        (part, own)
    };
    entry.parts.iter().map(of_part).filter(|(_, rows)| !rows.is_empty())
}

/// The smallest element type in which an export by `names` loses nothing of the weights in `folder`. It is
/// FP8 if just the matrices that `names` exports as FP8 are FP8, with scales that are powers of two, and all
/// others are bf16; bf16 if all tensors are bf16 or such FP8; otherwise fp32.
///
/// # Errors
/// A folder without safetensors; damaged files.
pub fn lossless_dtype(folder: &Path, names: &NameMap) -> Result<ExportDtype> {
    let source = HfFolder::open(folder, names)?;
    let names = &in_its_form(&source, names)?;
    let parts = names.entries.iter().filter(|entry| entry.fp8.is_some()).flat_map(|entry| &entry.parts);
    let exported_as_fp8: HashSet<&str> = parts.map(|part| part.hf_name.as_str()).collect();
    let in_fp32 = names.entries.iter().filter(|entry| names.in_fp32.contains(&entry.name));
    let in_fp32: HashSet<&str> =
        in_fp32.flat_map(|entry| &entry.parts).map(|part| part.hf_name.as_str()).collect();
    let mut is_same_in_fp8 = true;
    let mut quantized = Vec::new();
    let is_ignorable =
        |name: &str| names.ignorable_suffixes.iter().any(|suffix| name.ends_with(suffix.as_str()));
    for stored in source.tensors() {
        let Stored { name, tensor, .. } = stored;
        let matrix = || scaled_name(name).and_then(|of| source.get(of));
        let is_scales = || matrix().is_some_and(|of| fp8::is_e4m3(of.tensor));
        if is_ignorable(name) || in_fp32.contains(name) || is_scales() {
            continue;
        }
        match tensor.dtype {
            StoredDtype::BF16 => {}
            StoredDtype::F8_E4M3 => quantized.push(stored),
            _ => return Ok(ExportDtype::Fp32),
        }
        is_same_in_fp8 &= fp8::is_e4m3(tensor) == exported_as_fp8.contains(name);
    }
    for stored in &quantized {
        if !fp8::read_scales(&source, stored)?.into_iter().all(fp8::is_exact_in_bf16) {
            return Ok(ExportDtype::Fp32);
        }
    }
    Ok(match is_same_in_fp8 && !quantized.is_empty() {
        true => ExportDtype::Fp8,
        false => ExportDtype::Bf16,
    })
}

/// Look-up of a tensor by its name, or by a name that is tied to it.
struct Aliases<'a> {
    source: &'a HfFolder,
    tied: &'a [TiedName],
}

impl Aliases<'_> {
    fn get(&self, name: &str) -> Option<Stored<'_>> {
        self.source.get(name).or_else(|| {
            let mut tied = self.tied.iter().filter(|tied| tied.same_as == name);
            tied.find_map(|tied| self.source.get(&tied.hf_name))
        })
    }
}

/// Advice for an adapter whose tensors do not fit.
const OTHER_MODEL: &str = "the adapter is of another model or another rank, or its file is incomplete: name the model that it was trained \
                           on, and check `r` and `target_modules` in adapter_config.json";

/// The weights of the head.
const HEAD: &str = "lm_head.weight";

/// Checks names, shapes and element types of all tensors, including those that the map does not list.
fn check_tensors(source: &HfFolder, names: &NameMap, aliases: &Aliases<'_>) -> Result<()> {
    let known: HashSet<&str> = names
        .entries
        .iter()
        .flat_map(|entry| entry.parts.iter().map(|part| part.hf_name.as_str()))
        .chain(names.tied.iter().map(|tied| tied.hf_name.as_str()))
        .collect();
    // Scales are known if their matrix is present.
    let are_scales =
        |name: &str| scaled_name(name).is_some_and(|of| known.contains(of) && source.get(of).is_some());
    let is_known = |name: &str| known.contains(name) || are_scales(name);
    let is_ignorable =
        |name: &str| names.ignorable_suffixes.iter().any(|suffix| name.ends_with(suffix.as_str()));
    let left: Vec<&str> = source
        .tensors()
        .filter(|stored| !is_known(stored.name) && !is_ignorable(stored.name))
        .map(|stored| stored.tensor.name.as_str())
        .collect();
    let mut missing = Vec::new();
    let mut misshapen = Vec::new();
    for (entry, part) in names.entries.iter().flat_map(|entry| entry.parts.iter().map(move |p| (entry, p))) {
        let Some(stored) = aliases.get(&part.hf_name) else {
            missing.push(part.hf_name.as_str());
            continue;
        };
        let Stored { file, tensor, .. } = stored;
        let whole = names.whole.iter().find(|whole| whole.hf_name == part.hf_name);
        let expected = whole.map_or_else(|| entry.part_shape(part), |whole| whole.shape.clone());
        if tensor.shape == expected {
            fp8::check_type(source, stored)?;
            continue;
        }
        if !fp8::is_e4m3(tensor) {
            file.check_readable(tensor)?;
        }
        let (name, found) = (&tensor.name, &tensor.shape);
        misshapen.push(format!("'{name}' is {found:?} but should be {expected:?}"));
    }
    let (folder, noun) = (source.path(), names.kind.noun());
    if missing == [HEAD] && names.tied.is_empty() {
        let problem = format!("'{HEAD}' is missing, the weights of the model's head");
        let advice = "if the head shares the weights of the embedding, set tie_word_embeddings to true in config.json; if not, the \
                      folder was saved without its head, or the download is incomplete";
        return Err(CheckpointError::tensors(folder, problem, advice));
    }
    if !missing.is_empty() {
        let named: Vec<String> = missing
            .iter()
            .enumerate()
            // The search is slow, and only the first few are shown.
            .map(|(i, name)| match (i < 5).then(|| nearest_name(name, left.iter().copied())).flatten() {
                Some(near) => format!("'{name}' (nearest: '{near}')"),
                None => format!("'{name}'"),
            })
            .collect();
        let all: usize = names.entries.iter().map(|entry| entry.parts.len()).sum();
        let n = missing.len();
        let problem = format!("{n} of the {noun}'s {all} tensors are missing: {}", first_few(&named, LISTED));
        let advice = match names.kind {
            FolderKind::Model => {
                "check that config.json belongs to this folder, and that the download is complete"
            }
            FolderKind::Adapter => OTHER_MODEL,
        };
        return Err(CheckpointError::tensors(folder, problem, advice));
    }
    if !misshapen.is_empty() {
        let problem =
            format!("{} tensors have other shapes: {}", misshapen.len(), first_few(&misshapen, LISTED));
        let advice = match names.kind {
            FolderKind::Model => "check that config.json belongs to this folder",
            FolderKind::Adapter => OTHER_MODEL,
        };
        return Err(CheckpointError::tensors(folder, problem, advice));
    }
    if !left.is_empty() {
        let quoted: Vec<String> = left.iter().map(|name| format!("'{name}'")).collect();
        let problem =
            format!("{} tensors have no place in the {noun}: {}", left.len(), first_few(&quoted, LISTED));
        let advice = match names.kind {
            FolderKind::Model => {
                "the folder holds another architecture than its config.json says, or an unsupported one"
            }
            FolderKind::Adapter => {
                "the adapter is of another model, or has weights beside A and B of the blocks' linear layers, which are not supported"
            }
        };
        return Err(CheckpointError::tensors(folder, problem, advice));
    }
    Ok(())
}

/// Checks that these rows of a tied tensor, if present, are bit-identical to those that it repeats.
fn check_tied(source: &HfFolder, tied: &TiedName, rows: &Range<usize>) -> Result<()> {
    let (Some(one), Some(two)) = (source.get(&tied.hf_name), source.get(&tied.same_as)) else {
        return Ok(());
    };
    let (Stored { file, tensor, .. }, Stored { file: other_file, tensor: other, .. }) = (one, two);
    file.check_readable(tensor)?;
    let same = tensor.shape == other.shape && {
        /// Elements compared at a time: these are the largest tensors of a model.
        const PIECE: usize = 1 << 20;
        let row = tensor.shape.iter().skip(1).product::<usize>();
        let elements = rows.start * row..rows.end * row;
        let piece = elements.len().min(PIECE);
        let (mut values, mut others) = (vec![0.0f32; piece], vec![0.0f32; piece]);
        let mut same = true;
        for start in elements.clone().step_by(PIECE) {
            let len = PIECE.min(elements.end - start);
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
    let problem = format!("'{}' differs from '{}', but the config ties them", tied.hf_name, tied.same_as);
    let advice = "set tie_word_embeddings to false in config.json, or remove the wrong one of the two";
    Err(CheckpointError::tensors(source.path(), problem, advice))
}
