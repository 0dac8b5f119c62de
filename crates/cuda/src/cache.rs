//! The disk cache: compiled kernels, chosen algorithms and measurements. An entry is found by everything it
//! depends on.
//!
//! A file is the SHA-256 of its contents, followed by the contents. A file whose sum does not match is
//! written again. Writes are atomic (a temporary file is renamed), so several processes may share a folder.

use crate::arch::Arch;
use crate::compiler::Compiler;
use crate::error::CudaError;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

const SUM_BYTES: usize = 32;

/// The remedy if the folder cannot be written.
const REMEDY: &str =
    "set XTRAIN_CACHE to a folder that can be written, else every start compiles all kernels";

/// A folder of compiled kernels, chosen algorithms and measurements.
#[derive(Clone, Debug)]
pub struct KernelCache {
    /// None if no folder can be determined; then every start compiles.
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// The user's cache: `$XTRAIN_CACHE`, else `$XDG_CACHE_HOME/xtrain`, else `~/.cache/xtrain`, each with
    /// `kernels` inside.
    pub fn for_user() -> KernelCache {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = set("XTRAIN_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("xtrain")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/xtrain")));
        KernelCache { folder: folder.map(|folder| folder.join("kernels")) }
    }

    /// A cache in `folder`, which need not exist yet.
    pub fn in_folder(folder: &Path) -> KernelCache {
        KernelCache { folder: Some(folder.to_owned()) }
    }

    /// The folder; None if it cannot be determined.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The reason why the folder cannot be written, and the remedy; None if it can. The check creates the
    /// folder, and writes and removes a file in it.
    pub fn problem(&self) -> Option<String> {
        let probe = write_temporary(&self.folder.as_ref()?.join("probe"), &[]).and_then(fs::remove_file);
        probe.err().map(|error| format!("cannot be written ({error}); {REMEDY}"))
    }

    /// The number of files and their bytes; zero if the folder does not exist.
    pub fn size(&self) -> (usize, u64) {
        let entries = self.folder.iter().flat_map(fs::read_dir).flatten().flatten();
        let files = entries.filter_map(|entry| entry.metadata().ok()).filter(fs::Metadata::is_file);
        files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.len()))
    }

    /// The machine code of `source`, read from the folder or compiled and cached there.
    ///
    /// # Errors
    /// Those of the compiler. A folder that cannot be read or written costs time, but is no error.
    pub fn compile(
        &self,
        compiler: Compiler,
        name: &str,
        source: &str,
        arch: Arch,
        options: &[String],
    ) -> Result<Vec<u8>, CudaError> {
        let path =
            self.folder.as_ref().map(|folder| folder.join(key(compiler.version(), source, arch, options)));
        if let Some(cubin) = path.as_deref().and_then(read) {
            return Ok(cubin);
        }
        let compiled = compiler.compile(name, source, arch, options)?;
        if !compiled.log.is_empty() {
            tracing::debug!("{name} for {arch}: {}", compiled.log);
        }
        if let Some(path) = path
            && let Err(error) = write(&path, &compiled.cubin)
        {
            warn_once(&path, &error);
        }
        Ok(compiled.cubin)
    }

    /// The bytes cached under `key`; None if there are none or the file is damaged.
    pub(crate) fn get(&self, key: &str, extension: &str) -> Option<Vec<u8>> {
        read(&self.path(key, extension)?)
    }

    /// Caches `bytes` under `key`, unless another process has cached valid ones; returns the cached bytes. An
    /// entry that `is_valid` rejects is replaced.
    pub(crate) fn insert_if_absent(
        &self,
        key: &str,
        extension: &str,
        bytes: &[u8],
        is_valid: impl Fn(&[u8]) -> bool,
    ) -> Vec<u8> {
        let Some(path) = self.path(key, extension) else { return bytes.to_vec() };
        write_first(&path, bytes, is_valid).unwrap_or_else(|error| {
            warn_once(&path, &error);
            bytes.to_vec()
        })
    }

    /// Caches `bytes` under `key`, replacing an entry that exists.
    pub(crate) fn replace(&self, key: &str, extension: &str, bytes: &[u8]) {
        if let Some(path) = self.path(key, extension)
            && let Err(error) = write(&path, bytes)
        {
            warn_once(&path, &error);
        }
    }

    fn path(&self, key: &str, extension: &str) -> Option<PathBuf> {
        let name = hex(&Sha256::digest(key)[..16]);
        self.folder.as_ref().map(|folder| folder.join(format!("{name}.{extension}")))
    }
}

/// Warns, once in a process, that the cache cannot be written.
fn warn_once(path: &Path, error: &io::Error) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!("{}: cannot be cached for the next start ({error}); {REMEDY}", path.display());
    });
}

