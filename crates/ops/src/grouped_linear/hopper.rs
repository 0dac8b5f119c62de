//! The fast kernel of [`super::GroupedLinear`], [`super::GroupedDgrad`] and [`super::GroupedWgrad`]: bf16,
//! for Hopper's tensor cores.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{STARTS, kernel_name};
use crate::ragged::{self, CLUSTER, RAGGED, RaggedGroups, Sizes, TILE_M};
use xtrain_cuda::{
    Arch, CudaError, DevicePtr, Gpu, HOPPER, KernelSource, Operands, TENSOR_CORES, TensorMap, Work,
    kernel_struct,
};
use xtrain_program::{LinearGemm, Tail};
use xtrain_tensor::DType;

/// Columns of a tile: the most that one group of warps can multiply.
const TILE_N: usize = 192;
/// Columns of bf16 numbers in 128 bytes, the rows of a tile in shared memory.
const STRIP: usize = 64;
/// Products of a stage.
const TILE_K: usize = 64;
/// Rows that a warp stores at once.
const STORE_ROWS: usize = 16;

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("TILE_K", TILE_K as i64), ("TILE_N", TILE_N as i64)]],
    headers: &[TENSOR_CORES, HOPPER, RAGGED],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("grouped_linear/hopper.cu", include_str!("hopper.cu"))
};

kernel_struct! {
    #[repr(align(64))]
    struct Arguments {
        a: TensorMap,
        b: TensorMap,
        d_map: TensorMap,
        d: DevicePtr,
        accumulate: u32,
        padding: u32,
        groups: RaggedGroups,
    }
}

/// True if the kernel supports the GEMM on this GPU.
pub(super) fn supports(gpu: &Gpu, gemm: LinearGemm, operands: &Operands<'_>, sizes: Sizes) -> bool {
    // A gradient of weights can be added to, in f32 alone.
    let typed = operands.inputs[0].ty.dtype == DType::BF16
        && (gemm != LinearGemm::Wgrad || operands.outputs[0].ty.dtype == DType::F32);
    // The strides of a tensor map are multiples of 16 bytes.
    typed && ragged::supports(gpu, sizes, 8)
}

/// The launch of a GEMM that the kernel supports.
pub(super) fn prepare(
    gpu: &Gpu,
    gemm: LinearGemm,
    operands: &Operands<'_>,
    sizes: Sizes,
    tail: Tail,
) -> Result<Work, CudaError> {
    let Sizes { rows, experts, outputs, inputs, .. } = sizes;
    let [a, b] = [0, 1].map(|n| operands.inputs[n].place);
    let d = operands.outputs[0];
    let columns = sizes.columns(gemm);
    let map = |at, [columns, rows, experts]: [usize; 3], [wide, high]: [usize; 2]| {
        let strides = [columns, columns * rows];
        TensorMap::new(gpu.context(), DType::BF16, at, &[columns, rows, experts], &strides, &[wide, high, 1])
    };
    // Boxes of operands with columns along the products, and of others, whose columns are those of a strip.
    let (along, across) = ([TILE_K, TILE_M], [STRIP, TILE_K]);
    let shared = [STRIP, TILE_K / CLUSTER];
    let weights = [inputs, outputs, experts];
    let (a_map, b_map) = match gemm {
        LinearGemm::Fprop => {
            (map(a, [inputs, rows, 1], along)?, map(b, weights, [TILE_K, TILE_N / CLUSTER])?)
        }
        LinearGemm::Dgrad => (map(a, [outputs, rows, 1], along)?, map(b, weights, shared)?),
        LinearGemm::Wgrad => (map(a, [outputs, rows, 1], across)?, map(b, [inputs, rows, 1], shared)?),
    };
    let d_map = match gemm {
        // It is not used.
        LinearGemm::Wgrad => a_map,
        _ => map(d.place, [columns, rows, 1], [STRIP, STORE_ROWS])?,
    };
    let down = match gemm {
        LinearGemm::Wgrad => experts * outputs.div_ceil(CLUSTER * TILE_M),
        _ => rows.div_ceil(CLUSTER * TILE_M),
    };
    let function = gpu.function(&SOURCE, &[], kernel_name(gemm))?;
    let (groups, counter) = RaggedGroups::new(gpu, operands.inputs[STARTS].place, sizes, tail)?;
    let arguments = Arguments {
        a: a_map,
        b: b_map,
        d_map,
        d: d.place,
        accumulate: d.accumulate.into(),
        padding: 0,
        groups,
    };
    let blocks = ragged::blocks(gpu, down * columns.div_ceil(TILE_N));
    // SAFETY: the kernel takes one `Arguments`. Operands are in bf16, and d too unless it is a gradient of
    // weights, which is f32; their extents are those that the op's `infer` checked. There are experts + 1
    // starts, for which shared memory has room. The counter lives as long as the work, whose launches follow
    // each other, and is 0 between them. TMA accesses nothing outside of the tensor maps, and the kernel
    // writes no rows and columns outside of d, whatever the starts are.
    unsafe { ragged::work(function, blocks, arguments, counter) }
}
