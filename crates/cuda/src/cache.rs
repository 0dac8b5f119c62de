//! What was found out once for a card, on the disk: compiled kernels and chosen algorithms, each found by everything that it depends on.
//!
//! A file is the SHA-256 of what it holds, then that. One that does not fit its sum is made anew. Files are written to a temporary file and renamed,
//! so several processes may share a folder.

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

/// What to do where nothing can be kept.
const REMEDY: &str = "set XTRAIN_CACHE to a folder that can be written, or every start compiles anew";

/// A folder of compiled kernels, and of the algorithms that were chosen for products.
#[derive(Clone, Debug)]
pub struct KernelCache {
    /// Nothing where no folder can be had: then every start compiles.
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// The user's: `$XTRAIN_CACHE`, else `$XDG_CACHE_HOME/xtrain`, else `~/.cache/xtrain`, each with `kernels` inside.
    pub fn for_user() -> KernelCache {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = set("XTRAIN_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("xtrain")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/xtrain")));
        KernelCache { folder: folder.map(|folder| folder.join("kernels")) }
    }

    /// One in `folder`, which need not exist yet.
    pub fn in_folder(folder: &Path) -> KernelCache {
        KernelCache { folder: Some(folder.to_owned()) }
    }

    /// The folder, where one can be had.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// Why nothing can be kept, and what to do, where that is so. It is tried: the folder is made, and a file written there and removed.
    pub fn problem(&self) -> Option<String> {
        let tried = write_temporary(&self.folder.as_ref()?.join("tried"), &[]).and_then(fs::remove_file);
        tried.err().map(|error| format!("cannot be written ({error}); {REMEDY}"))
    }

    /// How many files it holds, and their bytes; nothing where it is not there yet.
    pub fn size(&self) -> (usize, u64) {
        let entries = self.folder.iter().flat_map(fs::read_dir).flatten().flatten();
        let files = entries.filter_map(|entry| entry.metadata().ok()).filter(fs::Metadata::is_file);
        files.fold((0, 0), |(count, bytes), file| (count + 1, bytes + file.len()))
    }

    /// The machine code of `source`: from the folder, or compiled and kept there.
    ///
    /// # Errors
    /// Those of the compiler. A folder that cannot be read or written is no error: it is only slower.
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

    /// What was kept under `key` for another process or start, if it is whole.
    pub(crate) fn get(&self, key: &str, extension: &str) -> Option<Vec<u8>> {
        read(&self.path(key, extension)?)
    }

    /// Keeps `bytes` under `key`, and returns what stands there: where another process was first, what that one kept. Only what
    /// `fits` counts; something else is replaced.
    pub(crate) fn insert_if_absent(
        &self,
        key: &str,
        extension: &str,
        bytes: &[u8],
        fits: impl Fn(&[u8]) -> bool,
    ) -> Vec<u8> {
        let Some(path) = self.path(key, extension) else { return bytes.to_vec() };
        write_first(&path, bytes, fits).unwrap_or_else(|error| {
            warn_once(&path, &error);
            bytes.to_vec()
        })
    }

    /// Keeps `bytes` under `key`, whatever stands there.
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

/// Says, of the first file, that nothing can be kept.
fn warn_once(path: &Path, error: &io::Error) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        tracing::warn!("{}: cannot be kept for the next start ({error}); {REMEDY}", path.display());
    });
}

/// A file name that differs where anything differs that the code depends on.
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
    // A named pipe would be waited for.
    let kind = fs::metadata(path).ok()?;
    if !kind.is_file() {
        tracing::warn!("{}: is no regular file, and is passed over", path.display());
        return None;
    }
    let mut bytes = fs::read(path).ok()?;
    let held = bytes.split_off(SUM_BYTES.min(bytes.len()));
    let whole = bytes[..] == Sha256::digest(&held)[..];
    if !whole {
        tracing::warn!("{}: damaged, and made anew", path.display());
    }
    whole.then_some(held)
}

fn write(path: &Path, held: &[u8]) -> io::Result<()> {
    let temporary = write_temporary(path, held)?;
    clean_up(&temporary, fs::rename(&temporary, path))
}

/// As [`write`], unless something that `fits` is there already: what is there in the end.
fn write_first(path: &Path, held: &[u8], fits: impl Fn(&[u8]) -> bool) -> io::Result<Vec<u8>> {
    let temporary = write_temporary(path, held)?;
    // A link, unlike a renamed file, replaces nothing: of several processes one is first, and all learn what it wrote.
    if fs::hard_link(&temporary, path).is_ok() {
        return clean_up(&temporary, fs::remove_file(&temporary)).map(|()| held.to_vec());
    }
    match path.exists().then(|| read(path)).flatten().filter(|first| fits(first)) {
        Some(first) => clean_up(&temporary, fs::remove_file(&temporary)).map(|()| first),
        None => clean_up(&temporary, fs::rename(&temporary, path)).map(|()| held.to_vec()),
    }
}

/// Writes what `path` is to become into a temporary file beside it.
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
        // The first error is the one that matters.
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
        // What is damaged, or whole and of no use, is replaced.
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
        // A folder in a file's place is passed over.
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
