//! Small files: whole reads and writes whose errors name the file, and the sync of folders.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use crate::error::{CheckpointError, Result};

/// Writes a file that does not exist yet and syncs it to the disk.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create_new(path).map_err(CheckpointError::io(path, "create"))?;
    file.write_all(bytes).map_err(CheckpointError::io(path, "write"))?;
    file.sync_all().map_err(CheckpointError::io(path, "sync to the disk"))
}

/// Reads a whole regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let kind = fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if !kind.is_file() {
        return Err(CheckpointError::folder(path, "is not a file", "name a regular file"));
    }
    fs::read(path).map_err(CheckpointError::io(path, "read"))
}

/// Syncs a folder, so that the names in it survive a power cut.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    match File::open(folder).and_then(|file| file.sync_all()) {
        // Not every file system lets a folder be synced; those order their names themselves.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(CheckpointError::io(folder, "sync the folder")),
    }
}

/// True when `name` can only mean a file directly in the folder that it is joined to.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0', ':'])
}

/// True when the bytes are the small text that git-lfs leaves in place of a file that was not downloaded.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs")
}

/// What to do about a git-lfs pointer.
pub(crate) const LFS_FIX: &str = "run `git lfs pull` in that folder, or download the file itself";