/// The file name of compiled code. It differs if anything differs that the code depends on.
fn key(version: (u32, u32), source: &str, arch: Arch, options: &[String]) -> String {
    let mut hash = Sha256::new();
    let (major, minor) = version;
    for part in [format!("{major}.{minor} {arch}"), options.join("\0"), source.to_owned()] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let sum = hash.finalize();
    format!("{}.cubin", hex(&sum[..16]))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn read(path: &Path) -> Option<Vec<u8>> {
    // Reading a named pipe would block.
    let kind = fs::metadata(path).ok()?;
    if !kind.is_file() {
        tracing::warn!("{}: not a regular file; ignored", path.display());
        return None;
    }
    let mut bytes = fs::read(path).ok()?;
    let held = bytes.split_off(SUM_BYTES.min(bytes.len()));
    let whole = bytes[..] == Sha256::digest(&held)[..];
    if !whole {
        tracing::warn!("{}: damaged; it will be written again", path.display());
    }
    whole.then_some(held)
}

fn write(path: &Path, held: &[u8]) -> io::Result<()> {
    let temporary = write_temporary(path, held)?;
    clean_up(&temporary, fs::rename(&temporary, path))
}

/// Writes the file unless a file exists that `is_valid` accepts; returns the contents of the file that
/// remains.
fn write_first(path: &Path, held: &[u8], is_valid: impl Fn(&[u8]) -> bool) -> io::Result<Vec<u8>> {
    let temporary = write_temporary(path, held)?;
    // Unlike a rename, a hard link replaces nothing: of several processes one is the first, and all read its
    // contents.
    if fs::hard_link(&temporary, path).is_ok() {
        return clean_up(&temporary, fs::remove_file(&temporary)).map(|()| held.to_vec());
    }
    match path.exists().then(|| read(path)).flatten().filter(|first| is_valid(first)) {
        Some(first) => clean_up(&temporary, fs::remove_file(&temporary)).map(|()| first),
        None => clean_up(&temporary, fs::rename(&temporary, path)).map(|()| held.to_vec()),
    }
}

/// Writes the future contents of `path` to a temporary file beside it.
fn write_temporary(path: &Path, held: &[u8]) -> io::Result<PathBuf> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_extension(format!("tmp-{}-{number}", std::process::id()));
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let mut bytes = Sha256::digest(held).to_vec();
    bytes.extend_from_slice(held);
    clean_up(&temporary, fs::write(&temporary, bytes)).map(|()| temporary)
}

/// Removes the temporary file if the step after it failed.
fn clean_up(temporary: &Path, step: io::Result<()>) -> io::Result<()> {
    if step.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(temporary);
    }
    step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("inner/a.cubin");
        write(&path, b"machine code").unwrap();
        assert_eq!(read(&path).as_deref(), Some(b"machine code".as_slice()));
        let mut bytes = fs::read(&path).unwrap();
        for cut in [0, 10, 32, bytes.len() - 1] {
            fs::write(&path, &bytes[..cut]).unwrap();
            assert_eq!(read(&path), None, "cut to {cut} bytes");
        }
        bytes[40] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert_eq!(read(&path), None);
    }

    #[test]
    fn the_first_to_keep_something_is_the_one_that_counts() {
        let folder = tempfile::tempdir().unwrap();
        let cache = KernelCache::in_folder(&folder.path().join("inner"));
        let insert =
            |bytes: &[u8]| cache.insert_if_absent("a key", "algo", bytes, |held| held.starts_with(b"algo"));
        assert_eq!(cache.get("a key", "algo"), None);
        assert_eq!(insert(b"algorithm 1"), b"algorithm 1");
        assert_eq!(insert(b"algorithm 2"), b"algorithm 1");
        assert_eq!(cache.get("a key", "algo").as_deref(), Some(b"algorithm 1".as_slice()));
        // An entry that is damaged, or whole but invalid, is replaced.
        let path = cache.path("a key", "algo").unwrap();
        fs::write(&path, b"cut").unwrap();
        assert_eq!(insert(b"algorithm 3"), b"algorithm 3");
        write(&path, b"something else").unwrap();
        assert_eq!(insert(b"algorithm 4"), b"algorithm 4");
        assert_eq!(cache.get("a key", "algo").as_deref(), Some(b"algorithm 4".as_slice()));
        cache.replace("a key", "algo", b"algorithm 5");
        assert_eq!(cache.get("a key", "algo").as_deref(), Some(b"algorithm 5".as_slice()));
        cache.replace("a key", "algo", b"algorithm 4");
        assert_eq!(cache.get("another key", "algo"), None);
        // A folder in place of the file is ignored.
        fs::create_dir(cache.path("a third key", "algo").unwrap()).unwrap();
        assert_eq!(cache.get("a third key", "algo"), None);
        assert_eq!(cache.insert_if_absent("a third key", "algo", b"algorithm 5", |_| true), b"algorithm 5");
        let held = SUM_BYTES as u64 + "algorithm 4".len() as u64;
        assert_eq!(cache.size(), (1, held), "no temporary file is left");
        assert_eq!(KernelCache::in_folder(&folder.path().join("none")).size(), (0, 0));
    }

    #[test]
    fn everything_that_code_depends_on_is_in_its_name() {
        let of = |version, source: &str, arch, options: &[&str]| {
            key(version, source, arch, &options.iter().map(|&o| o.to_owned()).collect::<Vec<_>>())
        };
        let names = [
            of((13, 0), "a", Arch::SM90, &[]),
            of((13, 1), "a", Arch::SM90, &[]),
            of((13, 0), "b", Arch::SM90, &[]),
            of((13, 0), "a", Arch::SM100, &[]),
            of((13, 0), "a", Arch::SM90, &["-DN=1"]),
            of((13, 0), "a", Arch::SM90, &["-DN", "=1"]),
        ];
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }
}
