//! Compiled kernels on a GPU, and their launch.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{self as ffi, CuFunction, CuLaunchAttribute, CuLaunchConfig, CuModule};
use crate::layout::{KernelValue, StructLayout};
use crate::stream::Stream;
use std::ffi::{CString, c_int, c_void};
use std::sync::Arc;

/// The kernels of one source, loaded on a GPU.
#[derive(Clone)]
pub struct Module {
    inner: Arc<Inner>,
}

struct Inner {
    context: Context,
    handle: CuModule,
}

// SAFETY: a module may be used from any thread; the driver locks what needs to be.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Module {
    /// Loads a cubin.
    pub fn load(context: &Context, cubin: &[u8]) -> Result<Module, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: an ELF image carries its own length; it comes from the compiler, whole (the cache checks
        // it), and is copied.
        let status =
            unsafe { (context.driver().cuModuleLoadData)(&mut handle, cubin.as_ptr().cast::<c_void>()) };
        context.check("cuModuleLoadData", status)?;
        Ok(Module { inner: Arc::new(Inner { context: context.clone(), handle }) })
    }

    /// The kernel of this name, which is declared `extern "C"`.
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        let Inner { context, handle: module } = &*self.inner;
        let unfit =
            || CudaError::Library { call: "cuModuleGetFunction", text: format!("no kernel {name:?}") };
        let symbol = CString::new(name).map_err(|_| unfit())?;
        // The driver loads a kernel lazily, on the first request, and may wait for all streams of the device.
        let _no_capture = capture_lock::exclude_capture();
        context.enter()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer; the name ends with a zero.
        let status = unsafe { (context.driver().cuModuleGetFunction)(&mut handle, *module, symbol.as_ptr()) };
        if status == ffi::CUDA_ERROR_NOT_FOUND {
            return Err(unfit());
        }
        context.check("cuModuleGetFunction", status)?;
        Ok(Function { module: self.clone(), handle, structs: None })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: loaded once, unloaded once; functions keep the module.
            let status = unsafe { (self.context.driver().cuModuleUnload)(self.handle) };
            self.context.release("cuModuleUnload", status);
        }
    }
}

/// A kernel.
#[derive(Clone)]
pub struct Function {
    module: Module,
    handle: CuFunction,
    /// The structures whose layouts the kernel's source has checked; None if nothing is known of it.
    structs: Option<&'static [&'static StructLayout]>,
}

// SAFETY: as for modules.
unsafe impl Send for Function {}
// SAFETY: as for modules.
unsafe impl Sync for Function {}

/// The resources of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionInfo {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spilled registers and indexed arrays.
    pub local_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub shared_bytes: u32,
}

/// The shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks along x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block along x, y, z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster along x, y, z; all ones without clusters.
    pub cluster: [u32; 3],
}

impl Launch {
    /// A one-dimensional launch of `blocks` blocks of `threads` threads.
    pub fn row(blocks: u32, threads: u32) -> Launch {
        Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0, cluster: [1; 3] }
    }

    /// The launch with dynamic shared memory.
    pub fn shared(self, bytes: u32) -> Launch {
        Launch { shared_bytes: bytes, ..self }
    }
}

impl Function {
    /// The kernel, of a source that has checked the layouts of these structures.
    pub(crate) fn with_structs(self, structs: &'static [&'static StructLayout]) -> Function {
        Function { structs: Some(structs), ..self }
    }

    /// The kernel's resources.
    pub fn info(&self) -> Result<FunctionInfo, CudaError> {
        let attribute = |attribute: c_int| -> Result<u32, CudaError> {
            let mut value = 0;
            let context = self.context();
            context.enter()?;
            // SAFETY: writes one integer.
            let status = unsafe { (context.driver().cuFuncGetAttribute)(&mut value, attribute, self.handle) };
            context.check("cuFuncGetAttribute", status)?;
            Ok(value.max(0) as u32)
        };
        Ok(FunctionInfo {
            registers: attribute(ffi::FUNC_REGISTERS)?,
            local_bytes: attribute(ffi::FUNC_LOCAL_BYTES)?,
            shared_bytes: attribute(ffi::FUNC_SHARED_BYTES)?,
        })
    }

    /// Allows launches to use up to `bytes` of dynamic shared memory. More than 48 KiB needs this call.
    pub fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        let context = self.context();
        context.enter()?;
        let attribute = ffi::FUNC_MAX_DYNAMIC_SHARED_BYTES;
        // SAFETY: sets one integer, which the driver checks.
        let status = unsafe { (context.driver().cuFuncSetAttribute)(self.handle, attribute, bytes as c_int) };
        context.check("cuFuncSetAttribute", status)
    }

    /// Enqueues one run of the kernel on `stream`.
    ///
    /// # Safety
    /// The kernel takes exactly one argument, by value, with the layout of `A`. Memory that the kernel
    /// reaches through pointers in it is GPU memory, lives until the run has ended, and is written by nothing
    /// else during the run.
    pub unsafe fn launch<A: KernelValue>(
        &self,
        launch: Launch,
        arguments: &A,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        debug_assert!(
            self.structs
                .is_none_or(|structs| structs.iter().any(|s| Some(s.name) == A::LAYOUT.map(|a| a.name))),
            "{:?} is not among the structures that the kernel's source checks",
            A::LAYOUT
        );
        let context = self.context();
        context.enter()?;
        let mut cluster =
            CuLaunchAttribute { id: ffi::LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, pad: 0, value: [0; 16] };
        cluster.value[..3].copy_from_slice(&launch.cluster);
        let config = CuLaunchConfig {
            grid: launch.grid,
            block: launch.block,
            shared_bytes: launch.shared_bytes,
            stream: stream.handle,
            attributes: &cluster,
            attribute_count: u32::from(launch.cluster != [1; 3]),
        };
        let mut pointers = [std::ptr::from_ref(arguments).cast_mut().cast::<c_void>()];
        // SAFETY: the driver copies the one argument before it returns; its layout and what it points to are
        // the caller's promise.
        let status = unsafe {
            (context.driver().cuLaunchKernelEx)(
                &config,
                self.handle,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        context.check("cuLaunchKernelEx", status)
    }

    fn context(&self) -> &Context {
        &self.module.inner.context
    }
}
