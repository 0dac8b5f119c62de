//! The trait of an op's GPU kernels, and their operands.

use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::layout::KernelValue;
use crate::memory::{DevicePtr, fill};
use crate::module::{Function, Launch};
use crate::stream::Stream;
use crate::timing;
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

    /// The index of the input that determines which variant of the work a run needs; None if the work has one
    /// variant.
    fn varies_with(&self) -> Option<usize> {
        None
    }

    /// The variant of the work for this content of that input. Variant 0 is right for any content.
    fn variant(&self, _inputs: &[TensorType], _content: &[u8]) -> usize {
        0
    }
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

/// Variants of work, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variants(u32);

impl Variants {
    /// All of them.
    pub const ALL: Variants = Variants(u32::MAX);
    /// None of them.
    pub const NONE: Variants = Variants(0);
    /// The most variants that work has.
    pub const MOST: usize = u32::BITS as usize;

    /// Those of the first [`Variants::MOST`] numbers that `includes`.
    pub fn only(includes: impl Fn(usize) -> bool) -> Variants {
        let numbers = (0..Variants::MOST).filter(|&number| includes(number));
        Variants(numbers.fold(0, |all, number| all | 1 << number))
    }

    /// True if the variant of this number is one of them.
    pub fn contains(self, number: usize) -> bool {
        number < Variants::MOST && self.0 >> number & 1 == 1
    }
}

/// Work that can be enqueued on a stream any number of times: steps in sequence. Each runs in some variants.
pub struct Work(Vec<WorkStep>);

/// A step of [`Work`].
struct WorkStep {
    /// The variants that run it.
    variants: Variants,
    enqueue: Box<dyn Fn(&Stream) -> Result<(), CudaError> + Send + Sync>,
}

impl Work {
    /// Work that `enqueue` puts into a stream.
    pub fn new(enqueue: impl Fn(&Stream) -> Result<(), CudaError> + Send + Sync + 'static) -> Work {
        Work(vec![WorkStep { variants: Variants::ALL, enqueue: Box::new(enqueue) }])
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

    /// A fill with zeros.
    ///
    /// # Safety
    /// Whenever the work runs, the bytes are GPU memory that nothing else uses meanwhile.
    pub unsafe fn zeros(place: DevicePtr, bytes: usize) -> Work {
        // SAFETY: the caller's promise.
        Work::new(move |stream| unsafe { fill(stream.context(), place, 0, bytes, stream) })
    }

    /// Works in sequence.
    pub fn sequence(parts: Vec<Work>) -> Work {
        Work(parts.into_iter().flat_map(|part| part.0).collect())
    }

    /// The work, run only in `variants` of those in which it runs.
    pub fn only_in(mut self, variants: Variants) -> Work {
        for step in &mut self.0 {
            step.variants.0 &= variants.0;
        }
        self
    }

    /// Runs variant 0 of the work once, with nothing else running, and waits: libraries then load its
    /// kernels, which they cannot while a graph is captured.
    pub fn warm_up(&self, gpu: &Gpu) -> Result<(), CudaError> {
        timing::try_run(gpu.context(), |stream| self.enqueue(stream))?.map_or(Ok(()), Err)
    }

    /// Enqueues variant 0 of the work once on `stream`.
    pub fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        self.enqueue_variant(0, stream)
    }

    /// Enqueues a variant of the work once on `stream`.
    pub fn enqueue_variant(&self, number: usize, stream: &Stream) -> Result<(), CudaError> {
        let mut steps = self.0.iter().filter(|step| step.variants.contains(number));
        steps.try_for_each(|step| (step.enqueue)(stream))
    }
}
