//! Code that the GPU kernels of several ops share.

use xtrain_cuda::{
    CudaError, CudaOutput, CudaTensor, DeviceMemory, DevicePtr, Gpu, KernelValue, Launch, Stream,
    kernel_bytes, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Threads of a block of kernels that treat every element by itself.
pub(crate) const ELEMENTWISE_THREADS: u32 = 256;

/// The most partial sums of a sum over rows. A constant, so that results and plans depend on shapes alone,
/// and enough blocks for any GPU.
pub(crate) const PARTS: usize = 512;

kernel_struct! {
    /// A tensor whose type, f32 or bf16, a kernel reads at run time: `Floats` of the prelude.
    pub(crate) struct Floats {
        at: DevicePtr,
        is_bf16: u64,
    }
}

impl Floats {
    /// No tensor.
    pub(crate) fn none() -> Floats {
        Floats { at: DevicePtr(0), is_bf16: 0 }
    }
}

impl From<CudaTensor> for Floats {
    fn from(tensor: CudaTensor) -> Self {
        Floats { at: tensor.place, is_bf16: u64::from(suffix(tensor.ty) == "bf16") }
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

/// The fewest whole warps with `threads` threads, at most a block's limit.
pub(crate) fn warps_of(threads: usize, most: usize) -> u32 {
    threads.next_multiple_of(32).clamp(32, most) as u32
}

/// A grid of blocks in two dimensions, at least one of them.
pub(crate) fn plane(grid: [usize; 2], block: [u32; 2]) -> Launch {
    let [x, y] = grid.map(|blocks| blocks.max(1) as u32);
    Launch { grid: [x, y, 1], block: [block[0], block[1], 1], ..Launch::row(1, 1) }
}

/// Values in GPU memory: the table that a kernel over many tensors reads.
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

/// The suffix of a kernel's name: its element type.
///
/// # Panics
/// If no kernel on a GPU is for it: programs for GPUs hold f32 and bf16.
pub(crate) fn suffix(ty: TensorType) -> &'static str {
    match ty.dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => panic!("kernels on a card compute with f32 and bf16, not {other}"),
    }
}
