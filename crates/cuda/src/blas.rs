//! cuBLASLt on a GPU: its handle and its descriptors.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::cublaslt::{
    CUBLAS_STATUS_SUCCESS, CublasLt, LtHandle, LtMatmulDesc, LtMatrixLayout, LtPreference,
};
use crate::ffi::open::{c_string, cublaslt};
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// The library, opened for one GPU.
pub(crate) struct Blas {
    pub(crate) context: Context,
    pub(crate) lt: &'static CublasLt,
    pub(crate) handle: LtHandle,
    pub(crate) version: usize,
}

// SAFETY: the library's calls may come from any thread with one handle.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

impl Blas {
    pub(crate) fn open(context: &Context) -> Result<Blas, CudaError> {
        let lt = &cublaslt()?.table;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer; the handle is the current context's, which `Blas` keeps.
        check(lt, "cublasLtCreate", unsafe { (lt.cublasLtCreate)(&mut handle) })?;
        // SAFETY: returns a number.
        let version = unsafe { (lt.cublasLtGetVersion)() };
        Ok(Blas { context: context.clone(), lt, handle, version })
    }

    pub(crate) fn check(&self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        check(self.lt, call, status)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: created once, destroyed once; plans keep the handle.
            unsafe { (self.lt.cublasLtDestroy)(self.handle) };
        }
    }
}

fn check(lt: &CublasLt, call: &'static str, status: c_int) -> Result<(), CudaError> {
    if status == CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a string of the library's own for any number.
    let text = c_string(unsafe { (lt.cublasLtGetStatusString)(status) });
    Err(CudaError::Library { call, text: text.unwrap_or_else(|| format!("status {status}")) })
}

/// The computation: transpositions, epilogue, scales.
pub(crate) struct MatmulDesc {
    pub(crate) handle: LtMatmulDesc,
    blas: Arc<Blas>,
}

impl MatmulDesc {
    pub(crate) fn new(blas: &Arc<Blas>, compute: c_int, scale: c_int) -> Result<MatmulDesc, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (blas.lt.cublasLtMatmulDescCreate)(&mut handle, compute, scale) };
        blas.check("cublasLtMatmulDescCreate", status)?;
        Ok(MatmulDesc { handle, blas: blas.clone() })
    }

    /// Sets an attribute. The library refuses a value of the wrong size.
    pub(crate) fn set<T: Copy>(&self, attribute: c_int, value: T) -> Result<(), CudaError> {
        let at = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: copies as many bytes as `value` has.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmulDescSetAttribute)(self.handle, attribute, at, size_of::<T>())
        };
        self.blas.check("cublasLtMatmulDescSetAttribute", status)
    }
}

impl Drop for MatmulDesc {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.blas.lt.cublasLtMatmulDescDestroy)(self.handle) };
    }
}

/// The layout of a matrix in memory, column-major.
pub(crate) struct MatrixLayout {
    pub(crate) handle: LtMatrixLayout,
    blas: Arc<Blas>,
}

impl MatrixLayout {
    pub(crate) fn new(
        blas: &Arc<Blas>,
        element: c_int,
        rows: usize,
        columns: usize,
        leading: usize,
    ) -> Result<MatrixLayout, CudaError> {
        let mut handle = std::ptr::null_mut();
        let (rows, columns, leading) = (rows as u64, columns as u64, leading as i64);
        // SAFETY: writes one pointer.
        let status =
            unsafe { (blas.lt.cublasLtMatrixLayoutCreate)(&mut handle, element, rows, columns, leading) };
        blas.check("cublasLtMatrixLayoutCreate", status)?;
        Ok(MatrixLayout { handle, blas: blas.clone() })
    }
}

impl Drop for MatrixLayout {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.blas.lt.cublasLtMatrixLayoutDestroy)(self.handle) };
    }
}

/// The limits that proposed algorithms must meet.
pub(crate) struct Preference {
    pub(crate) handle: LtPreference,
    blas: Arc<Blas>,
}

impl Preference {
    pub(crate) fn new(blas: &Arc<Blas>) -> Result<Preference, CudaError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (blas.lt.cublasLtMatmulPreferenceCreate)(&mut handle) };
        blas.check("cublasLtMatmulPreferenceCreate", status)?;
        Ok(Preference { handle, blas: blas.clone() })
    }

    /// Sets an attribute. The library refuses a value of the wrong size.
    pub(crate) fn set<T: Copy>(&self, attribute: c_int, value: T) -> Result<(), CudaError> {
        let at = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: copies as many bytes as `value` has.
        let status = unsafe {
            (self.blas.lt.cublasLtMatmulPreferenceSetAttribute)(self.handle, attribute, at, size_of::<T>())
        };
        self.blas.check("cublasLtMatmulPreferenceSetAttribute", status)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.blas.lt.cublasLtMatmulPreferenceDestroy)(self.handle) };
    }
}
