//! Reading one checkpoint: every byte that is handed over has matched its checksum.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::manifest::{MANIFEST_FILE, Manifest, document_file, stored};
use super::{TensorSpec, newest_complete};
use crate::aside::parent;
use crate::error::{BoxError, CheckpointError, Result, listed};
use crate::files;
use crate::tensor_file::TensorFile;

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
            let what = format!("is of step {}", manifest.step);
            let fix = "the folder was renamed: give it its old name back";
            return Err(CheckpointError::damaged(&manifest_path, "manifest", what, fix));
        }
        let documents = manifest.documents.iter().map(|d| (document_file(&d.name), d.bytes));
        let shards = manifest.shards.iter().map(|shard| (shard.file.clone(), shard.bytes));
        for (file, bytes) in shards.chain(documents) {
            let file = path.join(file);
            let found = fs::metadata(&file).map_err(CheckpointError::io(&file, "open"))?;
            if !found.is_file() || found.len() != bytes {
                let what = format!("has {} bytes, and the manifest says {bytes}", found.len());
                let fix = "the checkpoint is not complete: use another one";
                return Err(CheckpointError::damaged(&file, "length", what, fix));
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

    /// The document of that name, after its checksum has matched.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] when there is none of that name, or it has been changed.
    pub fn document(&self, name: &str) -> Result<Value> {
        let path = self.path.join(document_file(name));
        let bad = |what: String| {
            CheckpointError::damaged(&path, format!("document '{name}'"), what, self.use_instead())
        };
        let Some(entry) = self.manifest.documents.iter().find(|entry| entry.name == name) else {
            let names: Vec<&str> = self.manifest.documents.iter().map(|entry| entry.name.as_str()).collect();
            return Err(bad(format!("is not in this checkpoint, which has: {}", listed(&names))));
        };
        let bytes = files::read(&path)?;
        if xxh3_64(&bytes) != entry.xxh3 {
            return Err(bad("does not match its checksum".to_string()));
        }
        serde_json::from_slice(&bytes).map_err(|e| bad(format!("is not JSON: {e}")))
    }

    /// Calls `sink(i, bytes)` once for each of `expected`, in the order of the files, with bytes that have matched
    /// their checksum and lie at a multiple of the element size. `expected` must be exactly what was saved, in any
    /// order.
    ///
    /// # Errors
    /// Before the first call: [`CheckpointError::Tensors`] names what is missing, unexpected, or of another type or
    /// shape. During the calls: [`CheckpointError::Damaged`] names the tensor, the file and the checkpoint to use
    /// instead (what was handed over until then is good, but not all of it), and what `sink` returns.
    pub fn load(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        check_specs(self, expected, Others::AreErrors)?;
        self.read(expected, sink)
    }

    /// [`Checkpoint::load`] of some of the tensors: what `wanted` does not name is left unread.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load`], except that other tensors are none.
    pub fn load_some(
        &self,
        wanted: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        check_specs(self, wanted, Others::AreLeft)?;
        self.read(wanted, sink)
    }

    fn read(
        &self,
        expected: &[TensorSpec],
        sink: &mut dyn FnMut(usize, &[u8]) -> std::result::Result<(), BoxError>,
    ) -> Result<()> {
        let index: HashMap<&str, usize> =
            expected.iter().enumerate().map(|(i, spec)| (spec.name.as_str(), i)).collect();
        for (shard, entry) in self.manifest.shards.iter().enumerate() {
            let path = self.path.join(&entry.file);
            let bad = |what: String| CheckpointError::damaged(&path, "content", what, self.use_instead());
            let file = TensorFile::open(&path).map_err(|error| match error {
                CheckpointError::Damaged { place, what, .. } => bad(format!("{place}: {what}")),
                other => other,
            })?;
            let members = self.manifest.specs.iter().zip(&self.manifest.places);
            let mut members: Vec<_> = members.filter(|(_, place)| place.shard == shard).collect();
            members.sort_by_key(|(spec, _)| file.tensor(&spec.name).map(|tensor| tensor.range.start));
            for (spec, place) in members {
                let name = &spec.name;
                let Some(&i) = index.get(name.as_str()) else { continue };
                let tensor =
                    file.tensor(name).filter(|tensor| (tensor.dtype, tensor.shape.clone()) == stored(spec));
                let Some(tensor) = tensor else {
                    return Err(bad(format!("tensor '{name}' {spec} is not in it as the manifest says")));
                };
                let mut hash = Xxh3::new();
                file.chunks(tensor.range.clone(), |bytes| {
                    hash.update(bytes);
                    Ok(())
                })?;
                if hash.digest() != place.xxh3 {
                    return Err(bad(format!("tensor '{name}' does not match its checksum")));
                }
                sink(i, file.bytes(tensor)?).map_err(CheckpointError::Caller)?;
            }
        }
        Ok(())
    }

    /// What to do when this checkpoint cannot be used.
    fn use_instead(&self) -> String {
        match newest_complete(parent(&self.path), Some(self.step())) {
            Ok(Some(older)) => {
                format!("use {} instead, the newest complete one before it", older.path.display())
            }
            _ => "there is no older complete checkpoint: start again from the beginning".to_string(),
        }
    }
}

/// What tensors of a checkpoint are that the caller did not name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Others {
    AreErrors,
    AreLeft,
}

/// Names every difference between the tensors of a checkpoint and those that the run expects.
pub(super) fn check_specs(checkpoint: &Checkpoint, expected: &[TensorSpec], others: Others) -> Result<()> {
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
        |spec: &&TensorSpec| others == Others::AreErrors && !wanted.contains_key(spec.name.as_str());
    let unexpected = checkpoint.tensors().iter().filter(is_other);
    let unexpected: Vec<String> = unexpected.map(|spec| format!("'{}'", spec.name)).collect();
    let kinds = [("missing", missing), ("not in this run", unexpected), ("different", differing)];
    let found: Vec<String> = kinds
        .iter()
        .filter(|(_, names)| !names.is_empty())
        .map(|(kind, names)| format!("{} tensors are {kind} ({})", names.len(), listed(names)))
        .collect();
    if found.is_empty() {
        return Ok(());
    }
    let fix = "resume with the model, precision and optimizer that it was saved with, or start a new run";
    Err(CheckpointError::tensors(&checkpoint.path, found.join("; "), fix))
}
