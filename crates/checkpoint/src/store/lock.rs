//! One writer a run folder.

use std::fs::{File, TryLockError};
use std::io::{Read, Write};
use std::path::Path;

use crate::error::{CheckpointError, Result};
use crate::files::create_folders;

/// The right to write to a run folder, held until this value or the process ends, however it ends.
#[derive(Debug)]
pub struct RunLock {
    /// The lock belongs to the open file.
    _file: File,
}

impl RunLock {
    /// Locks `<folder>/.lock`; the folder is created where it is not there. Where the file system has no locks,
    /// a warning in the log says so.
    ///
    /// # Errors
    /// [`CheckpointError::Locked`] when another process (or another lock of this one) holds it;
    /// [`CheckpointError::Io`] when the file cannot be created.
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
                // Only for the message: an unreadable id is as good as none.
                let _ = file.take(20).read_to_string(&mut pid);
                let holder = match pid.trim().parse::<u32>() {
                    Ok(pid) => format!("another run (process {pid})"),
                    Err(_) => "another run".to_string(),
                };
                return Err(CheckpointError::Locked { path: folder.to_path_buf(), holder });
            }
            Err(TryLockError::Error(error)) => {
                tracing::warn!("{}: cannot be locked ({error}); start no second run there", folder.display());
            }
        }
        let id = std::process::id();
        // Likewise only for others' messages; a full disk must not keep a run from starting to free it.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "{id}"));
        Ok(RunLock { _file: file })
    }
}
