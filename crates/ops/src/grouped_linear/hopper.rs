//! The fast kernel of [`super::GroupedLinear`], [`super::GroupedDgrad`] and [`super::GroupedWgrad`]: bf16,
//! for Hopper's tensor cores.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::START;
use super::product::Product;
use crate::ragged::{self, CLUSTER, Groups, RAGGED, Sizes, TILE_M};
use xtrain_cuda::{
    Arch, CudaError, DevicePtr, Gpu, HOPPER, KernelSource, Operands, TENSOR_CORES, TensorMap, Work,
    kernel_struct,
};
use xtrain_tensor::DType;

/// Shared memory of the stages: as many as fit, 4 of tiles of 256 columns.
const OPERAND_BYTES: usize = 4 * 48 * 1024;
/// Columns of a tile; those of the products decide which.
const WIDTHS: [usize; 3] = [256, 192, 128];

/// Products of a stage.
const TILE_K: usize = 64;
/// Columns of bf16 numbers in 128 bytes, the rows of a tile in shared memory.
const STRIP: usize = 64;
/// Rows that a warp stores at once, and the shared memory of all warps for that: two buffers each.
const STORE_ROWS: usize = 16;
const STORE_BYTES: usize = 8 * 2 * STORE_ROWS * 128;
/// The starts of groups and the barriers of the stages share this much.
const SMALL_BYTES: usize = 1984;
/// Shared memory of a block, with padding for alignment.
const SHARED_BYTES: usize = OPERAND_BYTES + STORE_BYTES + SMALL_BYTES + 1024;

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("OPERAND_BYTES", OPERAND_BYTES as i64), ("TILE_K", TILE_K as i64)]],
    headers: &[TENSOR_CORES, HOPPER, RAGGED],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    variants: || WIDTHS.map(|width| vec![("TILE_N", width as i64)]).to_vec(),
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
        groups: Groups,
    }
}

/// True if the kernel supports the product on this GPU.
pub(super) fn supports(gpu: &Gpu, product: Product, operands: &Operands<'_>, sizes: Sizes) -> bool {
    // A gradient of weights can be added to, in f32 alone.
    let typed = operands.inputs[0].ty.dtype == DType::BF16
        && (product != Product::Wgrad || operands.outputs[0].ty.dtype == DType::F32);
    // The copy engine's strides are multiples of 16 bytes.
    typed && ragged::supports(gpu, sizes, 8)
}

/// The launch of a product that the kernel supports.
pub(super) fn prepare(
    gpu: &Gpu,
    product: Product,
    operands: &Operands<'_>,
    sizes: Sizes,
) -> Result<Work, CudaError> {
    let Sizes { rows, experts, outputs, inputs, .. } = sizes;
    let [a, b, start] = [0, 1, START].map(|n| operands.inputs[n].place);
    let d = operands.outputs[0];
    let columns = if product == Product::Fprop { outputs } else { inputs };
    let width = width(columns);
    let map = |at, [columns, rows, experts]: [usize; 3], [wide, high]: [usize; 2]| {
        let strides = [columns, columns * rows];
        TensorMap::new(gpu.context(), DType::BF16, at, &[columns, rows, experts], &strides, &[wide, high, 1])
    };
    // Boxes of operands with columns along the products, and of others, whose columns are those of a strip.
    let (along, across) = ([TILE_K, TILE_M], [STRIP, TILE_K]);
    let shared = [STRIP, TILE_K / CLUSTER];
    let weights = [inputs, outputs, experts];
    let (a_map, b_map) = match product {
        Product::Fprop => (map(a, [inputs, rows, 1], along)?, map(b, weights, [TILE_K, width / CLUSTER])?),
        Product::Dgrad => (map(a, [outputs, rows, 1], along)?, map(b, weights, shared)?),
        Product::Wgrad => (map(a, [outputs, rows, 1], across)?, map(b, [inputs, rows, 1], shared)?),
    };
    // The gradient of weights is written without the copy engine.
    let d_map = match product {
        Product::Wgrad => a_map,
        _ => map(d.place, [columns, rows, 1], [STRIP, STORE_ROWS])?,
    };
    let down = match product {
        Product::Wgrad => experts * outputs.div_ceil(CLUSTER * TILE_M),
        _ => rows.div_ceil(CLUSTER * TILE_M),
    };
    let function = gpu.function(&SOURCE, &[("TILE_N", width as i64)], product.name())?;
    function.allow_shared(SHARED_BYTES as u32)?;
    let (groups, counter) = Groups::new(gpu, start, sizes)?;
    let arguments = Arguments {
        a: a_map,
        b: b_map,
        d_map,
        d: d.place,
        accumulate: d.accumulate.into(),
        padding: 0,
        groups,
    };
    let blocks = ragged::blocks(gpu, down * columns.div_ceil(width));
    // SAFETY: the kernel takes one `Arguments`. Operands are in bf16, and d too unless it is a gradient of
    // weights, which is f32; their extents are those that the op's `infer` checked. There are experts + 1
    // starts, for which shared memory has room. The counter lives as long as the work, whose launches follow
    // each other, and is 0 between them. The copy engine accesses nothing outside of the maps, and the
    // kernel writes no rows and columns outside of d, whatever the starts are.
    Ok(unsafe { ragged::work(function, blocks, SHARED_BYTES, arguments, counter) })
}

/// The width of tiles that wastes the fewest columns, and the largest of several.
fn width(columns: usize) -> usize {
    WIDTHS.into_iter().min_by_key(|width| columns.next_multiple_of(*width)).unwrap_or(WIDTHS[0])
}
