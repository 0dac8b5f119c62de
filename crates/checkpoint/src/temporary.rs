//! Temporary files and folders, `<name>.tmp-<pid>`, which are renamed to `<name>` when they are complete. To
//! remove a file or folder atomically, it is first renamed to `<name>.tmp-<pid>.old`.
//!
//! The writer holds a lock (`flock`) on its temporary; the system releases it when the process ends, for
//! whatever reason. A temporary whose lock is free is therefore a leftover. Process ids cannot tell this:
//! they are reused, and have no meaning in a folder that containers or hosts share.
//! Invariant: a file or folder named `*.tmp-<pid>` or `*.tmp-<pid>.old` may be deleted once its writer has
//! ended.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{CheckpointError, Result};
use crate::files::sync_folder;
use crate::writers_lock::Removal;

/// Attempts to create a temporary.
const ATTEMPTS: usize = 100;

/// Time between two attempts while another process holds the lock.
const PAUSE: Duration = Duration::from_millis(5);

/// Paths that this process is writing. Where the file system has no locks, they tell its temporaries from
/// leftovers.
static OPEN_TEMPORARIES: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// A file or folder under its temporary name. Dropping it removes the file or folder, unless it was
/// published.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    kind: TemporaryKind,
    /// Holds the lock while this value lives.
    handle: File,
    /// Drop removes `path`. False once the file or folder has its final name.
    remove_on_drop: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TemporaryKind {
    File,
    /// A file that only its owner may read and write, from its first moment.
    PrivateFile,
    Folder,
}

impl Temporary {
    /// Creates the empty folder `<target>.tmp-<pid>`.
    pub(crate) fn folder(target: &Path) -> Result<Self> {
        Self::create(target, TemporaryKind::Folder)
    }

    /// Creates the empty file `<target>.tmp-<pid>`.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; [`CheckpointError::Locked`] if another writer of `target` is alive, also in
    /// this process.
    pub fn file(target: &Path) -> Result<Self> {
        Self::create(target, TemporaryKind::File)
    }

    /// As [`Temporary::file`], with mode 600.
    pub(crate) fn private_file(target: &Path) -> Result<Self> {
        Self::create(target, TemporaryKind::PrivateFile)
    }

    /// The temporary name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file (or folder) itself.
    pub fn handle(&self) -> &File {
        &self.handle
    }

    /// Syncs, renames to `target` and syncs the parent folder. The caller has synced the files inside.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]. The temporary is then removed.
    pub fn publish(mut self, target: &Path) -> Result<()> {
        self.sync()?;
        fs::rename(&self.path, target).map_err(CheckpointError::io(target, "rename into place"))?;
        self.remove_on_drop = false;
        sync_folder(parent(target))
    }

    /// Exchanges the names of this and `target` atomically, so that a complete one has the final name at
    /// every moment. Dropping this value then removes the old one. Returns false, without an effect, if the
    /// file system cannot exchange names.
    pub(crate) fn exchange(&mut self, target: &Path) -> Result<bool> {
        self.sync()?;
        match renameat_with(CWD, &self.path, CWD, target, RenameFlags::EXCHANGE) {
            Ok(()) => {}
            // Some sandboxes return PERM for a system call that they do not know.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP | Errno::PERM) => return Ok(false),
            Err(e) => return Err(CheckpointError::io(target, "exchange")(e.into())),
        }
        // The old one stays until the rename is on disk: a power cut could restore its name, but not its
        // content.
        self.remove_on_drop = false;
        sync_folder(parent(target))?;
        self.remove_on_drop = true;
        Ok(true)
    }

    /// Syncs the file, or the names in the folder.
    fn sync(&self) -> Result<()> {
        match self.kind {
            TemporaryKind::File | TemporaryKind::PrivateFile => {
                self.handle.sync_all().map_err(CheckpointError::io(&self.path, "sync to the disk"))
            }
            TemporaryKind::Folder => sync_folder(&self.path),
        }
    }

