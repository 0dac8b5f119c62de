//! A checkpoint that is written while training goes on.

use crate::error::RunError;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// A checkpoint that is complete.
#[derive(Debug)]
pub(super) struct Written {
    /// The steps before it.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// The time from the copy of the state on.
    pub took: Duration,
}

/// A thread that writes one. Dropped, it is waited for: what was begun is completed.
pub(super) struct Writing {
    step: u64,
    begun: Instant,
    thread: Option<JoinHandle<(Result<PathBuf, RunError>, Instant)>>,
}

impl Writing {
    /// Has `write` write the checkpoint of `step`, of which `begun` is the beginning, below `folder`.
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
        Ok(Writing { step, begun, thread: Some(thread) })
    }

    /// Whether [`Writing::finish`] does not wait.
    pub(super) fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// What became of it, waited for.
    pub(super) fn finish(mut self) -> Result<Written, RunError> {
        let Some(thread) = self.thread.take() else { unreachable!("it is taken here and when dropped") };
        match thread.join() {
            Ok((path, ended)) => {
                Ok(Written { step: self.step, path: path?, took: ended.duration_since(self.begun) })
            }
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if let Some(Ok((Err(error), _))) = self.thread.take().map(JoinHandle::join) {
            tracing::warn!("step {}: {error}", self.step);
        }
    }
}
