//! Compiled kernels on the disk, found by everything that they depend on.
//!
//! A file is the SHA-256 of the machine code, then the code. One that does not fit its sum is compiled anew. Files are written aside
//! and renamed, so several processes may share a folder.

use crate::compiler::{Arch, Compiler};
use crate::error::CudaError;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const SUM_BYTES: usize = 32;

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct KernelCache {
    /// Nothing where no folder can be had: then every start compiles.
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// The user's: `$XTRAIN_CACHE`, else `$XDG_CACHE_HOME/xtrain`, else `~/.cache/xtrain`, each with `kernels` inside.
    pub fn of_user() -> KernelCache {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = set("XTRAIN_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|cache| cache.join("xtrain")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/xtrain")));
        KernelCache { folder: folder.map(|folder| folder.join("kernels")) }
    }

    /// One in `folder`, which need not exist yet.
    pub fn at(folder: &Path) -> KernelCache {
        KernelCache { folder: Some(folder.to_owned()) }
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
            tracing::debug!("{}: cannot be kept for the next start: {error}", path.display());
        }
        Ok(compiled.cubin)
    }
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
    let hex: String = sum[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{hex}.cubin")
}

fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let cubin = bytes.split_off(SUM_BYTES.min(bytes.len()));
    let whole = bytes[..] == Sha256::digest(&cubin)[..];
    if !whole {
        tracing::warn!("{}: damaged, and compiled anew", path.display());
    }
    whole.then_some(cubin)
}

fn write(path: &Path, cubin: &[u8]) -> io::Result<()> {
    let aside = path.with_extension(format!("tmp-{}", std::process::id()));
    fs::create_dir_all(path.parent().unwrap_or(Path::new(".")))?;
    let mut bytes = Sha256::digest(cubin).to_vec();
    bytes.extend_from_slice(cubin);
    let written = fs::write(&aside, bytes).and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        // The first error is the one that matters.
        let _ = fs::remove_file(&aside);
    }
    written
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
