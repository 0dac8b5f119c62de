//! The GEMM of FP8 operands with a scale for every 128 elements along k: a kernel for Hopper's tensor cores.
//!
//! It is a candidate beside cuBLASLt, whose wgrad is slower with such scales than with one scale per tensor
//! (`docs/decisions/block-scaled-gemm.md`).

use super::{Gemm, GemmOperands};
use crate::arch::Arch;
use crate::context::Context;
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel_struct;
use crate::memory::DevicePtr;
use crate::module::{Function, Launch};
use crate::source::{Constants, HOPPER, HOPPER_FP8, KernelSource, TENSOR_CORES};
use crate::stream::Stream;
use crate::tensor_map::TensorMap;
use xtrain_tensor::{DType, Scaling, TILE};

/// The variants of the kernel: formats of the operands, scaling of B, type of D.
const VARIANTS: [Constants; 12] = [
    &[("A_E5M2", 0), ("B_E5M2", 0), ("B_TILES", 0), ("OUT_F32", 0)],
    &[("A_E5M2", 0), ("B_E5M2", 0), ("B_TILES", 0), ("OUT_F32", 1)],
    &[("A_E5M2", 0), ("B_E5M2", 0), ("B_TILES", 1), ("OUT_F32", 0)],
    &[("A_E5M2", 0), ("B_E5M2", 0), ("B_TILES", 1), ("OUT_F32", 1)],
    &[("A_E5M2", 1), ("B_E5M2", 0), ("B_TILES", 0), ("OUT_F32", 0)],
    &[("A_E5M2", 1), ("B_E5M2", 0), ("B_TILES", 0), ("OUT_F32", 1)],
    &[("A_E5M2", 1), ("B_E5M2", 0), ("B_TILES", 1), ("OUT_F32", 0)],
    &[("A_E5M2", 1), ("B_E5M2", 0), ("B_TILES", 1), ("OUT_F32", 1)],
    &[("A_E5M2", 0), ("B_E5M2", 1), ("B_TILES", 0), ("OUT_F32", 0)],
    &[("A_E5M2", 0), ("B_E5M2", 1), ("B_TILES", 0), ("OUT_F32", 1)],
    &[("A_E5M2", 0), ("B_E5M2", 1), ("B_TILES", 1), ("OUT_F32", 0)],
    &[("A_E5M2", 0), ("B_E5M2", 1), ("B_TILES", 1), ("OUT_F32", 1)],
];

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[TENSOR_CORES, HOPPER, HOPPER_FP8],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    variants: || VARIANTS.map(<[_]>::to_vec).to_vec(),
    ..KernelSource::new("gemm/block_scaled.cu", include_str!("block_scaled.cu"))
};

/// Rows and columns of a block's tile; blocks of a cluster, side by side.
const TILE_M: usize = 256;
const TILE_N: usize = 128;
const CLUSTER: usize = 2;

const THREADS: u32 = 384;
const STAGES: usize = 4;
/// Operands, scales and the two barriers of all stages, and padding for alignment.
const SHARED_BYTES: usize = STAGES * ((TILE_M + TILE_N) * (TILE + size_of::<f32>()) + 16) + 1024;

/// Sizes and strides must be multiples of these: copies and stores move 16 bytes at a time.
const SIZES: usize = 16;
const D_ROWS: usize = 4;

kernel_struct! {
    #[repr(align(64))]
    struct Arguments {
        a: TensorMap,
        b: TensorMap,
        a_scale: DevicePtr,
        b_scale: DevicePtr,
        d: DevicePtr,
        d_row: u64,
        m: u32,
        n: u32,
        /// Blocks of 128 along k.
        blocks: u32,
        b_across: u32,
        /// Tiles of clusters along m and n.
        down: u32,
        across: u32,
        accumulate: u32,
        padding: u32,
    }
}

/// The GEMM with its kernel and operands.
pub(super) struct BlockScaledGemm {
    function: Function,
    launch: Launch,
    arguments: Arguments,
}

