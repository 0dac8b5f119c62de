//! Reading one checkpoint: every byte that is handed over has matched its checksum.
//!
//! A tensor is read into memory of our own, hashed there and handed over from there: what was verified is what is
//! used, whatever happens to the file meanwhile.

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

/// A complete checkpoint: its manifest is valid, and its files are there in full.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    pub(super) manifest: Manifest,
}

impl Checkpoint {
    /// Opens the folder of that step; anything but a complete one is an error. Checksums are left to reading.
    pub(super) fn open(path: &Path, step: u64) -> Result<Self> {
        let manifest_path = path.join(MANIFEST_FILE);
        let manifest = Manifest::parse(&manifest_path, &files::read(&manifest_path)?)?;
        if manifest.step != step {
            let problem = format!("is of step {}", manifest.step);
            let advice = "the folder was renamed: give it its old name back";
            return Err(CheckpointError::damaged(&manifest_path, "manifest", problem, advice));
        }
        let documents = manifest.documents.iter().map(|d| (document_file(&d.name), d.bytes));
        let shards = manifest.shards.iter().map(|shard| (shard.file.clone(), shard.bytes));
        for (file, bytes) in shards.chain(documents) {
            let file = path.join(file);
            let found = fs::metadata(&file).map_err(CheckpointError::io(&file, "open"))?;
            if !found.is_file() || found.len() != bytes {
                let problem = format!("has {} bytes, and the manifest says {bytes}", found.len());
                let advice = "the checkpoint is not complete: use another one";
                return Err(CheckpointError::damaged(&file, "length", problem, advice));
            }
        }
        Ok(Self { path: path.to_path_buf(), manifest })
    }

    /// The step after which it was taken.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors, in the order in which they were named when it was saved.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.manifest.specs
    }

    /// Reads every file whole and compares every checksum; takes a few MiB of memory.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] names the first document or tensor that differs, and its file.
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

    /// The document of that name, after its checksum has matched.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when there is none of that name, or it has been changed; it says which checkpoint
    /// to use instead.
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

    /// Calls `sink(i, bytes)` once for each of `expected`, in the order of the files, with bytes that have matched
    /// their checksum and lie at a multiple of the element size. `expected` must be exactly what was saved, in any
    /// order. One tensor is in memory at a time.
    ///
    /// # Errors
    /// Before the first call: [`CheckpointError::Tensors`] names what is missing, unexpected, or of another type or
    /// shape. During the calls: [`CheckpointError::Damaged`] names the tensor, the file and the checkpoint to use
    /// instead, which has been verified (what was handed over until then is good, but not all of it), and what `sink`
    /// returns.
    pub fn load(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        check_specs(self, expected, Unexpected::Refuse)?;
        self.read(expected, sink)
    }

    /// [`Checkpoint::load`] of some of the tensors: what `wanted` does not name is left unread.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`], except that other tensors are none.
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
        // Words, so that every tensor lies at a multiple of its element size.
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

    /// Opens a shard: its file, and its tensors in the order of their bytes, with their places in the manifest.
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

    /// Compares the hash of the bytes of tensor `at` with the manifest's.
    fn check_hash(&self, file: &TensorFile, at: usize, found: u64) -> Result<()> {
        if found == self.manifest.locations[at].xxh3 {
            return Ok(());
        }
        let location = format!("tensor '{}'", self.manifest.specs[at].name);
        Err(CheckpointError::damaged(file.path(), location, "does not match its checksum", ADVICE))
    }

    /// The bytes of a document, which match its checksum.
    fn document_bytes(&self, entry: &DocumentEntry) -> Result<Vec<u8>> {
        let path = self.path.join(document_file(&entry.name));
        let bytes = files::read(&path)?;
        if xxh3_64(&bytes) == entry.xxh3 {
            return Ok(bytes);
        }
        Err(CheckpointError::damaged(&path, "document", "does not match its checksum", ADVICE))
    }

    /// Says of damage what to do about it. An older checkpoint that is named has been verified.
    fn with_advice(&self, error: CheckpointError) -> CheckpointError {
        let CheckpointError::Damaged { path, location, problem, advice } = error else { return error };
        let advice = match newest_intact(parent(&self.path), self.step()) {
            Ok(Some(older)) => format!(
                "use {} instead, which has been verified (a resumed run does, once this one is removed)",
                older.path.display()
            ),
            Ok(None) => {
                "no older checkpoint is whole: restore this one from a copy, or start again from the \
                         beginning"
                    .to_string()
            }
            // The damage matters more than why the others could not be looked at.
            Err(_) => advice,
        };
        CheckpointError::Damaged { path, location, problem, advice }
    }
}

/// What tensors of a checkpoint are that the caller did not name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Unexpected {
    Refuse,
    Ignore,
}

/// Names every difference between the tensors of a checkpoint and those that the run expects.
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
