//! The writer of a step: begins the temporary folder, checks what all ranks have written to it, and completes
//! it with the documents and, last, the manifest.

use std::collections::HashSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::TensorSpec;
use super::load::{Checkpoint, Others, check_specs};
use super::manifest::{
    DocumentEntry, FileEntry, MANIFEST_FILE, Manifest, document_file, is_document_name, rank_file,
};
use super::pieces::Piece;
use super::rank_report::{RankReport, WrittenRows};
use super::rank_writer::RankWriter;
use crate::error::{CheckpointError, Result};
use crate::files::write_new;
use crate::temporary::{self, Temporary};
use crate::writers_lock::{WritersLock, remove_lock_file};

/// A step that rank 0 has begun to write. Dropping it before [`StepWriter::finish`] removes what was written.
///
/// The other ranks join its folder by name ([`super::CheckpointStore::join`]), and all write their rows.
#[derive(Debug)]
pub struct StepWriter {
    temporary: Temporary,
    target: PathBuf,
    step: u64,
    tensors: Vec<TensorSpec>,
    documents: Vec<(String, Value)>,
    /// True if the step exists and is intact, but has other documents.
    is_intact: bool,
    writer: RankWriter,
}

/// The start of a save.
#[derive(Debug)]
pub enum Begun {
    /// The step exists in this folder, is intact and has equal documents. There is nothing to write.
    Exists(PathBuf),
    /// The ranks can write.
    Writing(Box<StepWriter>),
}

/// Begins the step in the folder `target`; see [`super::CheckpointStore::begin`].
pub(super) fn begin(
    target: &Path,
    max_file_bytes: u64,
    step: u64,
    tensors: &[TensorSpec],
    documents: &[(String, Value)],
) -> Result<Begun> {
    check_names(tensors, documents)?;
    let mut is_intact = false;
    if target.exists() {
        let existing = Checkpoint::open(target, step);
        if let Ok(existing) = &existing {
            check_specs(existing, tensors, Others::Refuse)?;
        }
        match existing.and_then(|existing| existing.verify().map(|()| existing)) {
            Ok(existing) => {
                let entries = documents.iter().map(|(name, value)| document_entry(name, value).0);
                if entries.eq(existing.manifest.documents.iter().cloned()) {
                    return Ok(Begun::Exists(target.to_path_buf()));
                }
                is_intact = true;
            }
            Err(error) => tracing::warn!("replacing the damaged step {step}: {error}"),
        }
    }
    let (temporary, lock) = create_folder(target)?;
    Ok(Begun::Writing(Box::new(StepWriter {
        writer: RankWriter::new(temporary.path(), max_file_bytes, lock),
        temporary,
        target: target.to_path_buf(),
        step,
        tensors: tensors.to_vec(),
        documents: documents.to_vec(),
        is_intact,
    })))
}

/// Creates the temporary folder and its lock. A sweep on another host, which does not see the lock of the
/// folder itself, may remove it in between.
fn create_folder(target: &Path) -> Result<(Temporary, WritersLock)> {
    let mut tries = 3;
    loop {
        let temporary = Temporary::folder(target)?;
        match WritersLock::create(temporary.path()) {
            Ok(lock) => return Ok((temporary, lock)),
            Err(error) if tries == 0 => return Err(error),
            Err(_) => tries -= 1,
        }
    }
}

