//! The trait behind which an op's kernels for a card stand, and what they are handed.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::memory::DevicePtr;
use crate::module::{Function, Launch};
use crate::stream::Stream;
use xtrain_tensor::TensorType;

/// How an op is computed on a card.
pub trait CudaKernel: Send + Sync {
    /// The tensors that a run works in, which are planned with the operands: known without a card.
    fn workspace(&self, _inputs: &[TensorType]) -> Vec<TensorType> {
        Vec::new()
    }

    /// All that can be done before the first run (compiling, choosing algorithms), and what puts a run into a stream. The operands keep
    /// their places for as long as what is returned is used; what stands in outputs and workspace may be overwritten here already.
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError>;
}

/// What an op reads, writes and works in. An input that an output is computed over has that output's place.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    /// Its inputs.
    pub inputs: &'a [CudaTensor],
    /// Its outputs.
    pub outputs: &'a [CudaOutput],
    /// What [`CudaKernel::workspace`] asked for.
    pub workspace: &'a [CudaTensor],
}

/// A tensor in a card's memory, at a multiple of 256 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaTensor {
    /// Shape and element type.
    pub ty: TensorType,
    /// Its first byte.
    pub place: DevicePtr,
}

/// A tensor to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOutput {
    /// Shape and element type.
    pub ty: TensorType,
    /// Its first byte.
    pub place: DevicePtr,
    /// Whether the kernel adds to what is there instead of overwriting it.
    pub accumulate: bool,
}

/// What puts work into a stream, as often as it is asked to.
pub struct Work(Box<dyn Fn(&Stream) -> Result<(), CudaError> + Send + Sync>);

impl Work {
    /// Work that `put` puts in.
    pub fn new(put: impl Fn(&Stream) -> Result<(), CudaError> + Send + Sync + 'static) -> Work {
        Work(Box::new(put))
    }

    /// One launch of a kernel.
    ///
    /// # Safety
    /// As [`Function::launch`], whenever the work is put in.
    pub unsafe fn launch<A: Copy + Send + Sync + 'static>(
        function: Function,
        launch: Launch,
        arguments: A,
    ) -> Work {
        // SAFETY: the caller's promise.
        Work::new(move |stream| unsafe { function.launch(launch, &arguments, stream) })
    }

    /// One after the other.
    pub fn sequence(parts: Vec<Work>) -> Work {
        Work::new(move |stream| parts.iter().try_for_each(|part| part.enqueue(stream)))
    }

    /// Puts it into `stream` once.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        (self.0)(stream)
    }
}
