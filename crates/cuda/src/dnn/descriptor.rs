//! cuDNN's handle and its descriptors, which are objects of the library with attributes.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::cudnn::{CUDNN_STATUS_SUCCESS, Cudnn, CudnnDescriptor, CudnnHandle, ty};
use crate::ffi::open::{c_string, cudnn};
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex};

/// The library, opened for one GPU.
pub(crate) struct Dnn {
    pub(super) context: Context,
    pub(super) cudnn: &'static Cudnn,
    pub(super) handle: CudnnHandle,
    /// Serialises use of the handle: planning, and each run, which sets the handle's stream.
    pub(super) running: Mutex<()>,
}

// SAFETY: the handle may be used from any thread by one at a time, which `running` sees to; descriptors are
// their owners'.
unsafe impl Send for Dnn {}
// SAFETY: as above.
unsafe impl Sync for Dnn {}

impl Dnn {
    pub(crate) fn open(context: &Context) -> Result<Dnn, CudaError> {
        let cudnn = &cudnn()?.table;
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        check(cudnn, "cudnnCreate", unsafe { (cudnn.cudnnCreate)(&mut handle) })?;
        Ok(Dnn { context: context.clone(), cudnn, handle, running: Mutex::new(()) })
    }
}

impl Drop for Dnn {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: created once, destroyed once; plans keep the `Dnn`.
            unsafe { (self.cudnn.cudnnDestroy)(self.handle) };
        }
    }
}

pub(super) fn check(cudnn: &Cudnn, call: &'static str, status: c_int) -> Result<(), CudaError> {
    if status == CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: returns a string of the library's own for any number.
    let name = c_string(unsafe { (cudnn.cudnnGetErrorString)(status) });
    let mut words = [0 as c_char; 512];
    // SAFETY: writes at most as many characters, the last of which is zero.
    unsafe { (cudnn.cudnnGetLastErrorString)(words.as_mut_ptr(), words.len()) };
    let words = c_string(words.as_ptr()).unwrap_or_default();
    let text = format!("{}: {words}", name.unwrap_or_else(|| format!("status {status}")));
    Err(CudaError::Library { call, text })
}

/// A descriptor: created, given attributes, then finalised.
pub(super) struct Descriptor {
    pub(super) handle: CudnnDescriptor,
    dnn: Arc<Dnn>,
}

// SAFETY: a descriptor is used by its owner alone, and the library ties none to a thread.
unsafe impl Send for Descriptor {}
// SAFETY: shared references only hand the handle to calls that read it.
unsafe impl Sync for Descriptor {}

impl Descriptor {
    pub(super) fn new(dnn: &Arc<Dnn>, kind: c_int) -> Result<Descriptor, CudaError> {
        // The library may query the device of the thread's current context.
        dnn.context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        let status = unsafe { (dnn.cudnn.cudnnBackendCreateDescriptor)(kind, &mut handle) };
        check(dnn.cudnn, "cudnnBackendCreateDescriptor", status)?;
        Ok(Descriptor { handle, dnn: dnn.clone() })
    }

    /// Sets an attribute to `values`, whose element type is the one that `ty` names.
    pub(super) fn set<T>(&self, name: c_int, ty: c_int, values: &[T]) -> Result<(), CudaError> {
        // SAFETY: the library copies as many elements as the slice has, of the type that the callers below
        // pair `ty` with.
        let status = unsafe {
            (self.dnn.cudnn.cudnnBackendSetAttribute)(
                self.handle,
                name,
                ty,
                values.len() as i64,
                values.as_ptr().cast::<c_void>(),
            )
        };
        check(self.dnn.cudnn, "cudnnBackendSetAttribute", status)
    }

    pub(super) fn set_int(&self, name: c_int, ty: c_int, value: c_int) -> Result<(), CudaError> {
        self.set(name, ty, &[value])
    }

    pub(super) fn set_descriptors(&self, name: c_int, of: &[&Descriptor]) -> Result<(), CudaError> {
        let handles: Vec<CudnnDescriptor> = of.iter().map(|d| d.handle).collect();
        self.set(name, ty::DESCRIPTOR, &handles)
    }

    pub(super) fn finalize(self) -> Result<Descriptor, CudaError> {
        // SAFETY: the descriptor lives here.
        let status = unsafe { (self.dnn.cudnn.cudnnBackendFinalize)(self.handle) };
        check(self.dnn.cudnn, "cudnnBackendFinalize", status)?;
        Ok(self)
    }

    /// Reads up to `values.len()` elements of an attribute; returns their number.
    pub(super) fn get<T>(&self, name: c_int, ty: c_int, values: &mut [T]) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: writes at most as many elements as the slice has, of the type that the callers below pair
        // `ty` with.
        let status = unsafe {
            (self.dnn.cudnn.cudnnBackendGetAttribute)(
                self.handle,
                name,
                ty,
                values.len() as i64,
                &mut count,
                values.as_mut_ptr().cast::<c_void>(),
            )
        };
        check(self.dnn.cudnn, "cudnnBackendGetAttribute", status)?;
        Ok((count.max(0) as usize).min(values.len()))
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { (self.dnn.cudnn.cudnnBackendDestroyDescriptor)(self.handle) };
    }
}
