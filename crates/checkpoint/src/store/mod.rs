//! Checkpoints: a folder of `step-<N>/` folders, each complete or absent.
//!
//! A step is written as `step-<N>.tmp-<pid>/` (tensors, documents, and the manifest last), synced and renamed. What
//! counts is the content: a step whose manifest is missing, or names files that are not there in full, is passed over,
//! but never taken for none.

mod load;
mod lock;
mod manifest;
mod save;

pub use load::Checkpoint;
pub use lock::RunLock;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xtrain_tensor::DType;

use crate::error::{BoxError, CheckpointError, Result, comma_separated};
use crate::files;
use crate::temporary;

/// A shard takes tensors up to this size.
const MAX_SHARD_BYTES: usize = 4 << 30;

/// Name, element type and shape of a tensor of the training state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name, unique in the checkpoint.
    pub name: String,
    /// The type of its elements.
    pub dtype: DType,
    /// Its shape; empty for a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Bytes that the tensor takes; `None` where that overflows.
    pub(crate) fn bytes(&self) -> Option<usize> {
        let numel = self.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
        numel.checked_mul(self.dtype.bits())?;
        Some(self.dtype.bytes(numel))
    }
}

impl std::fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// The folder that holds a run's checkpoints.
#[derive(Debug)]
pub struct CheckpointStore {
    folder: PathBuf,
}

impl CheckpointStore {
    /// Opens a folder, which is created where it is not there. What processes that have ended left half-written is
    /// removed; what another one is writing now is not touched.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when the folder cannot be created or listed.
    pub fn open(folder: &Path) -> Result<Self> {
        files::create_folders(folder)?;
        temporary::sweep(folder, |target| step_of(target).is_some())?;
        Ok(Self { folder: folder.to_path_buf() })
    }

    /// Writes the checkpoint of `step` and returns its folder. A step that is there already, matches all its
    /// checksums and has the same documents is left as it is; any other is replaced. One that is intact is replaced in
    /// one step, or stays where the file system has no such step.
    ///
    /// `read(i)` returns the bytes (little-endian, row-major; packed formats as they are packed) of `tensors[i]`; it
    /// is called once for each, not in order, and one tensor is in memory at a time. `documents` are named JSON
    /// values; what JSON cannot hold (NaN, infinities) must not be in them.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when the disk refuses (nothing is left behind), [`CheckpointError::Tensors`] when the
    /// step is complete with other tensors, [`CheckpointError::Locked`] when it is being written by someone else,
    /// what `read` returns, and [`CheckpointError::Internal`] for repeated names or bytes of another number.
    pub fn save<B: AsRef<[u8]>>(
        &self,
        step: u64,
        tensors: &[TensorSpec],
        read: &mut dyn FnMut(usize) -> std::result::Result<B, BoxError>,
        documents: &[(String, Value)],
    ) -> Result<PathBuf> {
        save::save(&self.step_folder(step), MAX_SHARD_BYTES, step, tensors, read, documents)
    }

    /// The newest complete checkpoint; `None` where there is no step at all. Newer ones that are not complete are
    /// passed over with a warning in the log.
    ///
    /// # Errors
    /// [`CheckpointError::Folder`] when there are steps and none of them is complete, with what is wrong with each;
    /// [`CheckpointError::Io`] when the folder cannot be listed.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut faults = Vec::new();
        for step in step_numbers(&self.folder)?.into_iter().rev() {
            let path = self.step_folder(step);
            match Checkpoint::open(&path, step) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                // Removed meanwhile, by the run that writes here.
                Err(_) if !path.exists() => {}
                Err(error) => {
                    tracing::warn!("passing over an incomplete checkpoint: {error}");
                    faults.push(format!("step-{step} ({})", error.brief()));
                }
            }
        }
        if faults.is_empty() {
            return Ok(None);
        }
        let problem = format!("holds no complete checkpoint: {}", comma_separated(&faults));
        let advice = "restore one of them from a copy, or remove them to start again from the beginning";
        Err(CheckpointError::folder(&self.folder, problem, advice))
    }

    /// The newest checkpoint before `step` of which every byte matches its checksum: what to go back to when that of
    /// `step` is damaged. Reads it whole; newer ones that are not intact are passed over with a warning in the log.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when the folder cannot be listed.
    pub fn newest_intact_before(&self, step: u64) -> Result<Option<Checkpoint>> {
        newest_intact(&self.folder, step)
    }

    /// The steps of all complete checkpoints, ascending.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when the folder cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = step_numbers(&self.folder)?;
        steps.retain(|&step| Checkpoint::open(&self.step_folder(step), step).is_ok());
        Ok(steps)
    }

    /// The checkpoint of that step.
    ///
    /// # Errors
    /// [`CheckpointError::Folder`] when there is none, naming those that there are; [`CheckpointError::Damaged`]
    /// when it is not complete.
    pub fn checkpoint(&self, step: u64) -> Result<Checkpoint> {
        let path = self.step_folder(step);
        if !path.exists() {
            let steps = self.steps()?;
            let newest_first: Vec<u64> = steps.iter().rev().copied().collect();
            let advice = match steps.is_empty() {
                true => "and there is no complete checkpoint in that folder".to_string(),
                false => format!("complete checkpoints: {}", comma_separated(&newest_first)),
            };
            return Err(CheckpointError::folder(&path, "does not exist", advice));
        }
        Checkpoint::open(&path, step)
    }

    /// Removes old checkpoints: all complete ones but the newest `keep_last` (at least one is kept), the multiples of
    /// `keep_every` (0: none) and the `protected` steps. Each is there whole or gone at every moment.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] when the folder cannot be listed or a checkpoint not be removed.
    pub fn retain(&self, keep_last: usize, keep_every: u64, protected: &[u64]) -> Result<()> {
        let steps = self.steps()?;
        for &step in &steps[..steps.len().saturating_sub(keep_last.max(1))] {
            let milestone = keep_every > 0 && step.is_multiple_of(keep_every);
            if !milestone && !protected.contains(&step) {
                temporary::remove_atomically(&self.step_folder(step))?;
            }
        }
        Ok(())
    }

    fn step_folder(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }
}

/// The newest checkpoint of a folder before that of `step` that matches all its checksums.
fn newest_intact(folder: &Path, before: u64) -> Result<Option<Checkpoint>> {
    for step in step_numbers(folder)?.into_iter().rev().filter(|&step| step < before) {
        let path = folder.join(format!("step-{step}"));
        tracing::info!("verifying {}", path.display());
        match Checkpoint::open(&path, step).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint)) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => tracing::warn!("passing over a damaged checkpoint: {error}"),
        }
    }
    Ok(None)
}

/// The steps that have a folder, complete or not, ascending.
fn step_numbers(folder: &Path) -> Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        steps.extend(entry.file_name().to_str().and_then(step_of));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// `N` of `step-N`, in its one spelling.
fn step_of(name: &str) -> Option<u64> {
    let step: u64 = name.strip_prefix("step-")?.parse().ok()?;
    (name == format!("step-{step}")).then_some(step)
}
