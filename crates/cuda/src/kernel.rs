//! The trait of an op's GPU kernels, and their operands.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::layout::KernelValue;
use crate::memory::DevicePtr;
use crate::module::{Function, Launch};
use crate::stream::Stream;
use xtrain_tensor::TensorType;

/// The GPU kernel of an op.
pub trait CudaKernel: Send + Sync {
    /// The tensors that a run uses as workspace, planned with the operands. The answer needs no GPU.
    fn workspace(&self, _inputs: &[TensorType]) -> Vec<TensorType> {
        Vec::new()
    }

    /// Does everything that precedes the first run (compiling, choosing algorithms) and returns the work of a
    /// run. The operands stay at their addresses for as long as the work is used. Preparing may overwrite
    /// outputs and workspace.
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError>;
}

/// The tensors of an op. An input that the op computes in place has the address of its output.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// The inputs.
    pub inputs: &'a [CudaTensor],
    /// The outputs.
    pub outputs: &'a [CudaOutput],
    /// The tensors of [`CudaKernel::workspace`].
    pub workspace: &'a [CudaTensor],
}

/// A tensor in GPU memory, aligned to 256 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaTensor {
    /// Shape and element type.
    pub ty: TensorType,
    /// The address of the first byte.
    pub place: DevicePtr,
}

/// A tensor that a kernel writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOutput {
    /// Shape and element type.
    pub ty: TensorType,
    /// The address of the first byte.
    pub place: DevicePtr,
    /// True if the kernel adds to the tensor instead of overwriting it.
    pub accumulate: bool,
}

/// Work that can be enqueued on a stream any number of times.
pub struct Work(Box<dyn Fn(&Stream) -> Result<(), CudaError> + Send + Sync>);

impl Work {
    /// Work that `enqueue` puts into a stream.
    pub fn new(enqueue: impl Fn(&Stream) -> Result<(), CudaError> + Send + Sync + 'static) -> Work {
        Work(Box::new(enqueue))
    }

    /// One launch of a kernel.
    ///
    /// # Safety
    /// The terms of [`Function::launch`] hold whenever the work is enqueued.
    pub unsafe fn launch<A: KernelValue + Send + Sync + 'static>(
        function: Function,
        launch: Launch,
        arguments: A,
    ) -> Work {
        // SAFETY: the caller's promise.
        Work::new(move |stream| unsafe { function.launch(launch, &arguments, stream) })
    }

    /// Works in sequence.
    pub fn sequence(parts: Vec<Work>) -> Work {
        Work::new(move |stream| parts.iter().try_for_each(|part| part.enqueue(stream)))
    }

    /// Enqueues the work once on `stream`.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        (self.0)(stream)
    }
}
