//! The reader of a checkpoint. The caller gets only bytes that match their checksum.
//!
//! A tensor is read into a buffer, hashed there and passed on from there, so a change of the file cannot come
//! between verification and use.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::manifest::{ADVICE, DocumentEntry, MANIFEST_FILE, Manifest, document_file};
use super::open_files::OpenFiles;
use super::pieces::check_rows;
use super::{TensorSpec, newest_intact};
use crate::error::{BoxError, CheckpointError, LISTED, Result};
use crate::files;
use crate::first_few::first_few;
use crate::temporary::parent;

/// A complete checkpoint: its manifest is valid, and its files exist with the lengths in the manifest.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    pub(super) manifest: Manifest,
    /// Index of each tensor in the manifest, by name.
    by_name: HashMap<String, usize>,
    pub(super) files: OpenFiles,
}

impl Checkpoint {
    /// Opens the folder of `step` if it is complete. Checksums are compared when tensors and documents are
    /// read.
    pub(super) fn open(path: &Path, step: u64) -> Result<Self> {
        let manifest_path = path.join(MANIFEST_FILE);
        let manifest = Manifest::parse(&manifest_path, &files::read(&manifest_path)?)?;
        if manifest.step != step {
            let problem = format!("is of step {}", manifest.step);
            let advice = "the folder was renamed: restore its old name";
            return Err(CheckpointError::damaged(&manifest_path, "manifest", problem, advice));
        }
        let documents = manifest.documents.iter().map(|d| (document_file(&d.name), d.bytes));
        let files = manifest.files.iter().map(|file| (file.file.clone(), file.bytes));
        for (file, bytes) in files.chain(documents) {
            let file = path.join(file);
            let found = fs::metadata(&file).map_err(CheckpointError::io(&file, "open"))?;
            if !found.is_file() || found.len() != bytes {
                let problem = format!("has {} bytes, but the manifest says {bytes}", found.len());
                let advice = "the checkpoint is incomplete: use another one";
                return Err(CheckpointError::damaged(&file, "length", problem, advice));
            }
        }
        let by_name = manifest.specs.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        Ok(Self { path: path.to_path_buf(), manifest, by_name, files: OpenFiles::default() })
    }

