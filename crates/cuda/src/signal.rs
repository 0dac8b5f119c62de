//! Words of GPU memory by which GPUs wait for each other. They take no multiprocessor.

use crate::error::CudaError;
use crate::ffi::driver::{CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32, CuStreamMemOp};
use crate::memory::DevicePtr;
use crate::stream::Stream;
use std::ffi::c_uint;

/// The most signals in a call of the driver.
const MOST: usize = 256;

/// A write of a word of GPU memory, also of another GPU's, or a wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Writes a value, after all that the stream has written before, also to other GPUs.
    Write(DevicePtr, u32),
    /// Waits until the word is at least this value.
    Wait(DevicePtr, u32),
}

impl Signal {
    /// Enqueues signals, or adds them to the graph that `stream` captures.
    pub fn enqueue(signals: &[Signal], stream: &Stream) -> Result<(), CudaError> {
        let context = stream.context();
        context.enter()?;
        for signals in signals.chunks(MOST) {
            let mut operations: Vec<CuStreamMemOp> =
                signals.iter().map(|signal| signal.operation()).collect();
            let (first, count) = (operations.as_mut_ptr(), operations.len() as c_uint);
            // SAFETY: as many operations as `count`; the words are GPU memory, as their creator promised.
            let status = unsafe { (context.driver().cuStreamBatchMemOp_v2)(stream.handle, count, first, 0) };
            context.check("cuStreamBatchMemOp", status)?;
        }
        Ok(())
    }

    fn operation(self) -> CuStreamMemOp {
        let (operation, DevicePtr(address), value) = match self {
            Signal::Write(place, value) => (CU_STREAM_MEM_OP_WRITE_VALUE_32, place, value),
            Signal::Wait(place, least) => (CU_STREAM_MEM_OP_WAIT_VALUE_32, place, least),
        };
        CuStreamMemOp { operation, address, value: u64::from(value), flags: 0, alias: [0; 2] }
    }
}
