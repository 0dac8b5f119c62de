//! Helpers of the fuzz targets.

use std::fs;
use std::path::Path;

/// Calls `body` with the path of a file with this name and content, in a temporary folder.
///
/// # Panics
/// If the file cannot be written.
pub fn with_file(name: &str, bytes: &[u8], body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().expect("a file lies in a folder")).expect("a folder");
    fs::write(&path, bytes).expect("a file");
    body(&path);
}
