//! The reader of a checkpoint. The caller gets only bytes that match their checksum.
//!
//! A tensor is read into a buffer, hashed there and passed on from there, so a change of the file cannot come
//! between verification and use.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::manifest::{ADVICE, DocumentEntry, MANIFEST_FILE, Manifest, document_file, stored};
use super::{TensorSpec, newest_intact};
use crate::error::{BoxError, CheckpointError, Result, comma_separated};
use crate::files;
use crate::temporary::parent;
use crate::tensor_file::{TensorFile, TensorInfo};

/// A complete checkpoint: its manifest is valid, and its files exist with the lengths in the manifest.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    pub(super) manifest: Manifest,
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
        let shards = manifest.shards.iter().map(|shard| (shard.file.clone(), shard.bytes));
        for (file, bytes) in shards.chain(documents) {
            let file = path.join(file);
            let found = fs::metadata(&file).map_err(CheckpointError::io(&file, "open"))?;
            if !found.is_file() || found.len() != bytes {
                let problem = format!("has {} bytes, but the manifest says {bytes}", found.len());
                let advice = "the checkpoint is incomplete: use another one";
                return Err(CheckpointError::damaged(&file, "length", problem, advice));
            }
        }
        Ok(Self { path: path.to_path_buf(), manifest })
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

    /// Reads all files and compares all checksums, with a few MiB of memory.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], with the first document or tensor that differs and its file.
    pub fn verify(&self) -> Result<()> {
        for entry in &self.manifest.documents {
            self.document_bytes(entry)?;
        }
        for shard in 0..self.manifest.shards.len() {
            let (file, members) = self.open_shard(shard)?;
            for (at, tensor) in members {
                let mut hash = Xxh3::new();
                file.for_each_piece(&tensor, |piece| hash.update(piece))?;
                self.check_hash(&file, at, hash.digest())?;
            }
        }
        Ok(())
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
                    comma_separated(&names)
                )));
            };
            serde_json::from_slice(&self.document_bytes(entry)?).map_err(|e| bad(format!("is not JSON: {e}")))
        };
        read().map_err(|error| self.with_advice(error))
    }

    /// Calls `sink(i, bytes)` once per tensor of `expected`, in the order of the files. The bytes match their
    /// checksum and are aligned to the element size. `expected` must list exactly the saved tensors, in any
    /// order. One tensor is in memory at a time.
    ///
    /// # Errors
    /// Before the first call: [`CheckpointError::Tensors`], with the tensors that are missing, unexpected, or
    /// of another type or shape. During the calls: [`CheckpointError::Damaged`], with the tensor, the file
    /// and a verified checkpoint to use instead (tensors already passed to `sink` are good, but incomplete),
    /// and errors of `sink`.
    pub fn load(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        check_specs(self, expected, Unexpected::Refuse)?;
        self.read(expected, sink)
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
        check_specs(self, wanted, Unexpected::Ignore)?;
        self.read(wanted, sink)
    }

    fn read(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        let index: HashMap<&str, usize> =
            expected.iter().enumerate().map(|(i, spec)| (spec.name.as_str(), i)).collect();
        let largest = expected.iter().filter_map(TensorSpec::bytes).max().unwrap_or(0);
        // Eight-byte words align the buffer to every element size.
        let mut words = vec![0u64; largest.div_ceil(8)];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        for shard in 0..self.manifest.shards.len() {
            let (file, members) = self.open_shard(shard).map_err(|error| self.with_advice(error))?;
            for (at, tensor) in members {
                let Some(&i) = index.get(tensor.name.as_str()) else { continue };
                let bytes = &mut buffer[..tensor.range.len()];
                file.read_bytes(&tensor, bytes)?;
                self.check_hash(&file, at, xxh3_64(bytes)).map_err(|error| self.with_advice(error))?;
                sink(i, bytes).map_err(CheckpointError::Caller)?;
            }
        }
        Ok(())
    }

    /// Opens a shard: its file, and its tensors by offset, each with its index in the manifest.
    fn open_shard(&self, shard: usize) -> Result<(TensorFile, Vec<(usize, TensorInfo)>)> {
        let file = TensorFile::open(&self.path.join(&self.manifest.shards[shard].file))?;
        let mut members = Vec::new();
        for (at, spec) in self.manifest.specs.iter().enumerate() {
            if self.manifest.locations[at].shard != shard {
                continue;
            }
            let found = file.tensor(&spec.name);
            let Some(tensor) = found.filter(|found| (found.dtype, found.shape.clone()) == stored(spec))
            else {
                let (location, problem) =
                    (format!("tensor '{}'", spec.name), "is not there as the manifest says");
                return Err(CheckpointError::damaged(
                    file.path(),
                    location,
                    format!("{spec} {problem}"),
                    ADVICE,
                ));
            };
            members.push((at, tensor.clone()));
        }
        members.sort_by_key(|(_, tensor)| tensor.range.start);
        Ok((file, members))
    }

    /// Compares the hash of tensor `at` with the manifest.
    fn check_hash(&self, file: &TensorFile, at: usize, found: u64) -> Result<()> {
        if found == self.manifest.locations[at].xxh3 {
            return Ok(());
        }
        let location = format!("tensor '{}'", self.manifest.specs[at].name);
        Err(CheckpointError::damaged(file.path(), location, "does not match its checksum", ADVICE))
    }

    /// The bytes of a document, verified against its checksum.
    fn document_bytes(&self, entry: &DocumentEntry) -> Result<Vec<u8>> {
        let path = self.path.join(document_file(&entry.name));
        let bytes = files::read(&path)?;
        if xxh3_64(&bytes) == entry.xxh3 {
            return Ok(bytes);
        }
        Err(CheckpointError::damaged(&path, "document", "does not match its checksum", ADVICE))
    }

    /// Adds advice to an error of damage: the newest older checkpoint that is intact, which this verifies.
    fn with_advice(&self, error: CheckpointError) -> CheckpointError {
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

/// Treatment of tensors that the caller did not list.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unexpected {
    Refuse,
    Ignore,
}

