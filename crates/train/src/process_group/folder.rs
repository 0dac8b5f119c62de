//! The check that all ranks see one run folder.

use super::ProcessGroup;
use crate::error::RunError;
use crate::folder::{RunFolder, SHARED};
use std::fs;
use std::io::{self, Write};
use std::thread;
use std::time::{Duration, Instant, SystemTime};
use xtrain_checkpoint::{Temporary, remove_leftovers};

/// Time for a network file system to show a new file on other nodes.
const PATIENCE: Duration = Duration::from_secs(10);

impl ProcessGroup {
    /// Checks that the run folder, which exists on rank 0, is the same on all ranks: each must see what rank
    /// 0 writes there.
    ///
    /// # Errors
    /// A rank does not see it.
    pub(crate) fn check_shared(&self, folder: &RunFolder) -> Result<(), RunError> {
        if self.is_alone() {
            return Ok(());
        }
        let mut written = None;
        let (name, text) = self.decide(|| {
            let text = unique_text();
            // A folder that can only be read holds a run that is finished, and is only read.
            written = write(folder, &text).ok();
            let name = written.as_ref().and_then(|file| file.path().file_name());
            Ok((name.map(|name| name.to_string_lossy().into_owned()), text))
        })?;
        let Some(name) = name else { return Ok(()) };
        let path = folder.path().join(name);
        let since = Instant::now();
        loop {
            let missing = |error: &io::Error| {
                matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::StaleNetworkFileHandle)
            };
            match fs::read_to_string(&path) {
                Ok(found) if found == text => break,
                Err(error) if !missing(&error) => return Err(RunError::io(&path, "read")(error)),
                _ => {}
            }
            if since.elapsed() > PATIENCE {
                return Err(RunError::Refused(format!(
                    "{} is not the run folder of rank 0, but another one of the same name; all nodes must share \
                     it: choose one on a shared file system with --out FOLDER",
                    folder.path().display()
                )));
            }
            thread::sleep(Duration::from_millis(50));
        }
        // Rank 0 removes it when all have seen it.
        self.barrier()
    }
}

fn write(folder: &RunFolder, text: &str) -> Result<Temporary, RunError> {
    remove_leftovers(folder.path(), |target| target == SHARED)?;
    let file = Temporary::file(&folder.path().join(SHARED))?;
    let written = file.handle().write_all(text.as_bytes());
    // The file stays open, and a network file system may show its content to other nodes only after a sync.
    written.and_then(|()| file.handle().sync_all()).map_err(RunError::io(file.path(), "write"))?;
    Ok(file)
}

/// A text that no other run writes.
fn unique_text() -> String {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    format!("{} {}", std::process::id(), now.as_nanos())
}
