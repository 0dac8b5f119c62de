//! A delay of a stream, for measurements without the other ranks of a run.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel_struct;
use crate::memory::{DeviceMemory, DevicePtr};
use crate::module::{Function, Launch};
use crate::source::KernelSource;
use crate::stream::Stream;
use std::time::Duration;

/// Kernels that let work of a stream take a given time at least. A graph may contain them.
pub struct Delay {
    begin: Function,
    end: Function,
    /// The time of the last beginning.
    begun: DeviceMemory,
}

kernel_struct! {
    struct Arguments {
        begun: DevicePtr,
        nanoseconds: u64,
    }
}

impl Delay {
    /// The source of the kernels.
    pub const SOURCE: KernelSource = KernelSource {
        structs: &[Arguments::LAYOUT],
        ..KernelSource::new("delay.cu", include_str!("delay.cu"))
    };

    /// Compiles the kernels. A delay serves one stream.
    pub fn new(gpu: &Gpu) -> Result<Delay, CudaError> {
        let [begin, end] = ["delay_begin", "delay_end"].map(|name| gpu.function(&Delay::SOURCE, &[], name));
        Ok(Delay { begin: begin?, end: end?, begun: DeviceMemory::new(gpu.context(), size_of::<u32>())? })
    }

    /// Begins the time on `stream`.
    pub fn begin(&self, stream: &Stream) -> Result<(), CudaError> {
        self.launch(&self.begin, Duration::ZERO, stream)
    }

    /// Lets `stream` wait until `duration` has passed since the last beginning.
    pub fn end(&self, duration: Duration, stream: &Stream) -> Result<(), CudaError> {
        self.launch(&self.end, duration, stream)
    }

    fn launch(&self, kernel: &Function, duration: Duration, stream: &Stream) -> Result<(), CudaError> {
        let arguments = Arguments { begun: self.begun.pointer(), nanoseconds: duration.as_nanos() as u64 };
        // SAFETY: both kernels take `Arguments`; the memory has four bytes, and only these kernels, which run
        // one after the other on a stream, use it.
        unsafe { kernel.launch(Launch::row(1, 1), &arguments, stream) }
    }
}
