//! Entry points and helpers of the fuzz targets.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// The entry point of a target, for a function of the bytes of a file: libFuzzer's, or without the feature
/// `libfuzzer` a `main` that calls the function for each file that is named on the command line.
#[macro_export]
macro_rules! target {
    ($read:ident) => {
        #[cfg(feature = "libfuzzer")]
        libfuzzer_sys::fuzz_target!(|bytes: &[u8]| $read(bytes));

        #[cfg(not(feature = "libfuzzer"))]
        fn main() {
            $crate::read_files($read);
        }
    };
}

/// Calls `read` for each file that is named on the command line: a finding of a fuzzer, or its corpus.
///
/// # Panics
/// If none is named or one cannot be read, and where `read` does.
pub fn read_files(read: impl Fn(&[u8])) {
    let paths: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    assert!(!paths.is_empty(), "name the files to read");
    for path in paths {
        let bytes = fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        read(&bytes);
    }
}

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
