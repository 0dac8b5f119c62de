//! Parts of the kernels for Hopper that compute one GEMM per group of rows of a ragged tensor.
#![allow(unsafe_code, reason = "it launches kernels")]

use crate::device::{holding, table};
use xtrain_cuda::{
    Arch, CudaError, DeviceMemory, DevicePtr, Function, Gpu, Header, KernelValue, Launch, Work, kernel_struct,
};
use xtrain_program::{LinearGemm, Tail};

/// Blocks of a cluster, whose row tiles are below each other: 1 or 2.
pub(crate) const CLUSTER: usize = 2;
/// Row tiles of clusters that are computed before the columns of further ones.
const BAND: usize = 8;
/// Rows of a tile.
pub(crate) const TILE_M: usize = 128;
/// Threads of a block: four warps that fetch, schedule and write zeros, eight that multiply.
const THREADS: u32 = 384;
/// Most experts: shared memory has room for so many starts.
const MAX_EXPERTS: usize = 1024;
/// Most rows: starts are 16-bit numbers of tiles in shared memory.
pub(crate) const MAX_ROWS: usize = u16::MAX as usize * TILE_M;
/// Most stages of a kernel.
const MAX_STAGES: usize = 5;

/// Shared memory of operands and results.
const TILES_BYTES: usize = 224 * 1024;
/// Shared memory of a block, with the barriers of stages, of turns and of tiles, two tiles and their numbers,
/// and the starts of groups.
pub(crate) const SHARED_BYTES: usize =
    TILES_BYTES + 2 * 8 * MAX_STAGES + 5 * 2 * 8 + 2 * (16 + 4) + size_of::<u16>() * (MAX_EXPERTS + 1);
const _: () = assert!(SHARED_BYTES <= 227 * 1024, "a block of Hopper has no more");

/// The name by which `XTRAIN_PREFER` selects the kernels for all GPUs instead.
pub(crate) const PORTABLE: &str = "grouped_portable";

pub(crate) const RAGGED: Header = Header::new("ragged.cuh", include_str!("ragged.cuh")).with_constants(&[&[
    ("CLUSTER", CLUSTER as i64),
    ("BAND", BAND as i64),
    ("TILE_M", TILE_M as i64),
    ("TILES_BYTES", TILES_BYTES as i64),
    ("MAX_STAGES", MAX_STAGES as i64),
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

impl Sizes {
    /// Columns of a GEMM's output.
    pub(crate) fn columns(self, gemm: LinearGemm) -> usize {
        if gemm == LinearGemm::Fprop { self.outputs } else { self.inputs }
    }
}

kernel_struct! {
    pub(crate) struct RaggedGroups {
        starts: DevicePtr,
        counter: DevicePtr,
        rows: u32,
        experts: u32,
        outputs: u32,
        inputs: u32,
        zeroed: u32,
        padding: u32,
    }
}

impl RaggedGroups {
    /// The groups that begin at the rows in `starts`, before this tail of the output, and the memory of the
    /// counter of tiles.
    pub(crate) fn new(
        gpu: &Gpu,
        starts: DevicePtr,
        sizes: Sizes,
        tail: Tail,
    ) -> Result<(RaggedGroups, DeviceMemory), CudaError> {
        let Sizes { rows, experts, outputs, inputs, .. } = sizes;
        let counter = table(gpu, &[0u32])?;
        let groups = RaggedGroups {
            starts,
            counter: counter.pointer(),
            rows: rows as u32,
            experts: experts as u32,
            outputs: outputs as u32,
            inputs: inputs as u32,
            // Groups end with a tile. If there are none, the first tile is not in the tail.
            zeroed: if tail.is_undefined() { rows.min(TILE_M) } else { rows } as u32,
            padding: 0,
        };
        Ok((groups, counter))
    }
}

/// True if this GPU has the kernels, and they support these sizes, of which outputs and inputs are multiples
/// of `unit`.
pub(crate) fn supports(gpu: &Gpu, sizes: Sizes, unit: usize) -> bool {
    let Sizes { rows, experts, align, outputs, inputs } = sizes;
    // The coordinates and extents of a tensor map are numbers of 32 bits.
    let sized = [outputs, inputs].iter().all(|size| size.is_multiple_of(unit))
        && (1..=MAX_ROWS).contains(&rows)
        && [outputs, inputs].iter().all(|&size| (1..=1 << 30).contains(&size))
        && align.is_multiple_of(TILE_M)
        && (1..=MAX_EXPERTS).contains(&experts);
    gpu.info().arch == Arch::SM90 && sized && gpu.preferred().iter().all(|name| name != PORTABLE)
}

/// Blocks of a launch for so many tiles of clusters.
pub(crate) fn blocks(gpu: &Gpu, tiles: usize) -> u32 {
    let most = (gpu.info().multiprocessors as usize / CLUSTER).max(1);
    (tiles.min(most) * CLUSTER) as u32
}

/// One launch of a kernel with so many blocks, which holds its counter of tiles.
///
/// # Safety
/// As [`Work::launch`]: the arguments are those of the kernel, and the counter is that of its
/// [`RaggedGroups`].
pub(crate) unsafe fn work<A: KernelValue + Send + Sync + 'static>(
    function: Function,
    blocks: u32,
    arguments: A,
    counter: DeviceMemory,
) -> Result<Work, CudaError> {
    function.allow_shared(SHARED_BYTES as u32)?;
    let row = Launch::row(blocks, THREADS).shared(SHARED_BYTES as u32);
    let launch = Launch { cluster: [CLUSTER as u32, 1, 1], ..row };
    // SAFETY: the caller's promise.
    Ok(holding(unsafe { Work::launch(function, launch, arguments) }, counter))
}