impl StepWriter {
    /// Name of the temporary folder, with which other ranks join.
    pub fn name(&self) -> String {
        self.temporary.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The writer of rank 0.
    pub fn writer(&self) -> &RankWriter {
        &self.writer
    }

    /// Completes the step, from the reports of all ranks, by rank, and returns its folder.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails; [`CheckpointError::Damaged`], with the rank, for a report
    /// that is not valid or whose files are not here; [`CheckpointError::Internal`], with the tensor and its
    /// rows, unless every row was written by exactly one rank. Nothing of the step remains.
    pub fn finish<B: AsRef<[u8]>>(self, reports: &[B]) -> Result<PathBuf> {
        let manifest = self.manifest(reports)?;
        for (name, value) in &self.documents {
            write_new(&self.temporary.path().join(document_file(name)), &document_entry(name, value).1)?;
        }
        write_new(&self.temporary.path().join(MANIFEST_FILE), &manifest.to_bytes()?)?;
        self.publish()
    }

    /// Gives the folder its final name.
    fn publish(self) -> Result<PathBuf> {
        let Self { mut temporary, target, is_intact, .. } = self;
        if !target.exists() {
            temporary.publish(&target)?;
        } else if !temporary.exchange(&target)? {
            if is_intact {
                tracing::warn!(
                    "{}: its documents stay unchanged, because this file system cannot exchange folders",
                    target.display()
                );
                return Ok(target);
            }
            // The removed checkpoint is damaged, so a kill before the rename loses nothing.
            temporary::remove_atomically(&target)?;
            temporary.publish(&target)?;
        }
        // Only now, because until the rename it tells other processes that the folder is no leftover.
        remove_lock_file(&target);
        Ok(target)
    }

    /// The manifest of what the ranks have written.
    fn manifest<B: AsRef<[u8]>>(&self, reports: &[B]) -> Result<Manifest> {
        let (mut files, mut written) = (Vec::new(), vec![Vec::new(); self.tensors.len()]);
        for (rank, bytes) in reports.iter().enumerate() {
            let report = RankReport::parse(bytes.as_ref(), rank, &self.tensors).map_err(|problem| {
                let advice = "run the same version of this program with the same run file on all ranks";
                let location = format!("report of rank {rank}");
                CheckpointError::damaged(self.temporary.path(), location, problem, advice)
            })?;
            let first = files.len();
            for (number, bytes) in report.files.into_iter().enumerate() {
                files.push(self.file(rank, number, bytes)?);
            }
            for WrittenRows { tensor, file, rows, hashes } in report.rows {
                let pieces = self.tensors[tensor].pieces(rows.clone()).zip(hashes);
                let pieces = pieces.map(|(rows, xxh3)| Piece { file: first + file, rows, xxh3 });
                written[tensor].push(Part { rank, rows, pieces: pieces.collect() });
            }
        }
        let pieces = self.tensors.iter().zip(written).map(|(spec, mut parts)| {
            parts.sort_unstable_by_key(|part: &Part| part.rows.start);
            check_cover(spec, &parts)?;
            Ok(parts.into_iter().flat_map(|part| part.pieces).collect())
        });
        Ok(Manifest {
            step: self.step,
            pieces: pieces.collect::<Result<_>>()?,
            files,
            specs: self.tensors.clone(),
            documents: self.documents.iter().map(|(name, value)| document_entry(name, value).0).collect(),
        })
    }

    /// A file of a rank, which must be in this process's folder.
    fn file(&self, rank: usize, number: usize, bytes: u64) -> Result<FileEntry> {
        let file = rank_file(rank, number);
        let path = self.temporary.path().join(&file);
        let problem = match fs::metadata(&path) {
            Ok(found) if found.is_file() && found.len() == bytes => return Ok(FileEntry { file, bytes }),
            Ok(found) => format!("has {} bytes, but rank {rank} wrote {bytes}", found.len()),
            Err(error) => format!("is not there ({error}), but rank {rank} wrote it"),
        };
        let advice = "put train.out on a file system that all ranks share";
        Err(CheckpointError::damaged(&path, "length", problem, advice))
    }
}

/// The rows of a tensor that one rank has written.
#[derive(Clone)]
struct Part {
    rank: usize,
    rows: Range<usize>,
    pieces: Vec<Piece>,
}

/// Checks that parts, sorted by their first row, cover all rows once.
fn check_cover(spec: &TensorSpec, parts: &[Part]) -> Result<()> {
    let (mut next, mut before) = (0, 0);
    let wrong = |start: usize, end: usize, problem: String| {
        let place = spec.place(&(start..end));
        Err(CheckpointError::Internal(format!("{place} ({spec}): {problem}")))
    };
    for Part { rank, rows, .. } in parts {
        if rows.start > next {
            return wrong(next, rows.start, "written by no rank".to_string());
        }
        if rows.start < next {
            return wrong(rows.start, next.min(rows.end), format!("written by ranks {before} and {rank}"));
        }
        (next, before) = (rows.end, *rank);
    }
    if next < spec.rows() {
        return wrong(next, spec.rows(), "written by no rank".to_string());
    }
    Ok(())
}

/// A document's entry in the manifest, and the bytes of its file.
fn document_entry(name: &str, value: &Value) -> (DocumentEntry, Vec<u8>) {
    let bytes = format!("{value:#}\n").into_bytes();
    (DocumentEntry { name: name.to_owned(), bytes: bytes.len() as u64, xxh3: xxh3_64(&bytes) }, bytes)
}

/// Repeated or invalid names, and sizes that overflow, are bugs of the caller.
fn check_names(tensors: &[TensorSpec], documents: &[(String, Value)]) -> Result<()> {
    let mut names = HashSet::new();
    if let Some((name, _)) = documents.iter().find(|(name, _)| !is_document_name(name) || !names.insert(name))
    {
        return Err(CheckpointError::Internal(format!("'{name}' is not a valid or new name of a document")));
    }
    let mut names = HashSet::new();
    for spec in tensors {
        if !names.insert(&spec.name) || spec.bytes().is_none() {
            return Err(CheckpointError::Internal(format!(
                "tensor '{}' ({spec}) repeats a name or is too large",
                spec.name
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use xtrain_tensor::DType;

    use super::*;

    proptest! {
        #[test]
        fn tensors_saved_in_any_number_of_files_load_to_the_bit(
            sizes in prop::collection::vec((0usize..40, 0usize..4), 0..12), max_file_bytes in 0u64..200
        ) {
            let dtypes = [DType::U8, DType::BF16, DType::F32, DType::F64];
            let specs: Vec<TensorSpec> = sizes.iter().enumerate().map(|(i, &(rows, dtype))| TensorSpec {
                name: format!("t{i}"),
                dtype: dtypes[dtype],
                shape: vec![rows, 3],
            }).collect();
            let bytes = |i: usize| vec![i as u8 + 1; specs[i].bytes().unwrap()];
            let dir = tempfile::tempdir()?;
            let target = dir.path().join("step-9");
            let Begun::Writing(step) = begin(&target, max_file_bytes, 9, &specs, &[]).unwrap() else {
                panic!("the step exists already");
            };
            let rows: Vec<_> = specs.iter().map(|spec| 0..spec.rows()).collect();
            let report = step.writer().write(0, &specs, &rows, &mut |i| Ok(bytes(i))).unwrap();
            let checkpoint = Checkpoint::open(&step.finish(&[report]).unwrap(), 9).unwrap();
            let mut loaded = vec![None; specs.len()];
            checkpoint.load(&specs, &mut |i, found| {
                assert_eq!(found.as_ptr() as usize % specs[i].dtype.bits().div_ceil(8), 0);
                assert!(loaded[i].replace(found.to_vec()).is_none());
                Ok(())
            }).unwrap();
            for (i, found) in loaded.into_iter().enumerate() {
                prop_assert_eq!(found, Some(bytes(i)));
            }
            for file in 0..checkpoint.manifest.files.len() {
                let members = checkpoint.manifest.pieces.iter().enumerate();
                let sizes: Vec<u64> = members
                    .filter(|(_, pieces)| pieces.iter().any(|piece| piece.file == file))
                    .map(|(i, _)| specs[i].bytes().unwrap() as u64)
                    .collect();
                prop_assert!(sizes.len() == 1 || sizes.iter().sum::<u64>() <= max_file_bytes);
            }
        }
    }
}
