//! GPU memory, host memory that the GPU can access, and copies between them.

use crate::capture_lock;
use crate::context::Context;
use crate::error::CudaError;
use crate::ffi::driver::{CU_MEMHOSTALLOC_PORTABLE, CuDevicePtr};
use crate::stream::Stream;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut, Range};

/// An address in GPU memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// The address `bytes` after this one.
    pub fn offset(self, bytes: usize) -> DevicePtr {
        DevicePtr(self.0 + bytes as u64)
    }
}

/// An allocation of GPU memory, freed when dropped. It is aligned to at least 256 bytes.
pub struct DeviceMemory {
    context: Context,
    pointer: CuDevicePtr,
    bytes: usize,
}

impl DeviceMemory {
    /// Allocates memory without initialising it.
    ///
    /// # Errors
    /// [`CudaError::Memory`] if the GPU has too little memory.
    pub fn new(context: &Context, bytes: usize) -> Result<DeviceMemory, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        context.enter()?;
        let mut pointer = 0;
        if bytes > 0 {
            // SAFETY: writes one pointer.
            let status = unsafe { (context.driver().cuMemAlloc_v2)(&mut pointer, bytes) };
            context.check_allocation("cuMemAlloc", status, bytes)?;
        }
        Ok(DeviceMemory { context: context.clone(), pointer, bytes })
    }

    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of the first byte.
    pub fn pointer(&self) -> DevicePtr {
        DevicePtr(self.pointer)
    }

    /// The bytes `range`.
    ///
    /// # Panics
    /// If the range ends after the allocation.
    pub fn span(&self, range: Range<usize>) -> DeviceSpan<'_> {
        DeviceSpan::new(&self.context, self.pointer, self.bytes, range)
    }

    /// All bytes.
    pub fn all(&self) -> DeviceSpan<'_> {
        self.span(0..self.bytes)
    }
}

/// A span of GPU memory, to be copied and filled.
#[derive(Clone, Copy)]
pub struct DeviceSpan<'a> {
    context: &'a Context,
    pointer: CuDevicePtr,
    bytes: usize,
}

