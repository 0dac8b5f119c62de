//! Atomic writes of whole files, and reads with errors that name the file.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use xtrain_checkpoint::replace_file;

use crate::error::{DataError, Result};

/// Writes a file atomically. Readers see the old file or the new one.
pub(crate) fn write_atomically(path: &Path, bytes: &[u8]) -> Result<()> {
    Ok(replace_file(path, |out| out.write_all(bytes))?)
}

/// Removes a file. One that does not exist is no error.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(DataError::io(path, "remove")(error)),
        _ => Ok(()),
    }
}

/// Maximum size of a file that is read whole. Tokenizers and indexes are far smaller.
const MAX_BYTES: u64 = 1 << 30;

/// Opens a file; `action` is for errors. Refuses devices and named pipes, whose reads may never end. Reading
/// a folder fails on its own.
pub(crate) fn open(path: &Path, action: &'static str) -> Result<File> {
    let kind = fs::metadata(path).map_err(DataError::io(path, action))?;
    if !kind.is_file() && !kind.is_dir() {
        return Err(not_regular(path));
    }
    File::open(path).map_err(DataError::io(path, action))
}

/// The error for a device, a named pipe and the like.
pub(crate) fn not_regular(path: &Path) -> DataError {
    DataError::corrupt(path, "is not a regular file", "name a regular file")
}

/// Reads a whole regular file.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = open(path, "read")?;
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(DataError::io(path, "read"))?;
    if bytes.len() as u64 > MAX_BYTES {
        let problem = format!("has more than {} GiB, far more than such a file can have", MAX_BYTES >> 30);
        return Err(DataError::corrupt(path, problem, "check that it is the right file"));
    }
    Ok(bytes)
}

/// Creates a folder and its parents.
pub(crate) fn create_folder(path: &Path) -> Result<()> {
    fs::create_dir_all(path).map_err(DataError::io(path, "create the folder"))
}

/// Reads a JSON file; `advice` is for the error if it does not parse.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path, advice: &str) -> Result<T> {
    let bytes = read(path)?;
    serde_json::from_slice(&bytes)
        .map_err(|e| DataError::corrupt(path, format!("not as expected: {e}"), advice))
}

/// Writes a value as indented JSON, atomically.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|e| DataError::Internal(format!("{} does not serialise: {e}", path.display())))?;
    bytes.push(b'\n');
    write_atomically(path, &bytes)
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
