//! A thread that writes a checkpoint while training continues.

use crate::error::RunError;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// A complete checkpoint.
#[derive(Debug)]
pub(super) struct WrittenCheckpoint {
    /// Number of steps before it.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// Time from the copy of the state to the last write.
    pub took: Duration,
}

/// A save in progress. Dropping it waits for its thread, so the checkpoint is completed.
pub(super) struct BackgroundSave {
    step: u64,
    begun: Instant,
    thread: Option<JoinHandle<(Result<PathBuf, RunError>, Instant)>>,
}

impl BackgroundSave {
    /// Starts a thread that runs `write` for the checkpoint of `step`; `begun` is when the save began,
    /// `folder` names it in errors.
    pub(super) fn start(
        step: u64,
        begun: Instant,
        folder: &Path,
        write: impl FnOnce() -> Result<PathBuf, RunError> + Send + 'static,
    ) -> Result<Self, RunError> {
        let thread = Builder::new().name(format!("save {step}")).spawn(|| {
            let written = write();
            (written, Instant::now())
        });
        let thread = thread.map_err(RunError::io(folder, "start a thread that writes"))?;
        Ok(BackgroundSave { step, begun, thread: Some(thread) })
    }

    /// True if [`BackgroundSave::finish`] would not wait.
    pub(super) fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the thread and returns the checkpoint or the error.
    pub(super) fn finish(mut self) -> Result<WrittenCheckpoint, RunError> {
        let Some(thread) = self.thread.take() else { unreachable!("it is taken here and when dropped") };
        match thread.join() {
            Ok((path, ended)) => {
                Ok(WrittenCheckpoint { step: self.step, path: path?, took: ended.duration_since(self.begun) })
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for BackgroundSave {
    fn drop(&mut self) {
        if let Some(Ok((Err(error), _))) = self.thread.take().map(JoinHandle::join) {
            tracing::warn!("step {}: {error}", self.step);
        }
    }
}
