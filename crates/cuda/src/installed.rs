//! NVIDIA's libraries on this machine: files and versions.

use crate::compiler::Compiler;
use crate::device::CudaDevice;
use crate::error::CudaError;
use crate::ffi::open::{cublaslt, cudnn, dotted, driver_library, nccl};
use crate::library::Library;
use std::path::{Path, PathBuf};

/// An installed library that opens and has all needed functions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// The library's file.
    pub path: PathBuf,
    /// The version in readable form.
    pub version: String,
}

impl Installed {
    /// Opens `library`, which needs no GPU.
    ///
    /// # Errors
    /// If the library is missing, cannot be opened, or is too old.
    pub fn open(library: Library) -> Result<Installed, CudaError> {
        let (path, version) = match library {
            Library::Driver => {
                let path = &driver_library()?.path;
                (path.as_path(), driver(CudaDevice::driver_version()?, path))
            }
            Library::Nvrtc => {
                let compiler = Compiler::open()?;
                let (major, minor) = compiler.version();
                (compiler.path(), format!("{major}.{minor}"))
            }
            Library::CublasLt => {
                let opened = cublaslt()?;
                // SAFETY: returns a number.
                let version = unsafe { (opened.table.cublasLtGetVersion)() };
                (opened.path.as_path(), dotted(version))
            }
            Library::Cudnn => {
                let opened = cudnn()?;
                // SAFETY: returns a number.
                let version = unsafe { (opened.table.cudnnGetVersion)() };
                // SAFETY: returns a number.
                let toolkit = unsafe { (opened.table.cudnnGetCudartVersion)() };
                let text = format!("{}, built for CUDA {}", dotted(version), cuda(toolkit));
                (opened.path.as_path(), text)
            }
            Library::Nccl => {
                let opened = nccl()?;
                (opened.path.as_path(), dotted(opened.table.version() as usize))
            }
        };
        Ok(Installed { path: path.to_owned(), version })
    }
}

/// `CUDA 13.0 (driver 580.95.05)`. Only the name of the file contains the release.
fn driver(version: u32, path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let release = name.split_once(".so.").map(|(_, release)| release).filter(|release| release.contains('.'));
    let release = release.map(|release| format!(" (driver {release})")).unwrap_or_default();
    format!("CUDA {}{release}", cuda(version as usize))
}

/// 13020 is 13.2.
fn cuda(version: usize) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_told_as_people_write_them() {
        assert_eq!(driver(13_000, Path::new("/lib/libcuda.so.580.95.05")), "CUDA 13.0 (driver 580.95.05)");
        assert_eq!(driver(12_080, Path::new("/lib/libcuda.so.1")), "CUDA 12.8");
        assert_eq!(dotted(130_102), "13.1.2");
        assert_eq!(dotted(91_900), "9.19.0");
    }
}
