//! File access with errors that name the file: writes of new files, reads at an offset, and the sync of
//! folders.
//!
//! Files are read into buffers and never memory-mapped: touching a mapped page of a file that was truncated
//! kills the process, and a mapped page may change after it was verified.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rayon::prelude::*;

use crate::error::{CheckpointError, Result};

/// Bytes per read. A multiple of every element size.
pub(crate) const PIECE_BYTES: usize = 4 << 20;

/// Writes a new file and syncs it to the disk.
pub(crate) fn write_new(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = File::create_new(path).map_err(CheckpointError::io(path, "create"))?;
    file.write_all(bytes).map_err(CheckpointError::io(path, "write"))?;
    file.sync_all().map_err(CheckpointError::io(path, "sync to the disk"))
}

/// A regular file, open for reading, and its length when it was opened.
#[derive(Debug)]
pub(crate) struct OpenFile {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl OpenFile {
    /// Opens a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        check_regular(path)?;
        let file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
        let bytes = file.metadata().map_err(CheckpointError::io(path, "open"))?.len();
        Ok(Self { path: path.to_path_buf(), file, bytes })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when the file was opened.
    pub(crate) fn len(&self) -> usize {
        self.bytes as usize
    }

    /// Reads `out.len()` bytes at offset `start`.
    ///
    /// # Errors
    /// [`CheckpointError::Shrunk`] if the file was truncated after it was opened.
    pub(crate) fn read_at(&self, start: usize, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, start as u64).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => CheckpointError::Shrunk {
                path: self.path.clone(),
                opened_bytes: self.bytes,
                now_bytes: self.file.metadata().map_or(0, |now| now.len()),
            },
            _ => CheckpointError::io(&self.path, "read")(error),
        })
    }

    /// [`OpenFile::read_at`] in pieces, on all cores.
    pub(crate) fn read_large_at(&self, start: usize, out: &mut [u8]) -> Result<()> {
        let pieces = out.par_chunks_mut(PIECE_BYTES).enumerate();
        pieces.try_for_each(|(i, piece)| self.read_at(start + i * PIECE_BYTES, piece))
    }
}

/// Reads a whole regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    check_regular(path)?;
    fs::read(path).map_err(CheckpointError::io(path, "read"))
}

/// Checked before opening, because opening a named pipe waits for a writer.
fn check_regular(path: &Path) -> Result<()> {
    let kind = fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
    if kind.is_file() {
        return Ok(());
    }
    Err(CheckpointError::folder(path, "is not a file", "name a regular file"))
}

/// Creates a folder and its parents, and syncs them so that they survive a power cut.
pub(crate) fn create_folders(path: &Path) -> Result<()> {
    if path.is_dir() || path.as_os_str().is_empty() {
        return Ok(());
    }
    let parent = path.parent().unwrap_or(Path::new(""));
    create_folders(parent)?;
    match fs::create_dir(path) {
        // Another process may have created it meanwhile.
        Err(_) if path.is_dir() => Ok(()),
        Err(e) => Err(CheckpointError::io(path, "create the folder")(e)),
        Ok(()) => sync_folder(parent),
    }
}

/// Syncs a folder, so that the names in it survive a power cut.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    let folder = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    match File::open(folder).and_then(|file| file.sync_all()) {
        // Some file systems cannot sync a folder; those order their directory updates themselves.
        Err(e) if matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(CheckpointError::io(folder, "sync the folder")),
    }
}

/// True for a name that, joined to a folder, can only be a file directly in it.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0', ':'])
}

/// True for the content of a git-lfs pointer, the small text in place of a file that was not downloaded.
pub(crate) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs")
}

/// Advice for a git-lfs pointer.
pub(crate) const LFS_ADVICE: &str = "run `git lfs pull` in that folder, or download the file itself";
