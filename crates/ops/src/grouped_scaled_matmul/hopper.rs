//! The fast kernel of [`GroupedScaledMatmul`], for Hopper's tensor cores.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{GroupedScaledMatmul, STARTS};
use crate::ragged::{self, CLUSTER, RAGGED, RaggedGroups, Sizes, TILE_M};
use xtrain_cuda::{
    Arch, CudaError, Defines, DevicePtr, Gpu, HOPPER, HOPPER_FP8, KernelSource, Operands, TENSOR_CORES,
    TensorMap, Work, kernel_struct,
};
use xtrain_program::LinearGemm;
use xtrain_tensor::{DType, Scaling, TILE};

/// Sizes are multiples of this: copies move 16 bytes at a time, and rows of b are permuted by so many.
const UNIT: usize = 16;

/// Columns of a tile.
const TILE_N: usize = 256;

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("TILE_K", TILE as i64), ("TILE_N", TILE_N as i64)]],
    headers: &[TENSOR_CORES, HOPPER, HOPPER_FP8, RAGGED],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    // Gradients with one scale are E5M2.
    variants: || [(false, true), (false, false), (true, false)].map(defines).to_vec(),
    ..KernelSource::new("grouped_scaled_matmul/hopper.cu", include_str!("hopper.cu"))
};

/// The macros for operands, of which a is in E5M2 or E4M3, with scales of blocks or of whole tensors.
fn defines((e5m2, by_blocks): (bool, bool)) -> Defines {
    vec![("A_E5M2", e5m2.into()), ("BY_BLOCKS", by_blocks.into())]
}

kernel_struct! {
    #[repr(align(64))]
    struct Arguments {
        a: TensorMap,
        b: TensorMap,
        a_scale: DevicePtr,
        b_scale: DevicePtr,
        d: DevicePtr,
        b_across: u32,
        accumulate: u32,
        groups: RaggedGroups,
    }
}

/// True if the kernel supports the GEMM on this GPU.
pub(super) fn supports(gpu: &Gpu, op: &GroupedScaledMatmul, operands: &Operands<'_>, sizes: Sizes) -> bool {
    let Sizes { rows, experts, outputs, .. } = sizes;
    let [a, b, d] = [operands.inputs[0].ty, operands.inputs[2].ty, operands.outputs[0].ty].map(|ty| ty.dtype);
    let (out, blocks) = match op.gemm {
        LinearGemm::Wgrad => (DType::F32, Scaling::Tile),
        _ => (DType::BF16, Scaling::Block),
    };
    let is_gradient = op.gemm != LinearGemm::Fprop;
    let scaled = match op.scaling {
        [Scaling::Tensor, Scaling::Tensor] => (a == DType::E5M2) == is_gradient,
        scaling => scaling == [Scaling::Tile, blocks] && a == DType::E4M3,
    };
    // The last products of an expert in dgrad are fetched without those of the next one.
    let separate = op.gemm != LinearGemm::Dgrad || outputs.is_multiple_of(TILE);
    let sized = rows.is_multiple_of(UNIT) && experts.saturating_mul(outputs) <= 1 << 30;
    scaled && b == DType::E4M3 && d == out && separate && sized && ragged::supports(gpu, sizes, UNIT)
}

/// The name of a kernel.
fn kernel_name(gemm: LinearGemm) -> &'static str {
    match gemm {
        LinearGemm::Fprop => "grouped_scaled_fprop",
        LinearGemm::Dgrad => "grouped_scaled_dgrad",
        LinearGemm::Wgrad => "grouped_scaled_wgrad",
    }
}

/// The launch of a GEMM that the kernel supports.
pub(super) fn prepare(
    gpu: &Gpu,
    op: &GroupedScaledMatmul,
    operands: &Operands<'_>,
    sizes: Sizes,
) -> Result<Work, CudaError> {
    let Sizes { rows, experts, outputs, .. } = sizes;
    let [a, a_scale, b, b_scale] = [0, 1, 2, 3].map(|n| operands.inputs[n]);
    let d = operands.outputs[0];
    let down = match op.gemm {
        LinearGemm::Wgrad => experts * outputs.div_ceil(CLUSTER * TILE_M),
        _ => rows.div_ceil(CLUSTER * TILE_M),
    };
    let blocks = ragged::blocks(gpu, down * sizes.columns(op.gemm).div_ceil(TILE_N));
    let of = (a.ty.dtype == DType::E5M2, op.scaling[0] == Scaling::Tile);
    let function = gpu.function(&SOURCE, &defines(of), kernel_name(op.gemm))?;
    let (groups, counter) = RaggedGroups::new(gpu, operands.inputs[STARTS].place, sizes, op.tail)?;
    let (b_rows, b_columns) = b.ty.shape.rows_cols();
    let boxed = [TILE_N / CLUSTER, TILE];
    let arguments = Arguments {
        a: rows_of(gpu, a.place, a.ty.shape.rows_cols())?,
        b: TensorMap::by_sixteen_rows(gpu.context(), b.place, [b_rows, b_columns], b_columns, boxed)?,
        a_scale: a_scale.place,
        b_scale: b_scale.place,
        d: d.place,
        b_across: op.scaling[1].steps(b_rows, b_columns).0 as u32,
        accumulate: d.accumulate.into(),
        groups,
    };
    // SAFETY: the kernel takes one `Arguments`, of the formats and scales that it was compiled for; d is f32
    // for gradients of weights, else bf16. Operands and scales have the extents that the op's `infer`
    // checked. There are experts + 1 starts, for which shared memory has room. The counter lives as long as
    // the work, whose launches follow each other, and is 0 between them. TMA accesses nothing outside of
    // the tensor maps, and the kernel writes no rows and columns outside of d, whatever the starts are.
    unsafe { ragged::work(function, blocks, arguments, counter) }
}

/// The tensor map of a matrix: boxes of a tile's rows by 128 columns.
fn rows_of(gpu: &Gpu, at: DevicePtr, (rows, cols): (usize, usize)) -> Result<TensorMap, CudaError> {
    let (extents, strides) = ([cols, rows, 1], [cols, cols * rows]);
    TensorMap::new(gpu.context(), DType::E4M3, at, &extents, &strides, &[TILE, TILE_M, 1])
}
