//! The lock of a run folder, which admits one writer.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{CheckpointError, Result};
use crate::files::create_folders;

/// The exclusive right to write to a run folder. It ends when this value is dropped or the process ends.
#[derive(Debug)]
pub struct RunLock {
    /// Closing the file releases the lock.
    _file: File,
}

impl RunLock {
    /// Locks `<folder>/.lock`, creating the folder if needed. Logs a warning if the file system has no locks.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`] if another process (or another lock in this one) holds it;
    /// [`CheckpointError::Io`] if the file cannot be created.
    pub fn acquire(folder: &Path) -> Result<RunLock> {
        create_folders(folder)?;
        let path = folder.join(".lock");
        let mut options = File::options();
        let opened = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = opened.map_err(CheckpointError::io(&path, "open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                // The id is for the message only, so failing to read it is no error.
                let _ = file.take(20).read_to_string(&mut pid);
                let holder = match pid.trim().parse::<u32>() {
                    Ok(pid) => format!("another run (process {pid})"),
                    Err(_) => "another run".to_string(),
                };
                return Err(CheckpointError::Locked { path: folder.to_path_buf(), holder });
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!(
                    "{}: cannot be locked ({error}); do not start a second run there",
                    folder.display()
                );
            }
        }
        let id = std::process::id();
        // Likewise for the message of other processes. A full disk must not prevent a run from starting.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{id}"));
        Ok(RunLock { _file: file })
    }
}
