//! The check that all ranks see one run folder.

use super::Crew;
use crate::error::RunError;
use crate::folder::RunFolder;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// Time for a network file system to show a new file on other nodes.
const PATIENCE: Duration = Duration::from_secs(10);

impl Crew {
    /// Checks that the run folder, which exists on rank 0, is the same on all ranks.
    ///
    /// # Errors
    /// A rank does not see a file that rank 0 writes there.
    pub(crate) fn check_shared(&self, folder: &RunFolder) -> Result<(), RunError> {
        if self.is_alone() {
            return Ok(());
        }
        let mut written: Option<NamedTempFile> = None;
        let name = self.decide(|| {
            // A run that is finished may lie in a folder that only can be read; it is only read then.
            written = tempfile::Builder::new().prefix(".shared-").tempfile_in(folder.path()).ok();
            let name = written.as_ref().and_then(|file| file.path().file_name());
            Ok(name.map(|name| name.to_string_lossy().into_owned()))
        })?;
        let Some(name) = name else { return Ok(()) };
        let path = folder.path().join(name);
        let since = Instant::now();
        while fs::metadata(&path).is_err() {
            if since.elapsed() > PATIENCE {
                return Err(RunError::Refused(format!(
                    "{} is not the run folder of rank 0, but another one of the same name; all nodes must share it: choose one on a \
                     shared file system with --out FOLDER",
                    folder.path().display()
                )));
            }
            thread::sleep(Duration::from_millis(50));
        }
        // Rank 0 removes it when all have seen it.
        self.barrier()
    }
}