    /// The step after which it was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, in the order in which they were saved.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.manifest.specs
    }

    pub(super) fn index_of(&self, name: &str) -> Option<usize> {
        self.by_name.get(name).copied()
    }

    /// Path of a file of the manifest.
    pub(super) fn file_path(&self, index: usize) -> PathBuf {
        self.path.join(&self.manifest.files[index].file)
    }

    /// The document `name`, verified against its checksum.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] if it does not exist or was changed, with the checkpoint to use instead.
    pub fn document(&self, name: &str) -> Result<Value> {
        let bad = |problem: String| {
            CheckpointError::damaged(&self.path.join(document_file(name)), "document", problem, ADVICE)
        };
        let read = || {
            let Some(entry) = self.manifest.documents.iter().find(|entry| entry.name == name) else {
                let names: Vec<&str> =
                    self.manifest.documents.iter().map(|entry| entry.name.as_str()).collect();
                return Err(bad(format!(
                    "is not in this checkpoint, which has: {}",
                    first_few(&names, LISTED)
                )));
            };
            serde_json::from_slice(&self.document_bytes(entry)?).map_err(|e| bad(format!("is not JSON: {e}")))
        };
        read().map_err(|error| self.with_advice(error))
    }

    /// Calls `sink(i, bytes)` once per tensor of `expected`, in the order of the files. The bytes match their
    /// checksums and are aligned to the element size. `expected` must list exactly the saved tensors, in any
    /// order. One tensor is in memory at a time.
    ///
    /// # Errors
    /// Before the first call: [`CheckpointError::Tensors`], with the tensors that are missing, unexpected, or
    /// of another type or shape. During the calls: [`CheckpointError::Damaged`], with the tensor, the rows of
    /// the damaged piece, the file and a verified checkpoint to use instead (tensors already passed to `sink`
    /// are good, but incomplete), and errors of `sink`.
    pub fn load(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        self.load_rows(expected, &all_rows(expected), Others::Refuse, sink)
    }

    /// [`Checkpoint::load`] of a subset of the tensors; the others are not read.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`], except for tensors that are not in `wanted`.
    pub fn load_subset(
        &self,
        wanted: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        self.load_rows(wanted, &all_rows(wanted), Others::Ignore, sink)
    }

    /// [`Checkpoint::load`] of the rows `rows[i]` of each tensor `expected[i]`, which has its full shape: the
    /// rows that a rank holds, whatever the ranks that saved them. Reads and verifies only the pieces that
    /// overlap these rows. Calls `sink` also for a tensor without rows.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`], and [`CheckpointError::Internal`] for rows that a tensor does not have.
    pub fn load_rows(
        &self,
        expected: &[TensorSpec],
        rows: &[Range<usize>],
        others: Others,
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        check_rows(expected, rows)?;
        check_specs(self, expected, others)?;
        let mut order = Vec::with_capacity(expected.len());
        let mut largest = 0;
        for (i, (spec, rows)) in expected.iter().zip(rows).enumerate() {
            let Some(tensor) = self.index_of(&spec.name) else { unreachable!("it was checked") };
            largest = largest.max(rows.len() * spec.row_bytes());
            let first = self.manifest.pieces[tensor].iter().find(|piece| piece.rows.end > rows.start);
            // In a file, the widest elements come first, then those in the order of the manifest.
            let place = (first.map(|piece| piece.file), Reverse(spec.stored(0).0.bitsize()), tensor);
            order.push((place, i));
        }
        order.sort_unstable();
        // Eight-byte words align the buffer to every element size.
        let mut words = vec![0u64; largest.div_ceil(8)];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for ((.., tensor), i) in order {
            let bytes = &mut buffer[..rows[i].len() * expected[i].row_bytes()];
            self.read_into(tensor, &rows[i], bytes).map_err(|error| self.with_advice(error))?;
            sink(i, bytes).map_err(CheckpointError::Caller)?;
        }
        Ok(())
    }

    /// The bytes of a document, verified against its checksum.
    pub(super) fn document_bytes(&self, entry: &DocumentEntry) -> Result<Vec<u8>> {
        let path = self.path.join(document_file(&entry.name));
        let bytes = files::read(&path)?;
        if xxh3_64(&bytes) == entry.xxh3 {
            return Ok(bytes);
        }
        Err(CheckpointError::damaged(&path, "document", "does not match its checksum", ADVICE))
    }

    /// Adds advice to an error of damage: the newest older checkpoint that is intact, which this verifies.
    pub(super) fn with_advice(&self, error: CheckpointError) -> CheckpointError {
        let CheckpointError::Damaged { path, location, problem, advice } = error else { return error };
        let advice = match newest_intact(parent(&self.path), self.step()) {
            Ok(Some(older)) => format!(
                "use {} instead, which is verified (a resumed run uses it once this one is removed)",
                older.path.display()
            ),
            Ok(None) => {
                "no older checkpoint is intact: restore this one from a copy, or start from the beginning"
                    .to_string()
            }
            // The damage matters more than the failure to check the other checkpoints.
            Err(_) => advice,
        };
        CheckpointError::Damaged { path, location, problem, advice }
    }
}

/// Treatment of tensors of a checkpoint that the caller did not list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Others {
    /// They are an error.
    Refuse,
    /// They are not read.
    Ignore,
}

fn all_rows(specs: &[TensorSpec]) -> Vec<Range<usize>> {
    specs.iter().map(|spec| 0..spec.rows()).collect()
}

/// Compares the tensors of a checkpoint with the expected ones; the error names every difference.
pub(super) fn check_specs(checkpoint: &Checkpoint, expected: &[TensorSpec], others: Others) -> Result<()> {
    let mut wanted = HashMap::new();
    let (mut missing, mut differing) = (Vec::new(), Vec::new());
    for spec in expected {
        let name = &spec.name;
        if wanted.insert(name.as_str(), spec).is_some() {
            return Err(CheckpointError::Internal(format!("tensor '{name}' is expected twice")));
        }
        match checkpoint.index_of(name).map(|index| &checkpoint.manifest.specs[index]) {
            None => missing.push(format!("'{name}'")),
            Some(found) if found != spec => differing.push(format!("'{name}' is {found}, not {spec}")),
            Some(_) => {}
        }
    }
    let is_other = |spec: &&TensorSpec| others == Others::Refuse && !wanted.contains_key(spec.name.as_str());
    let unexpected = checkpoint.tensors().iter().filter(is_other);
    let unexpected: Vec<String> = unexpected.map(|spec| format!("'{}'", spec.name)).collect();
    let kinds = [("missing", missing), ("not in this run", unexpected), ("different", differing)];
    let found: Vec<String> = kinds
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("{} tensors are {kind} ({})", names.len(), first_few(names, LISTED)))
        .collect();
    if found.is_empty() {
        return Ok(());
    }
    let advice = "resume with the model, precision and optimizer that it was saved with, or start a new run";
    Err(CheckpointError::tensors(&checkpoint.path, found.join("; "), advice))
}
