//! Reads small files that a user names, and gives advice about errors of the operating system.

use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

pub use xtrain_checkpoint::advice;

/// Opens a regular file. A folder is an error, and so is a device or a named pipe, which may have no end or
/// block the reader.
pub fn open(path: &Path) -> Result<File> {
    let kind = fs::metadata(path)?;
    match () {
        () if kind.is_file() => File::open(path),
        () if kind.is_dir() => Err(ErrorKind::IsADirectory.into()),
        () => Err(Error::new(ErrorKind::InvalidInput, "it is not a regular file")),
    }
}

/// Reads a regular file of at most `max_bytes`.
pub fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path)?.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        let what = format!("it has more than {} MiB, so it is some other file", max_bytes >> 20);
        return Err(Error::new(ErrorKind::InvalidData, what));
    }
    Ok(bytes)
}

/// As [`read`], for UTF-8 text.
pub fn read_text(path: &Path, max_bytes: u64) -> Result<String> {
    let invalid = |_| Error::new(ErrorKind::InvalidData, "it is not valid UTF-8");
    String::from_utf8(read(path, max_bytes)?).map_err(invalid)
}