    fn create(target: &Path, kind: TemporaryKind) -> Result<Self> {
        let path = temporary_path(target);
        let is_in_use = || {
            let holder = "another process, which is writing it".to_string();
            Err(CheckpointError::Locked { path: target.to_path_buf(), holder })
        };
        if open_temporaries().contains(&path) {
            return is_in_use();
        }
        // A process that removes leftovers may lock the new temporary first, and remove it: try again. It
        // holds the lock for a moment, a writer for longer.
        let mut is_busy = false;
        for _ in 0..ATTEMPTS {
            if std::mem::take(&mut is_busy) {
                thread::sleep(PAUSE);
            }
            let created = match kind {
                TemporaryKind::Folder => fs::create_dir(&path),
                TemporaryKind::File => File::create_new(&path).map(drop),
                TemporaryKind::PrivateFile => {
                    File::options().write(true).create_new(true).mode(0o600).open(&path).map(drop)
                }
            };
            match created {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => match claim(&path) {
                    // A leftover of an earlier process with the same id.
                    Claim::Ours(_) => {
                        remove(&path)?;
                        continue;
                    }
                    Claim::Busy => {
                        is_busy = true;
                        continue;
                    }
                    Claim::Gone => continue,
                },
                Err(e) => return Err(CheckpointError::io(&path, "create")(e)),
            }
            let opened = match kind {
                TemporaryKind::Folder => File::open(&path),
                TemporaryKind::File | TemporaryKind::PrivateFile => File::options().write(true).open(&path),
            };
            let handle = match opened {
                Ok(handle) => handle,
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(CheckpointError::io(&path, "open")(e)),
            };
            match handle.try_lock() {
                Err(TryLockError::WouldBlock) => {
                    is_busy = true;
                    continue;
                }
                // On a file system without locks, the process id identifies leftovers.
                Ok(()) | Err(TryLockError::Error(_)) => {}
            }
            if path.exists() {
                open_temporaries().push(path.clone());
                return Ok(Self { path, kind, handle, remove_on_drop: true });
            }
        }
        if is_busy {
            return is_in_use();
        }
        Err(CheckpointError::folder(&path, "keeps being removed by another process", "stop that process"))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.remove_on_drop
            && let Err(error) = remove(&self.path)
        {
            tracing::warn!("{error}");
        }
        open_temporaries().retain(|path| *path != self.path);
    }
}

/// Removes leftovers of dead processes from `folder`: temporaries of those targets that `is_target` accepts.
///
/// # Errors
/// [`CheckpointError::Io`] if the folder cannot be listed. A leftover that cannot be removed stays.
pub fn remove_leftovers(folder: &Path, is_target: impl Fn(&str) -> bool) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(CheckpointError::io(folder, "list"))? {
        let entry = entry.map_err(CheckpointError::io(folder, "list"))?;
        let name = entry.file_name();
        let Some((target, _)) = name.to_str().and_then(split_temporary_name) else { continue };
        if !is_target(target) {
            continue;
        }
        if let Claim::Ours(_lock) = claim(&entry.path()) {
            tracing::debug!("removing {}, a leftover of a process that has ended", entry.path().display());
            // A reader may lack the permission to write here; the leftover then stays.
            if let Err(error) = remove(&entry.path()) {
                tracing::warn!("{error}");
            }
        }
    }
    Ok(())
}

/// Removes `path` atomically: renames it to a temporary name, then deletes that. `path` is complete or
/// absent.
pub(crate) fn remove_atomically(path: &Path) -> Result<()> {
    // The plain temporary name may belong to a successor of `path` that is being written.
    let mut old = temporary_path(path).into_os_string();
    old.push(".old");
    let old = PathBuf::from(old);
    remove(&old)?;
    fs::rename(path, &old).map_err(CheckpointError::io(path, "rename for removal"))?;
    sync_folder(parent(path))?;
    remove(&old)
}

/// Removes a file or folder. One that does not exist is no error.
pub(crate) fn remove(path: &Path) -> Result<()> {
    let kind = match fs::symlink_metadata(path) {
        Ok(kind) => kind,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(CheckpointError::io(path, "remove")(e)),
    };
    let removed = if kind.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(CheckpointError::io(path, "remove")),
    }
}

/// The folder that holds `path`.
pub(crate) fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The temporary name of `path`: `<path>.tmp-<pid>`.
pub(crate) fn temporary_path(path: &Path) -> PathBuf {
    with_suffix(path, "tmp")
}

/// `<path>.<suffix>-<pid>`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{suffix}-{}", std::process::id()));
    path.with_file_name(name)
}

/// The target of a temporary name: `step-5` of `step-5.tmp-123`. `None` for any other name.
pub fn temporary_target(name: &str) -> Option<&str> {
    split_temporary_name(name).map(|(target, _)| target)
}

