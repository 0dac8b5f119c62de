//! Parts of the kernels for Hopper that compute one GEMM per group of rows of a ragged tensor.
#![allow(unsafe_code, reason = "it launches kernels")]

use crate::device::table;
use xtrain_cuda::{
    Arch, CudaError, DeviceMemory, DevicePtr, Function, Gpu, Header, KernelValue, Launch, Work,
    kernel_struct, preferred_algorithms,
};

/// Blocks of a cluster, whose row tiles are below each other: 1 or 2.
pub(crate) const CLUSTER: usize = 2;
/// Row tiles of clusters that are computed before the columns of further ones.
const BAND: usize = 8;
/// Rows of a tile.
pub(crate) const TILE_M: usize = 128;
/// Threads of a block: four warps that fetch and write zeros, eight that multiply.
const THREADS: u32 = 384;
/// Most experts: shared memory has room for so many starts.
pub(crate) const MAX_EXPERTS: usize = 448;

/// The name by which `XTRAIN_PREFER` selects the kernels for all GPUs instead.
const PORTABLE: &str = "grouped_portable";

pub(crate) const RAGGED: Header = Header::new("ragged.cuh", include_str!("ragged.cuh")).with_constants(&[&[
    ("CLUSTER", CLUSTER as i64),
    ("BAND", BAND as i64),
    ("TILE_M", TILE_M as i64),
]]);

/// Sizes of an op: rows of the ragged tensors, experts, the multiple at which their rows begin, outputs and
/// inputs of an expert.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) rows: usize,
    pub(crate) experts: usize,
    pub(crate) align: usize,
    pub(crate) outputs: usize,
    pub(crate) inputs: usize,
}

kernel_struct! {
    pub(crate) struct Groups {
        start: DevicePtr,
        counter: DevicePtr,
        rows: u32,
        experts: u32,
        outputs: u32,
        inputs: u32,
    }
}

impl Groups {
    /// The groups that begin at the rows in `start`, and the memory of the counter of tiles.
    pub(crate) fn new(
        gpu: &Gpu,
        start: DevicePtr,
        sizes: Sizes,
    ) -> Result<(Groups, DeviceMemory), CudaError> {
        let Sizes { rows, experts, outputs, inputs, .. } = sizes;
        let counter = table(gpu, &[0u32])?;
        let groups = Groups {
            start,
            counter: counter.pointer(),
            rows: rows as u32,
            experts: experts as u32,
            outputs: outputs as u32,
            inputs: inputs as u32,
        };
        Ok((groups, counter))
    }
}

/// True if this GPU has the kernels, and they support these sizes, of which outputs and inputs are multiples
/// of `unit`.
pub(crate) fn supports(gpu: &Gpu, sizes: Sizes, unit: usize) -> bool {
    let Sizes { rows, experts, align, outputs, inputs } = sizes;
    // The copy engine's coordinates and extents are numbers of 32 bits.
    let sized = [outputs, inputs].iter().all(|size| size.is_multiple_of(unit))
        && [rows, outputs, inputs].iter().all(|&size| (1..=1 << 30).contains(&size))
        && align.is_multiple_of(TILE_M)
        && (1..=MAX_EXPERTS).contains(&experts);
    let preferred = preferred_algorithms();
    gpu.info().arch == Arch::SM90 && sized && preferred.iter().all(|name| name != PORTABLE)
}

/// Blocks of a launch for so many tiles of clusters.
pub(crate) fn blocks(gpu: &Gpu, tiles: usize) -> u32 {
    let most = (gpu.info().multiprocessors as usize / CLUSTER).max(1);
    (tiles.min(most) * CLUSTER) as u32
}

/// One launch of a kernel with so many blocks and bytes of shared memory, which holds its counter of tiles.
///
/// # Safety
/// As [`Work::launch`]: the arguments are those of the kernel, and the counter is that of its [`Groups`].
pub(crate) unsafe fn work<A: KernelValue + Send + Sync + 'static>(
    function: Function,
    blocks: u32,
    shared_bytes: usize,
    arguments: A,
    counter: DeviceMemory,
) -> Work {
    let row = Launch::row(blocks, THREADS).shared(shared_bytes as u32);
    let launch = Launch { cluster: [CLUSTER as u32, 1, 1], ..row };
    // SAFETY: the caller's promise.
    let work = unsafe { Work::launch(function, launch, arguments) };
    Work::new(move |stream| {
        let _held = &counter;
        work.enqueue(stream)
    })
}
