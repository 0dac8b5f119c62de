//! The checkpoint store: a folder of `step-<N>/` folders, each complete or absent.
//!
//! A step is written to `step-<N>.tmp-<pid>/` (tensors, by one or more processes; then documents, and the
//! manifest last), synced and renamed. Its content decides whether it is complete: a step without a manifest,
//! or with missing or shorter files, is skipped. A folder in which all steps are incomplete is an error, so
//! that a resume never restarts from zero by mistake.

mod hex;
mod load;
mod lock;
mod manifest;
mod manifest_json;
mod open_files;
mod pieces;
mod rank_report;
mod rank_writer;
mod read_rows;
mod step_writer;

pub use load::{Checkpoint, Others};
pub use lock::RunLock;
pub use rank_writer::RankWriter;
pub use step_writer::{Begun, StepWriter};

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use xtrain_tensor::DType;

use crate::error::{BoxError, CheckpointError, LISTED, Result};
use crate::files;
use crate::first_few::first_few;
use crate::temporary;
use crate::writers_lock::WritersLock;
use rank_writer::MAX_FILE_BYTES;

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
    /// Opens a folder, creating it if needed, and removes leftovers of ended processes. Steps that another
    /// process is writing are not touched.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be created or listed.
    pub fn open(folder: &Path) -> Result<Self> {
        files::create_folders(folder)?;
        let store = Self { folder: folder.to_path_buf() };
        store.remove_leftovers()?;
        Ok(store)
    }

    /// Writes the checkpoint of `step`, alone, and returns its folder. An existing checkpoint of that step
    /// stays if it matches its checksums and has equal documents; otherwise it is replaced. An intact one is
    /// replaced atomically, or kept if the file system cannot exchange names.
    ///
    /// `read(i)` returns the bytes of `tensors[i]`, as in [`RankWriter::write`]. `documents` are named JSON
    /// values; they must not contain values that JSON cannot hold (NaN, infinities).
    ///
    /// # Errors
    /// Those of [`CheckpointStore::begin`], [`RankWriter::write`] and [`StepWriter::finish`].
    pub fn save<B: AsRef<[u8]>>(
        &self,
        step: u64,
        tensors: &[TensorSpec],
        read: &mut dyn FnMut(usize) -> std::result::Result<B, BoxError>,
        documents: &[(String, Value)],
    ) -> Result<PathBuf> {
        match self.begin(step, tensors, documents)? {
            Begun::Exists(folder) => Ok(folder),
            Begun::Writing(step) => {
                let rows: Vec<_> = tensors.iter().map(|spec| 0..spec.rows()).collect();
                let report = step.writer().write(0, tensors, &rows, read)?;
                step.finish(&[report])
            }
        }
    }

    /// Begins to write the checkpoint of `step`, on rank 0: see [`CheckpointStore::save`], which is this with
    /// one writer. `tensors` have their full shapes. Also removes leftovers of processes that have ended
    /// since the folder was opened.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails, [`CheckpointError::Tensors`] if the step is complete with
    /// other tensors, [`CheckpointError::Locked`] if another process is writing it, and
    /// [`CheckpointError::Internal`] for repeated names.
    pub fn begin(&self, step: u64, tensors: &[TensorSpec], documents: &[(String, Value)]) -> Result<Begun> {
        self.remove_leftovers()?;
        step_writer::begin(&self.step_folder(step), MAX_FILE_BYTES, step, tensors, documents)
    }

    /// Joins the writers of a step that rank 0 has begun, by the name of its temporary folder
    /// ([`StepWriter::name`]).
    ///
    /// # Errors
    /// [`CheckpointError::Folder`] if there is no such folder here; [`CheckpointError::Locked`] if a process
    /// is removing it; [`CheckpointError::Internal`] if `name` is not the temporary name of a step.
    pub fn join(&self, name: &str) -> Result<RankWriter> {
        if temporary::temporary_target(name).and_then(step_of).is_none() || name.ends_with(".old") {
            return Err(CheckpointError::Internal(format!(
                "'{name}' is not the name of a step being written"
            )));
        }
        let folder = self.folder.join(name);
        let Some(lock) = WritersLock::join(&folder)? else {
            let problem = "rank 0 writes here, but this rank does not see the folder";
            let advice = "put train.out on a file system that all ranks share";
            return Err(CheckpointError::folder(&folder, problem, advice));
        };
        Ok(RankWriter::new(&folder, MAX_FILE_BYTES, lock))
    }

    /// The newest complete checkpoint; `None` if the folder has no steps. Skips incomplete newer ones, with a
    /// warning in the log.
    ///
    /// # Errors
    /// [`CheckpointError::Folder`] if there are steps but none is complete, with the problem of each;
    /// [`CheckpointError::Io`] if the folder cannot be listed.
    pub fn latest(&self) -> Result<Option<Checkpoint>> {
        let mut faults = Vec::new();
        for step in step_numbers(&self.folder)?.into_iter().rev() {
            let path = self.step_folder(step);
            match Checkpoint::open(&path, step) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                // Removed meanwhile by the run that writes here.
                Err(_) if !path.exists() => {}
                Err(error) => {
                    tracing::warn!("skipping an incomplete checkpoint: {error}");
                    faults.push(format!("step-{step} ({})", error.brief()));
                }
            }
        }
        if faults.is_empty() {
            return Ok(None);
        }
        let problem = format!("holds no complete checkpoint: {}", first_few(&faults, LISTED));
        let advice = "restore one of them from a copy, or remove them to start from the beginning";
        Err(CheckpointError::folder(&self.folder, problem, advice))
    }

    /// The newest intact checkpoint before `step`: the one to return to if that of `step` is damaged. Reads
    /// all its bytes to compare checksums. Skips damaged newer ones, with a warning in the log.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be listed.
    pub fn newest_intact_before(&self, step: u64) -> Result<Option<Checkpoint>> {
        newest_intact(&self.folder, step)
    }

    /// The steps of all complete checkpoints, ascending.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be listed.
    pub fn steps(&self) -> Result<Vec<u64>> {
        let mut steps = step_numbers(&self.folder)?;
        steps.retain(|&step| Checkpoint::open(&self.step_folder(step), step).is_ok());
        Ok(steps)
    }

    /// The checkpoint of `step`.
    ///
    /// # Errors
    /// [`CheckpointError::Folder`] if it does not exist, with the steps that do; [`CheckpointError::Damaged`]
    /// if it is incomplete.
    pub fn checkpoint(&self, step: u64) -> Result<Checkpoint> {
        let path = self.step_folder(step);
        if !path.exists() {
            let steps = self.steps()?;
            let newest_first: Vec<u64> = steps.iter().rev().copied().collect();
            let advice = match steps.is_empty() {
                true => "that folder has no complete checkpoint".to_string(),
                false => format!("complete checkpoints: {}", first_few(&newest_first, LISTED)),
            };
            return Err(CheckpointError::folder(&path, "does not exist", advice));
        }
        Checkpoint::open(&path, step)
    }

    /// Removes old complete checkpoints, each atomically. Keeps the newest `keep_last` (at least one), the
    /// multiples of `keep_every` (0: none) and the `protected` steps.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the folder cannot be listed or a checkpoint cannot be removed.
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

    fn remove_leftovers(&self) -> Result<()> {
        temporary::remove_leftovers(&self.folder, |target| step_of(target).is_some())
    }

    /// The folder of `step`, which need not exist.
    pub fn step_folder(&self, step: u64) -> PathBuf {
        self.folder.join(format!("step-{step}"))
    }
}

/// The newest checkpoint before step `before` that matches all its checksums.
fn newest_intact(folder: &Path, before: u64) -> Result<Option<Checkpoint>> {
    for step in step_numbers(folder)?.into_iter().rev().filter(|&step| step < before) {
        let path = folder.join(format!("step-{step}"));
        tracing::info!("verifying {}", path.display());
        match Checkpoint::open(&path, step).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint)) {
            Ok(checkpoint) => return Ok(Some(checkpoint)),
            Err(error) => tracing::warn!("skipping a damaged checkpoint: {error}"),
        }
    }
    Ok(None)
}

/// All steps that have a folder, complete or not, ascending.
fn step_numbers(folder: &Path) -> Result<Vec<u64>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        steps.extend(entry.file_name().to_str().and_then(step_of));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// `N` of the folder name `step-N`; `None` for any other spelling.
fn step_of(name: &str) -> Option<u64> {
    let step: u64 = name.strip_prefix("step-")?.parse().ok()?;
    (name == format!("step-{step}")).then_some(step)
}
