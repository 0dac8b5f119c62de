//! The fast kernel of [`super::GroupedLinear`], [`super::GroupedDgrad`] and [`super::GroupedWgrad`]: bf16,
//! for Hopper's tensor cores.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{STARTS, kernel_name};
use crate::device::table;
use crate::ragged::{self, CLUSTER, RAGGED, RaggedGroups, Sizes, TILE_M};
use xtrain_cuda::{
    Arch, ChoiceKey, CudaError, Defines, DevicePtr, Gpu, HOPPER, KernelSource, Operands, TENSOR_CORES,
    TensorMap, Work, kernel_struct,
};
use xtrain_program::LinearGemm;
use xtrain_tensor::DType;

/// A variant of the kernel.
#[derive(Clone, Copy, Debug)]
struct Variant {
    /// Its name, as `XTRAIN_PREFER` takes it.
    name: &'static str,
    /// Columns of a tile.
    width: usize,
    /// True if each of two groups of warps multiplies every second tile, and stores it while the other one
    /// multiplies. Else both multiply a part of each tile, then store it.
    in_turns: bool,
}

/// All variants. 192 columns are the most that one group of warps can multiply.
const VARIANTS: [Variant; 3] = [
    Variant { name: "grouped_256", width: 256, in_turns: false },
    Variant { name: "grouped_turns_192", width: 192, in_turns: true },
    Variant { name: "grouped_turns_128", width: 128, in_turns: true },
];

/// The variants to choose from for an output of so many columns: those that compute at most 5% more than the
/// one that computes the fewest.
fn candidates(columns: usize) -> impl Iterator<Item = Variant> {
    let computed = move |variant: &Variant| columns.next_multiple_of(variant.width);
    let least = VARIANTS.iter().map(computed).min().unwrap_or(0);
    VARIANTS.into_iter().filter(move |variant| computed(variant) <= least + least / 20)
}

/// Names of the variants.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    VARIANTS.iter().map(|variant| variant.name)
}

/// Columns of bf16 numbers in 128 bytes, the rows of a tile in shared memory.
const STRIP: usize = 64;
/// Products of a stage.
const TILE_K: usize = 64;
/// Rows that a warp stores at once.
const STORE_ROWS: usize = 16;

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("TILE_K", TILE_K as i64)]],
    headers: &[TENSOR_CORES, HOPPER, RAGGED],
    archs: &[Arch::SM90],
    structs: &[Arguments::LAYOUT],
    variants: || VARIANTS.map(defines).to_vec(),
    ..KernelSource::new("grouped_linear/hopper.cu", include_str!("hopper.cu"))
};

/// The macros of a variant.
fn defines(variant: Variant) -> Defines {
    vec![("TILE_N", variant.width as i64), ("TURNS", variant.in_turns.into())]
}

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

/// The launch of a supported GEMM by the variant that is fastest for groups of equal size. None if the GPU
/// refuses all.
pub(super) fn fastest(
    gpu: &Gpu,
    gemm: LinearGemm,
    operands: &Operands<'_>,
    sizes: Sizes,
) -> Result<Option<Work>, CudaError> {
    let Sizes { rows, experts, outputs, inputs, .. } = sizes;
    let adds = if operands.outputs[0].accumulate { " that adds" } else { "" };
    let kernel = kernel_name(gemm);
    let text =
        format!("{kernel}{adds} of {experts} experts, {rows} rows, {outputs} outputs, {inputs} inputs");
    let equal = table(gpu, &equal_starts(sizes))?;
    let mut timing_inputs = operands.inputs.to_vec();
    timing_inputs[STARTS].place = equal.pointer();
    let timing = Operands { inputs: &timing_inputs, ..*operands };
    let variants: Vec<Variant> = candidates(sizes.columns(gemm)).collect();
    let names: Vec<&str> = variants.iter().map(|variant| variant.name).collect();
    let named =
        |name: &str| variants.iter().find(|variant| variant.name == name).copied().unwrap_or(variants[0]);
    let key = ChoiceKey { former: text.clone(), text };
    let flops = 2.0 * rows as f64 * outputs as f64 * inputs as f64;
    gpu.fastest_gemm(&key, flops, &names, [operands, &timing], |name, operands| {
        prepare(gpu, gemm, operands, sizes, named(name))
    })
}

/// Starts of groups of nearly equal size, in whole tiles of rows.
fn equal_starts(Sizes { rows, experts, .. }: Sizes) -> Vec<u32> {
    let tiles = rows / TILE_M;
    (0..=experts).map(|expert| (expert * tiles / experts * TILE_M) as u32).collect()
}

/// The launch of a variant.
fn prepare(
    gpu: &Gpu,
    gemm: LinearGemm,
    operands: &Operands<'_>,
    sizes: Sizes,
    variant: Variant,
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
            (map(a, [inputs, rows, 1], along)?, map(b, weights, [TILE_K, variant.width / CLUSTER])?)
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
    let function = gpu.function(&SOURCE, &defines(variant), kernel_name(gemm))?;
    let (groups, counter) = RaggedGroups::new(gpu, operands.inputs[STARTS].place, sizes)?;
    let arguments = Arguments {
        a: a_map,
        b: b_map,
        d_map,
        d: d.place,
        accumulate: d.accumulate.into(),
        padding: 0,
        groups,
    };
    let blocks = ragged::blocks(gpu, down * columns.div_ceil(variant.width));
    // SAFETY: the kernel takes one `Arguments`. Operands are in bf16, and d too unless it is a gradient of
    // weights, which is f32; their extents are those that the op's `infer` checked. There are experts + 1
    // starts, for which shared memory has room. The counter lives as long as the work, whose launches follow
    // each other, and is 0 between them. TMA accesses nothing outside of the tensor maps, and the kernel
    // writes no rows and columns outside of d, whatever the starts are.
    unsafe { ragged::work(function, blocks, arguments, counter) }
}
