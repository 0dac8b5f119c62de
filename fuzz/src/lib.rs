//! Helpers of the fuzz targets.

use std::fs;
use std::path::Path;

/// For targets whose code catches panics of libraries, which are then errors: only a panic that leaves the
/// target is a finding. By default libFuzzer's hook aborts at any.
pub fn allow_caught_panics() {
    std::panic::set_hook(Box::new(|panic| eprintln!("{panic}")));
}

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
