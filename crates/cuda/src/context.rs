//! A GPU in use: its primary context.

use crate::capture_lock;
use crate::device::CudaDevice;
use crate::error::CudaError;
use crate::ffi::driver::{CUDA_ERROR_OUT_OF_MEMORY, CuContext, Driver};
use crate::ffi::open::{check, driver, status_error};
use std::ffi::c_int;
use std::sync::Arc;

/// The primary context of a GPU, shared with the libraries that use the GPU in this process. Clones share it;
/// the last clone releases it.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    driver: &'static Driver,
    device: CudaDevice,
    handle: CuContext,
}

// SAFETY: a context may be used from any thread; the driver locks what needs to be.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// Retains the GPU's primary context and makes it current on this thread.
    pub fn new(device: CudaDevice) -> Result<Context, CudaError> {
        let driver = &driver()?.table;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer; `device` came from the driver. Given back when the last clone is
        // dropped.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut handle, device.handle) };
        check(driver, "cuDevicePrimaryCtxRetain", status)?;
        let context = Context { inner: Arc::new(Inner { driver, device, handle }) };
        context.enter()?;
        Ok(context)
    }

    /// The GPU.
    pub fn device(&self) -> CudaDevice {
        self.inner.device
    }

    /// Makes the context current on this thread. The methods of this crate that need it call this themselves:
    /// in a thread without a context, libraries use the first GPU, and make a context of some 500 MiB there.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        let status = unsafe { (self.driver().cuCtxSetCurrent)(self.inner.handle) };
        self.check("cuCtxSetCurrent", status)
    }

    /// Free bytes and all bytes of the GPU's memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two integers.
        let status = unsafe { (self.driver().cuMemGetInfo_v2)(&mut free, &mut total) };
        self.check("cuMemGetInfo", status)?;
        Ok((free, total))
    }

    pub(crate) fn driver(&self) -> &'static Driver {
        self.inner.driver
    }

    pub(crate) fn check(&self, call: &'static str, status: c_int) -> Result<(), CudaError> {
        check(self.inner.driver, call, status)
    }

    /// [`Context::check`] for a call that allocates `bytes` of memory.
    pub(crate) fn check_allocation(
        &self,
        call: &'static str,
        status: c_int,
        bytes: usize,
    ) -> Result<(), CudaError> {
        match status {
            CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory()?;
                Err(CudaError::Memory { bytes, free, total })
            }
            _ => self.check(call, status),
        }
    }

    /// Logs an error of a destructor, which no caller could handle.
    pub(crate) fn release(&self, call: &'static str, status: c_int) {
        if status != 0 {
            tracing::warn!("{}", status_error(self.inner.driver, call, status));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        // SAFETY: retained once in `new`, and nothing created in it is left: each object keeps a clone.
        let status = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device.handle) };
        if status != 0 {
            tracing::warn!("{}", status_error(self.driver, "cuDevicePrimaryCtxRelease", status));
        }
    }
}