/// Target and process id of a temporary name: `("step-5", 123)` for `step-5.tmp-123` and
/// `step-5.tmp-123.old`.
fn split_temporary_name(name: &str) -> Option<(&str, u32)> {
    let (target, pid) = name.strip_suffix(".old").unwrap_or(name).rsplit_once(".tmp-")?;
    Some((target, pid.parse().ok()?))
}

/// Ownership of an existing temporary.
enum Claim {
    /// Its writers have ended. Holds the locks, if the file system has locks.
    Ours([Option<File>; 2]),
    /// A writer is alive, or may be.
    Busy,
    /// It no longer exists.
    Gone,
}

/// Tries to take over a temporary that another process created.
fn claim(path: &Path) -> Claim {
    let handle = match File::open(path) {
        Ok(handle) => handle,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Claim::Gone,
        Err(_) => return Claim::Busy,
    };
    let lock = match handle.try_lock() {
        Ok(()) => Some(handle),
        Err(TryLockError::Error(_)) if is_dead(path) => None,
        Err(TryLockError::WouldBlock | TryLockError::Error(_)) => return Claim::Busy,
    };
    match Removal::lock(path) {
        Removal::Allowed(writers) => Claim::Ours([lock, writers]),
        Removal::Refused => Claim::Busy,
    }
}

/// For file systems without locks: true if the process whose id is in the name has surely ended.
fn is_dead(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some((_, pid)) = name.and_then(split_temporary_name) else { return false };
    if pid == std::process::id() {
        return !open_temporaries().iter().any(|living| living == path);
    }
    let processes = Path::new("/proc");
    processes.join("self").exists() && !processes.join(pid.to_string()).exists()
}

fn open_temporaries() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    OPEN_TEMPORARIES.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_dropped_temporary_leaves_nothing_and_a_published_one_leaves_the_target() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-1");
        drop(Temporary::folder(&target).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        Temporary::folder(&target).unwrap().publish(&target).unwrap();
        assert!(target.is_dir());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn removing_leftovers_disturbs_no_one_who_begins_to_write() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-1");
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_done.load(Ordering::Relaxed) {
                        remove_leftovers(dir.path(), |_| true).unwrap();
                    }
                });
            }
            let failed = (0..500).find_map(|_| Temporary::folder(&target).err());
            is_done.store(true, Ordering::Relaxed);
            assert!(failed.is_none(), "{failed:?}");
        });
    }

    #[test]
    fn an_exchange_publishes_the_new_folder_and_removes_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-1");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("old"), b"x").unwrap();
        let mut temporary = Temporary::folder(&target).unwrap();
        fs::write(temporary.path().join("new"), b"x").unwrap();
        if !temporary.exchange(&target).unwrap() {
            assert!(target.join("old").exists(), "without support for the exchange nothing changes");
            return;
        }
        assert!(target.join("new").exists() && temporary.path().join("old").exists());
        drop(temporary);
        assert!(target.join("new").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn removing_a_target_spares_its_successor_that_is_being_written() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("step-1");
        fs::create_dir(&target).unwrap();
        let temporary = Temporary::folder(&target).unwrap();
        remove_atomically(&target).unwrap();
        assert!(!target.exists());
        temporary.publish(&target).unwrap();
        assert!(target.is_dir());
    }

    #[test]
    fn a_sweep_spares_temporaries_that_are_being_written_and_removes_leftovers() {
        let dir = tempfile::tempdir().unwrap();
        let alive = Temporary::folder(&dir.path().join("a")).unwrap();
        let dead = dir.path().join("a.tmp-1");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join("x"), b"x").unwrap();
        let other = dir.path().join("b.tmp-1");
        fs::write(&other, b"x").unwrap();
        remove_leftovers(dir.path(), |name| name == "a").unwrap();
        assert!(alive.path().exists() && !dead.exists() && other.exists());
    }

    #[test]
    fn two_writers_of_one_target_do_not_share_a_temporary() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a");
        let _first = Temporary::folder(&target).unwrap();
        assert!(matches!(Temporary::folder(&target), Err(CheckpointError::Locked { .. })));
    }

    #[test]
    fn a_leftover_of_an_earlier_process_with_the_same_id_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("a");
        fs::create_dir(temporary_path(&target)).unwrap();
        fs::write(temporary_path(&target).join("old"), b"x").unwrap();
        let temporary = Temporary::folder(&target).unwrap();
        assert_eq!(fs::read_dir(temporary.path()).unwrap().count(), 0);
    }
}
