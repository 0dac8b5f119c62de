//! The tables of functions, each opened once per process.

use super::cublaslt::CublasLt;
use super::cudnn::Cudnn;
use super::driver::{CUDA_SUCCESS, Driver};
use super::nccl::Nccl;
use super::nvrtc::Nvrtc;
use crate::error::CudaError;
use crate::library::Library;
use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;
use std::sync::OnceLock;

/// A table and the file of its library.
pub(crate) struct Opened<T> {
    pub(crate) table: T,
    pub(crate) path: PathBuf,
}

/// The driver's library, which opens even without a GPU.
pub(crate) fn driver_library() -> Result<&'static Opened<Driver>, CudaError> {
    static LIBRARY: OnceLock<Result<Opened<Driver>, CudaError>> = OnceLock::new();
    LIBRARY.get_or_init(|| open(Library::Driver, Driver::load)).as_ref().map_err(Clone::clone)
}

/// The driver, initialised.
pub(crate) fn driver() -> Result<&'static Opened<Driver>, CudaError> {
    static DRIVER: OnceLock<Result<&'static Opened<Driver>, CudaError>> = OnceLock::new();
    let opened = DRIVER.get_or_init(|| {
        let opened = driver_library()?;
        // SAFETY: cuInit may be called at any time and any number of times.
        let status = unsafe { (opened.table.cuInit)(0) };
        match status {
            CUDA_SUCCESS => Ok(opened),
            super::driver::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice),
            _ => Err(status_error(&opened.table, "cuInit", status)),
        }
    });
    opened.clone()
}

/// The compiler.
pub(crate) fn nvrtc() -> Result<&'static Opened<Nvrtc>, CudaError> {
    static NVRTC: OnceLock<Result<Opened<Nvrtc>, CudaError>> = OnceLock::new();
    NVRTC.get_or_init(|| open(Library::Nvrtc, Nvrtc::load)).as_ref().map_err(Clone::clone)
}

/// cuBLASLt.
pub(crate) fn cublaslt() -> Result<&'static Opened<CublasLt>, CudaError> {
    static CUBLASLT: OnceLock<Result<Opened<CublasLt>, CudaError>> = OnceLock::new();
    CUBLASLT.get_or_init(|| open(Library::CublasLt, CublasLt::load)).as_ref().map_err(Clone::clone)
}

/// cuDNN.
pub(crate) fn cudnn() -> Result<&'static Opened<Cudnn>, CudaError> {
    static CUDNN: OnceLock<Result<Opened<Cudnn>, CudaError>> = OnceLock::new();
    CUDNN.get_or_init(|| open(Library::Cudnn, Cudnn::load)).as_ref().map_err(Clone::clone)
}

/// The oldest release of NCCL that xtrain is written for: 2.27.0.
const OLDEST_NCCL: c_int = 22_700;

/// NCCL, in a release that is new enough.
pub(crate) fn nccl() -> Result<&'static Opened<Nccl>, CudaError> {
    static NCCL: OnceLock<Result<Opened<Nccl>, CudaError>> = OnceLock::new();
    let open_checked = || {
        let opened = open(Library::Nccl, Nccl::load)?;
        let version = opened.table.version();
        if version < OLDEST_NCCL {
            let (found, needed) = (dotted(version as usize), dotted(OLDEST_NCCL as usize));
            let (path, remedy) = (opened.path, Library::Nccl.remedy());
            return Err(CudaError::TooOldRelease { library: Library::Nccl, path, found, needed, remedy });
        }
        Ok(opened)
    };
    NCCL.get_or_init(open_checked).as_ref().map_err(Clone::clone)
}

/// 130102 is 13.1.2.
pub(crate) fn dotted(version: usize) -> String {
    format!("{}.{}.{}", version / 10_000, version % 10_000 / 100, version % 100)
}

fn open<T>(
    library: Library,
    table: impl FnOnce(libloading::Library) -> Result<T, &'static str>,
) -> Result<Opened<T>, CudaError> {
    let (opened, path) = library.open()?;
    match table(opened) {
        Ok(table) => Ok(Opened { table, path }),
        Err(symbol) => Err(CudaError::TooOld { path, symbol, remedy: library.remedy() }),
    }
}

/// The error for a status of the driver.
pub(crate) fn status_error(driver: &Driver, call: &'static str, status: c_int) -> CudaError {
    let text = |ask: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
        let mut string: *const c_char = std::ptr::null();
        // SAFETY: the driver writes a pointer to a string of its own that lives for ever, or null.
        unsafe { ask(status, &mut string) };
        c_string(string).unwrap_or_else(|| format!("status {status}"))
    };
    CudaError::Driver { call, name: text(driver.cuGetErrorName), text: text(driver.cuGetErrorString) }
}

/// Copies a foreign string with static lifetime; None for null.
pub(crate) fn c_string(text: *const c_char) -> Option<String> {
    // SAFETY: not null, and the library's strings end with a zero and are never freed.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Fails unless the status is success; the error names the call.
pub(crate) fn check(driver: &Driver, call: &'static str, status: c_int) -> Result<(), CudaError> {
    if status == CUDA_SUCCESS { Ok(()) } else { Err(status_error(driver, call, status)) }
}