/// Compares the tensors of a checkpoint with the expected ones; the error names every difference.
pub(super) fn check_specs(
    checkpoint: &Checkpoint,
    expected: &[TensorSpec],
    policy: Unexpected,
) -> Result<()> {
    let saved: HashMap<&str, &TensorSpec> =
        checkpoint.tensors().iter().map(|spec| (spec.name.as_str(), spec)).collect();
    let mut wanted = HashMap::new();
    let (mut missing, mut differing) = (Vec::new(), Vec::new());
    for spec in expected {
        let name = &spec.name;
        if wanted.insert(name.as_str(), spec).is_some() {
            return Err(CheckpointError::Internal(format!("tensor '{name}' is expected twice")));
        }
        match saved.get(name.as_str()) {
            None => missing.push(format!("'{name}'")),
            Some(found) if *found != spec => differing.push(format!("'{name}' is {found}, not {spec}")),
            Some(_) => {}
        }
    }
    let is_other =
        |spec: &&TensorSpec| policy == Unexpected::Refuse && !wanted.contains_key(spec.name.as_str());
    let unexpected = checkpoint.tensors().iter().filter(is_other);
    let unexpected: Vec<String> = unexpected.map(|spec| format!("'{}'", spec.name)).collect();
    let kinds = [("missing", missing), ("not in this run", unexpected), ("different", differing)];
    let found: Vec<String> = kinds
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("{} tensors are {kind} ({})", names.len(), comma_separated(names)))
        .collect();
    if found.is_empty() {
        return Ok(());
    }
    let advice = "resume with the model, precision and optimizer that it was saved with, or start a new run";
    Err(CheckpointError::tensors(&checkpoint.path, found.join("; "), advice))
}
