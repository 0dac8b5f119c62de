//! What the targets share.

use std::fs;
use std::path::Path;

/// Calls `body` with the path of a file of that name and content, in a folder of its own that is then removed.
///
/// # Panics
/// If the file cannot be written: the machine's fault, which the fuzzer shall show.
pub fn with_file(name: &str, bytes: &[u8], body: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join(name);
    fs::create_dir_all(path.parent().expect("a file lies in a folder")).expect("a folder");
    fs::write(&path, bytes).expect("a file");
    body(&path);
}
