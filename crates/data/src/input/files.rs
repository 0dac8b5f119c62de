//! Input files, with what identifies their content.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::kinds::{Compression, Format, split_compression};
use crate::error::{DataError, Result};
use crate::files;

/// An input file, with the size and time that identify its content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputFile {
    /// Path, as the user gave it.
    pub path: PathBuf,
    /// Format, by the extension.
    pub format: Format,
    /// Compression, by the extension.
    pub compression: Compression,
    /// Size on the disk.
    pub bytes: u64,
    /// Modification time in nanoseconds since 1970; 0 if the system does not report it.
    pub modified_ns: u64,
}

impl InputFile {
    /// The file at `path`, which is read as this kind.
    pub(crate) fn of_kind(path: &Path, format: Format, compression: Compression) -> Result<InputFile> {
        let meta = fs::metadata(path).map_err(DataError::io(path, "open the input"))?;
        if !meta.is_file() && !meta.is_dir() {
            return Err(files::not_regular(path));
        }
        let (bytes, modified_ns) = (meta.len(), modified_ns(&meta));
        Ok(InputFile { path: path.to_path_buf(), format, compression, bytes, modified_ns })
    }
}

fn modified_ns(meta: &fs::Metadata) -> u64 {
    let modified = meta.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    modified.map_or(0, |since| since.as_nanos() as u64)
}

/// Bytes of English text in a byte of compressed text.
const COMPRESSION: u64 = 3;

impl InputFile {
    /// Bytes of text that it probably holds, by its size: compressed text is three times as long.
    pub fn estimated_text_bytes(&self) -> u64 {
        match (self.format, self.compression) {
            (Format::Text | Format::JsonLines | Format::Json, Compression::None) => self.bytes,
            _ => self.bytes.saturating_mul(COMPRESSION),
        }
    }

    /// The place of a row, counted from 1, for messages.
    pub(crate) fn location_of_row(&self, row: u64) -> String {
        let noun = if self.format == Format::JsonLines { "line" } else { "row" };
        format!("{noun} {row}")
    }

    /// The resolved path without the extension of a compression: one path for a file and its compressed copy.
    /// `None` if the path cannot be resolved.
    pub fn uncompressed_path(&self) -> Option<PathBuf> {
        let path = self.path.canonicalize().ok()?;
        Some(path.with_file_name(split_compression(&path).0))
    }

    /// Fails if the file changed after it was listed, because the text read may mix old and new content.
    pub(crate) fn refuse_changed(&self) -> Result<()> {
        let now = fs::metadata(&self.path).map_err(DataError::io(&self.path, "read the input"))?;
        let problem = if now.len() != self.bytes {
            format!("the file changed from {} to {} bytes while it was read", self.bytes, now.len())
        } else if modified_ns(&now) != self.modified_ns {
            "the file was written to while it was read".to_owned()
        } else {
            return Ok(());
        };
        let advice = "wait until it is complete and start again in a new folder";
        Err(DataError::input(&self.path, format!("byte {}", self.bytes.min(now.len())), problem, advice))
    }
}
