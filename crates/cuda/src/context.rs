//! A card in use: its primary context, and the driver that it was made with.

use crate::capture_lock;
use crate::device::Device;
use crate::error::CudaError;
use crate::ffi::driver::{CUDA_ERROR_OUT_OF_MEMORY, CuContext, Driver};
use crate::ffi::open::{check, driver, status_error};
use std::ffi::c_int;
use std::sync::Arc;

/// A card's primary context, shared with the libraries that use the card in this process. Clones share it; the last one lets go.
#[derive(Clone)]
pub struct Context {
    inner: Arc<Inner>,
}

struct Inner {
    driver: &'static Driver,
    device: Device,
    handle: CuContext,
}

// SAFETY: a context may be used from any thread; the driver locks what needs to be.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Context {
    /// Takes hold of the card, and makes it this thread's.
    pub fn new(device: Device) -> Result<Context, CudaError> {
        let driver = &driver()?.table;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer; `device` came from the driver. Given back when the last clone is dropped.
        let status = unsafe { (driver.cuDevicePrimaryCtxRetain)(&mut handle, device.handle) };
        check(driver, "cuDevicePrimaryCtxRetain", status)?;
        let context = Context { inner: Arc::new(Inner { driver, device, handle }) };
        context.enter()?;
        Ok(context)
    }

    /// The card.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Makes the context this thread's. Every method of this crate that needs it does so itself.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        let status = unsafe { (self.driver().cuCtxSetCurrent)(self.inner.handle) };
        self.check("cuCtxSetCurrent", status)
    }

    /// Bytes of the card's memory that are free, and all of them.
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

    /// As [`Context::check`], where the call asked for `bytes` of memory.
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

    /// For destructors: nobody could act on the error, so it is logged.
    pub(crate) fn release(&self, call: &'static str, status: c_int) {
        if status != 0 {
            tracing::warn!("{}", status_error(self.inner.driver, call, status));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        // SAFETY: retained once in `new`, and nothing made in it is left: each keeps a clone.
        let status = unsafe { (self.driver.cuDevicePrimaryCtxRelease_v2)(self.device.handle) };
        if status != 0 {
            tracing::warn!("{}", status_error(self.driver, "cuDevicePrimaryCtxRelease", status));
        }
    }
}
