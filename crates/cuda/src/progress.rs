//! A number in host memory that work on a stream writes, so that the host sees how far the stream has come
//! while it waits there.

use crate::context::Context;
use crate::error::CudaError;
use crate::memory::{DeviceMemory, PinnedMemory};
use crate::stream::Stream;
use std::ffi::c_void;

/// The number that a stream has reached, 0 at first. Each number is written by a copy of four bytes, which a
/// graph may contain.
pub struct StreamProgress {
    context: Context,
    /// The numbers from 0 on.
    numbers: DeviceMemory,
    reached: PinnedMemory,
}

impl StreamProgress {
    /// The progress of a stream that reaches numbers below `count`.
    pub fn new(context: &Context, count: u32, stream: &Stream) -> Result<StreamProgress, CudaError> {
        let numbers = DeviceMemory::new(context, count as usize * size_of::<u32>())?;
        let bytes: Vec<u8> = (0..count).flat_map(u32::to_ne_bytes).collect();
        numbers.all().write(&bytes, stream)?;
        let reached = PinnedMemory::new(context, size_of::<u32>())?;
        Ok(StreamProgress { context: context.clone(), numbers, reached })
    }

    /// Lets `stream` reach `number` after its earlier work.
    ///
    /// # Panics
    /// If `number` is not below the count.
    pub fn reach(&self, number: u32, stream: &Stream) -> Result<(), CudaError> {
        let at = number as usize * size_of::<u32>();
        let from = self.numbers.span(at..at + size_of::<u32>()).pointer().0;
        self.context.enter()?;
        let to = self.reached.as_ptr().cast_mut().cast::<c_void>();
        // SAFETY: both places have four bytes and live as long as this; only `reached` below reads the
        // target.
        let status =
            unsafe { (self.context.driver().cuMemcpyDtoHAsync_v2)(to, from, size_of::<u32>(), stream.raw()) };
        self.context.check("cuMemcpyDtoHAsync", status)
    }

    /// The number that was reached last.
    pub fn reached(&self) -> u32 {
        // SAFETY: four aligned bytes that the GPU writes at once.
        unsafe { self.reached.as_ptr().cast::<u32>().read_volatile() }
    }
}
