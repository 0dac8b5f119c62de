//! Read-only memory-mapped files that notice when they shrink.
//!
//! The one `unsafe` of this crate is here. Every access asks for the file's length first, because touching a page
//! past the end of a file that has been cut kills the process.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Advice, Mmap};

use crate::error::{CheckpointError, Result};

/// A file in memory, of the length that it had when it was opened.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    file: File,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // Asked before opening: opening a named pipe would wait for a writer.
        let kind = fs::metadata(path).map_err(CheckpointError::io(path, "open"))?;
        if !kind.is_file() {
            return Err(CheckpointError::folder(path, "is not a file", "name a regular file"));
        }
        let file = File::open(path).map_err(CheckpointError::io(path, "open"))?;
        // SAFETY: the map is read-only and private to this value. That the file does not shrink below the map is
        // checked in `bytes` before every access; the remaining window is between that check and the read.
        let map = unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path, "map into memory"))?;
        // Read-ahead is a wish: nothing depends on the system granting it.
        let _ = map.advise(Advice::Sequential);
        Ok(Self { path: path.to_path_buf(), file, map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when the file was opened.
    pub(crate) fn len(&self) -> usize {
        self.map.len()
    }

    /// The bytes of `range`, after making sure that the file still has them.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Result<&[u8]> {
        let now = self.file.metadata().map_err(CheckpointError::io(&self.path, "read"))?.len();
        let opened = self.map.len() as u64;
        if now < opened {
            return Err(CheckpointError::Shrunk {
                path: self.path.clone(),
                opened_bytes: opened,
                now_bytes: now,
            });
        }
        self.map.get(range.clone()).ok_or_else(|| {
            let path = self.path.display();
            CheckpointError::Internal(format!("{path}: bytes {range:?} of {opened} were asked for"))
        })
    }
}
