//! Helpers for launching the GPU kernels of several ops.

use xtrain_cuda::{
    CudaError, CudaOutput, CudaTensor, DeviceMemory, DevicePtr, Gpu, KernelValue, Launch, Stream, Work,
    kernel_bytes, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Threads per block of elementwise kernels.
pub(crate) const ELEMENTWISE_THREADS: u32 = 256;

/// Maximum number of partial sums in a sum over rows. A constant, so that results and plans depend on shapes
/// alone; large enough to give every multiprocessor of any GPU a block.
pub(crate) const PARTS: usize = 512;

kernel_struct! {
    /// Pointer to f32 or bf16 elements with the type as a run-time flag: the prelude's `Floats`.
    pub(crate) struct Floats {
        data: DevicePtr,
        is_bf16: u64,
    }
}

impl Floats {
    /// A null pointer, for an optional operand that is absent.
    pub(crate) fn none() -> Floats {
        Floats { data: DevicePtr(0), is_bf16: 0 }
    }
}

impl From<CudaTensor> for Floats {
    fn from(tensor: CudaTensor) -> Self {
        Floats { data: tensor.place, is_bf16: u64::from(suffix(tensor.ty) == "bf16") }
    }
}

impl From<CudaOutput> for Floats {
    fn from(output: CudaOutput) -> Self {
        Floats::from(CudaTensor { ty: output.ty, place: output.place })
    }
}

/// The number of elements in 16 bytes.
pub(crate) fn lanes(ty: TensorType) -> usize {
    16 / ty.dtype.bytes(1)
}

/// `threads` rounded up to whole warps, at least one warp and at most `max` threads.
pub(crate) fn warps_of(threads: usize, max: usize) -> u32 {
    threads.next_multiple_of(32).clamp(32, max) as u32
}

/// A two-dimensional launch with at least one block.
pub(crate) fn plane(grid: [usize; 2], block: [u32; 2]) -> Launch {
    let [x, y] = grid.map(|blocks| blocks.max(1) as u32);
    Launch { grid: [x, y, 1], block: [block[0], block[1], 1], ..Launch::row(1, 1) }
}

/// Path and launch of a kernel for `rows` rows as wide as those of `ty`. A thread has as many columns as 16
/// bytes hold on the path "vector", and one on the path "any".
pub(crate) fn row_launch(ty: TensorType, rows: usize) -> (&'static str, Launch) {
    let width = ty.shape.rows_cols().1;
    let (path, n) = if width.is_multiple_of(lanes(ty)) { ("vector", lanes(ty)) } else { ("any", 1) };
    let threads = warps_of(width.div_ceil(n), ELEMENTWISE_THREADS as usize);
    (path, plane([rows, width.div_ceil(n * threads as usize)], [threads, 1]))
}

/// A launch with a thread for each element, and at least one block.
pub(crate) fn elementwise_launch(elements: usize) -> Launch {
    let blocks = elements.div_ceil(ELEMENTWISE_THREADS as usize).max(1);
    Launch::row(blocks as u32, ELEMENTWISE_THREADS)
}

/// A table in GPU memory, such as the pointers that a kernel over many tensors reads.
pub(crate) fn table<T: KernelValue>(gpu: &Gpu, values: &[T]) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(gpu.context(), size_of_val(values))?;
    if values.is_empty() {
        return Ok(memory);
    }
    let stream = Stream::new(gpu.context())?;
    memory.all().write(&kernel_bytes(values), &stream)?;
    stream.synchronize()?;
    Ok(memory)
}

/// Work that holds memory which it uses.
pub(crate) fn holding(work: Work, memory: DeviceMemory) -> Work {
    Work::new(move |stream| {
        let _held = &memory;
        work.enqueue(stream)
    })
}

/// Suffix of a kernel's name for this element type.
///
/// # Panics
/// If the type is neither f32 nor bf16, the only plain types in programs for a GPU.
pub(crate) fn suffix(ty: TensorType) -> &'static str {
    match ty.dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => panic!("GPU kernels compute with f32 and bf16, not {other}"),
    }
}