impl BlockScaledGemm {
    /// The GEMM; None if the kernel does not support the GEMM, its operands or this GPU.
    pub(super) fn new(
        gpu: &Gpu,
        gemm: &Gemm,
        operands: &GemmOperands,
    ) -> Result<Option<BlockScaledGemm>, CudaError> {
        let (Some(scales), true) =
            (operands.scales, gpu.info().arch == Arch::SM90 && supports(gemm, operands))
        else {
            return Ok(None);
        };
        let Gemm { m, n, k, .. } = *gemm;
        let is = |yes: bool| i64::from(yes);
        let b_tiles = gemm.b.scaling == Some(Scaling::Tile);
        let defines = [
            ("A_E5M2", is(gemm.a.dtype == DType::E5M2)),
            ("B_E5M2", is(gemm.b.dtype == DType::E5M2)),
            ("B_TILES", is(b_tiles)),
            ("OUT_F32", is(gemm.d == DType::F32)),
        ];
        let function = gpu.function(&SOURCE, &defines, "gemm_block_scaled")?;
        function.allow_shared(SHARED_BYTES as u32)?;
        let (down, across) = (m.div_ceil(TILE_M), n.div_ceil(CLUSTER * TILE_N));
        let arguments = Arguments {
            a: rows(gpu.context(), operands.a, [m, k], gemm.a.stride)?,
            b: TensorMap::by_sixteen_rows(gpu.context(), operands.b, [n, k], gemm.b.stride, [TILE_N, TILE])?,
            a_scale: scales[0],
            b_scale: scales[1],
            d: operands.d,
            d_row: gemm.d_stride as u64,
            m: m as u32,
            n: n as u32,
            blocks: k.div_ceil(TILE) as u32,
            b_across: Scaling::Block.shape(n, k)[1] as u32,
            down: down as u32,
            across: across as u32,
            accumulate: gemm.accumulate.into(),
            padding: 0,
        };
        let clusters = (down * across).min(gpu.info().multiprocessors as usize / CLUSTER).max(1);
        let row = Launch::row((clusters * CLUSTER) as u32, THREADS).shared(SHARED_BYTES as u32);
        let launch = Launch { cluster: [CLUSTER as u32, 1, 1], ..row };
        Ok(Some(BlockScaledGemm { function, launch, arguments }))
    }

    /// Enqueues the GEMM on `stream`.
    pub(super) fn enqueue(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the kernel takes one `Arguments`, of the formats and types that it was compiled for; the
        // operands are as large as the GEMM says, are aligned as `supports` requires, and keep their
        // addresses, as the caller that named them promises.
        unsafe { self.function.launch(self.launch, &self.arguments, stream) }
    }
}

/// True if the kernel supports the GEMM with operands at these addresses.
fn supports(gemm: &Gemm, operands: &GemmOperands) -> bool {
    let Gemm { m, n, k, a, b, d, d_stride, accumulate, fast_accumulation } = *gemm;
    let scaled =
        a.scaling == Some(Scaling::Tile) && matches!(b.scaling, Some(Scaling::Tile | Scaling::Block));
    let stored = !a.transposed && b.transposed;
    let sized = [m, n, k, a.stride, b.stride].iter().all(|size| size.is_multiple_of(SIZES))
        && d_stride.is_multiple_of(D_ROWS)
        && [m, n, k].iter().all(|&size| size <= i32::MAX as usize);
    // Only an f32 result can be added to.
    let written = d == DType::F32 || d == DType::BF16 && !accumulate;
    let places =
        [operands.a, operands.b, operands.d].into_iter().chain(operands.scales.into_iter().flatten());
    let aligned = places.into_iter().all(|place| place.0.is_multiple_of(16));
    scaled && stored && sized && written && aligned && operands.bias.is_none() && !fast_accumulation
}

/// The tensor map of a matrix: boxes of 128 rows by 128 columns, with zeros outside the matrix.
fn rows(
    context: &Context,
    at: DevicePtr,
    [rows, cols]: [usize; 2],
    stride: usize,
) -> Result<TensorMap, CudaError> {
    TensorMap::new(context, DType::E4M3, at, &[cols, rows], &[stride], &[TILE, TILE_M / CLUSTER])
}
