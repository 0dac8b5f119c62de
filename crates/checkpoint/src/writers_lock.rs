//! The lock of a temporary folder that several processes write.
//!
//! Each writer holds a shared lock (`flock`) on the file `.lock` in the folder, so the folder is a leftover
//! only when the last of them has ended. The lock is on a file because network file systems lock files for
//! all hosts, but folders for one.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Result};

const FILE: &str = ".lock";

/// A writer's share of the lock. It ends when this value is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct WritersLock {
    /// Closing the file releases the share.
    _file: File,
}

impl WritersLock {
    /// Creates the lock of a folder that this process has created and locked.
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(FILE);
        let file = File::create_new(&path).map_err(CheckpointError::io(&path, "create"))?;
        Self::share(file, &path)
    }

    /// Takes a share of the lock of a folder that another process has created. `None` if there is no
    /// such folder.
    pub(crate) fn join(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(FILE);
        match File::open(&path) {
            Ok(file) => Self::share(file, &path).map(Some),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(CheckpointError::io(&path, "open")(e)),
        }
    }

    fn share(file: File, path: &Path) -> Result<Self> {
        match file.try_lock_shared() {
            // On a file system without locks, the process id in the folder's name identifies leftovers.
            Ok(()) | Err(TryLockError::Error(_)) => Ok(Self { _file: file }),
            Err(TryLockError::WouldBlock) => {
                let holder = "a process that is removing it".to_string();
                Err(CheckpointError::Locked { path: path.to_path_buf(), holder })
            }
        }
    }
}

/// Removes the file of the lock from a folder that is complete. A failure leaves an empty file that nothing
/// reads.
pub(crate) fn remove_lock_file(folder: &Path) {
    let path = folder.join(FILE);
    if let Err(error) = fs::remove_file(&path) {
        tracing::debug!("{}: cannot remove: {error}", path.display());
    }
}

/// Exclusive right to remove a folder that may have writers.
#[derive(Debug)]
pub(crate) enum Removal {
    /// No writer is alive, as far as locks show. Holds the lock, if there is one.
    Allowed(Option<File>),
    /// A writer is alive, or may be.
    Refused,
}

impl Removal {
    /// Takes the exclusive lock of `folder`.
    pub(crate) fn lock(folder: &Path) -> Removal {
        let path: PathBuf = folder.join(FILE);
        let file = match File::options().read(true).write(true).open(&path) {
            Ok(file) => file,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Removal::Allowed(None);
            }
            Err(_) => return Removal::Refused,
        };
        match file.try_lock() {
            Ok(()) => Removal::Allowed(Some(file)),
            Err(TryLockError::WouldBlock) => Removal::Refused,
            Err(TryLockError::Error(_)) => Removal::Allowed(None),
        }
    }
}