impl<'a> DeviceSpan<'a> {
    /// The length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The bytes `range` of the span.
    ///
    /// # Panics
    /// If the range ends after the span.
    pub fn part(&self, range: Range<usize>) -> DeviceSpan<'a> {
        DeviceSpan::new(self.context, self.pointer, self.bytes, range)
    }

    /// The bytes `range` of an allocation that begins at `pointer` and has `held` bytes.
    pub(crate) fn new(
        context: &'a Context,
        pointer: CuDevicePtr,
        held: usize,
        range: Range<usize>,
    ) -> DeviceSpan<'a> {
        assert!(range.start <= range.end && range.end <= held, "bytes {range:?} of {held}");
        DeviceSpan { context, pointer: pointer + range.start as u64, bytes: range.len() }
    }

    /// The address of the first byte.
    pub fn pointer(&self) -> DevicePtr {
        DevicePtr(self.pointer)
    }

    /// Enqueues a copy from `source` on `stream`. Ordinary host memory has been read when this returns.
    /// Pinned memory must stay unchanged until the copy has run.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&self, source: &[u8], stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, source.len(), "bytes given and asked for");
        self.context.enter()?;
        // SAFETY: the span has as many bytes as `source`.
        let status = unsafe {
            (self.context.driver().cuMemcpyHtoDAsync_v2)(
                self.pointer,
                source.as_ptr().cast::<c_void>(),
                source.len(),
                stream.handle,
            )
        };
        self.context.check("cuMemcpyHtoDAsync", status)
    }

    /// Enqueues a copy into pinned memory, from its byte `at` on. The bytes are there once the copy has run.
    ///
    /// # Panics
    /// If the copy would end after the pinned memory.
    pub fn read_into(&self, target: &mut PinnedMemory, at: usize, stream: &Stream) -> Result<(), CudaError> {
        let target = &mut target[at..at + self.bytes];
        self.context.enter()?;
        // SAFETY: `target` has as many bytes as the span, and pinned memory stays where it is.
        let status = unsafe {
            (self.context.driver().cuMemcpyDtoHAsync_v2)(
                target.as_mut_ptr().cast::<c_void>(),
                self.pointer,
                target.len(),
                stream.handle,
            )
        };
        self.context.check("cuMemcpyDtoHAsync", status)
    }

    /// The bytes, after all work enqueued on `stream`.
    pub fn read(&self, stream: &Stream) -> Result<Vec<u8>, CudaError> {
        let mut target = vec![0u8; self.bytes];
        self.context.enter()?;
        // SAFETY: `target` has as many bytes as the span, and lives until the stream has been waited for.
        let status = unsafe {
            (self.context.driver().cuMemcpyDtoHAsync_v2)(
                target.as_mut_ptr().cast::<c_void>(),
                self.pointer,
                target.len(),
                stream.handle,
            )
        };
        // Wait even after an error: a copy into `target` may be in progress.
        let copied = self.context.check("cuMemcpyDtoHAsync", status);
        stream.synchronize()?;
        copied.map(|()| target)
    }

    /// Enqueues a fill with one byte.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the span lies within its memory.
        let status =
            unsafe { (self.context.driver().cuMemsetD8Async)(self.pointer, byte, self.bytes, stream.handle) };
        self.context.check("cuMemsetD8Async", status)
    }

    /// Enqueues a copy from another span.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn copy_from(&self, source: DeviceSpan<'_>, stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(self.bytes, source.bytes, "bytes given and asked for");
        self.context.enter()?;
        // SAFETY: both spans lie within their memory and have one length.
        let status = unsafe {
            (self.context.driver().cuMemcpyDtoDAsync_v2)(
                self.pointer,
                source.pointer,
                self.bytes,
                stream.handle,
            )
        };
        self.context.check("cuMemcpyDtoDAsync", status)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.bytes > 0 && self.context.enter().is_ok() {
            // SAFETY: allocated by `new`, freed once; the driver waits for work that uses it.
            let status = unsafe { (self.context.driver().cuMemFree_v2)(self.pointer) };
            self.context.release("cuMemFree", status);
        }
    }
}

/// Enqueues a fill of `bytes` bytes at `place` with one byte.
///
/// # Safety
/// The bytes are GPU memory until the fill has run, and nothing else uses them meanwhile.
pub(crate) unsafe fn fill(
    context: &Context,
    place: DevicePtr,
    byte: u8,
    bytes: usize,
    stream: &Stream,
) -> Result<(), CudaError> {
    context.enter()?;
    // SAFETY: the caller's promise.
    let status = unsafe { (context.driver().cuMemsetD8Async)(place.0, byte, bytes, stream.handle) };
    context.check("cuMemsetD8Async", status)
}

/// Pinned host memory, which the GPU reads and writes directly, so that copies overlap with work of the host.
/// It begins as zeros.
pub struct PinnedMemory {
    context: Context,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: owned memory, as a boxed slice is.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above: shared references only read.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// `bytes` zeros.
    pub fn new(context: &Context, bytes: usize) -> Result<PinnedMemory, CudaError> {
        let _no_capture = capture_lock::exclude_capture();
        context.enter()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: writes one pointer. One byte at least, so that it is never null.
        let status = unsafe {
            (context.driver().cuMemHostAlloc)(&mut pointer, bytes.max(1), CU_MEMHOSTALLOC_PORTABLE)
        };
        context.check_allocation("cuMemHostAlloc", status, bytes)?;
        let pointer = pointer.cast::<u8>();
        // SAFETY: the memory is ours and has this many bytes.
        unsafe { std::ptr::write_bytes(pointer, 0, bytes) };
        Ok(PinnedMemory { context: context.clone(), pointer, bytes })
    }
}

impl Deref for PinnedMemory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this many bytes, all of which were written.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }
}

impl DerefMut for PinnedMemory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; `self` is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let _no_capture = capture_lock::exclude_capture();
        if self.context.enter().is_ok() {
            // SAFETY: allocated by `new`, freed once.
            let status = unsafe { (self.context.driver().cuMemFreeHost)(self.pointer.cast::<c_void>()) };
            self.context.release("cuMemFreeHost", status);
        }
    }
}
