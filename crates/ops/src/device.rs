//! What the kernels of several ops on a card have in common.

use xtrain_cuda::{CudaError, CudaOutput, CudaTensor, DeviceMemory, DevicePtr, Gpu, Launch, Stream};
use xtrain_tensor::{DType, TensorType};

/// Threads of a block of kernels that treat every element by itself.
pub(crate) const ELEMENTWISE_THREADS: u32 = 256;

/// The partial sums, at most, that a sum over rows is put together from. Fixed, so that results and plans depend on shapes alone, and
/// enough blocks for any card.
pub(crate) const PARTS: usize = 512;

/// A tensor of which a kernel learns when it runs whether it holds f32 or bf16: `Floats` of the prelude.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Floats {
    at: DevicePtr,
    is_bf16: u64,
}

impl Floats {
    /// None, where a kernel reads none.
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

/// How many elements 16 bytes hold.
pub(crate) fn lanes(ty: TensorType) -> usize {
    16 / ty.dtype.bytes(1)
}

/// The least whole number of warps with `threads` threads, within what a block may have.
pub(crate) fn warps_of(threads: usize, most: usize) -> u32 {
    threads.next_multiple_of(32).clamp(32, most) as u32
}

/// A grid of blocks in two dimensions, at least one of them.
pub(crate) fn plane(grid: [usize; 2], block: [u32; 2]) -> Launch {
    let [x, y] = grid.map(|blocks| blocks.max(1) as u32);
    Launch { grid: [x, y, 1], block: [block[0], block[1], 1], ..Launch::row(1, 1) }
}

/// These words in the card's memory: what a kernel that treats many tensors at once reads of them.
pub(crate) fn table(gpu: &Gpu, words: &[u64]) -> Result<DeviceMemory, CudaError> {
    let memory = DeviceMemory::new(gpu.context(), size_of_val(words))?;
    if words.is_empty() {
        return Ok(memory);
    }
    let stream = Stream::new(gpu.context())?;
    memory.all().write(bytemuck::cast_slice(words), &stream)?;
    stream.synchronize()?;
    Ok(memory)
}

/// The end of a kernel's name: the element type that it is for.
///
/// # Panics
/// If no kernel on a card is for it: programs for cards hold f32 and bf16.
pub(crate) fn suffix(ty: TensorType) -> &'static str {
    match ty.dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => panic!("kernels on a card compute with f32 and bf16, not {other}"),
    }
}
