//! Parts of the kernels for Hopper that compute one GEMM per group of rows of a ragged tensor.
#![allow(unsafe_code, reason = "it launches kernels")]

use crate::device::table;
use std::collections::{BTreeMap, BTreeSet};
use xtrain_cuda::{
    Arch, ChoiceKey, CudaError, DeviceMemory, DevicePtr, Function, Gpu, Header, KernelValue, Launch,
    Operands, Work, kernel_struct,
};
use xtrain_program::LinearGemm;

/// Blocks of a cluster, whose row tiles are below each other: 1 or 2.
pub(crate) const CLUSTER: usize = 2;
/// Row tiles of clusters that are computed before the columns of further ones.
const BAND: usize = 8;
/// Rows of a tile.
pub(crate) const TILE_M: usize = 128;
/// Threads of a block: four warps that fetch and write zeros, eight that multiply.
const THREADS: u32 = 384;
/// Most experts: shared memory has room for so many starts.
const MAX_EXPERTS: usize = 1024;
/// Most rows: starts are 16-bit numbers of tiles in shared memory.
const MAX_ROWS: usize = u16::MAX as usize * TILE_M;
/// Most stages of a kernel.
const MAX_STAGES: usize = 10;

/// Shared memory of operands and results.
const TILES_BYTES: usize = 224 * 1024;
/// Shared memory of a block, with the barriers of stages, of turns, and of the numbers of tiles, these
/// numbers, and the starts of groups.
pub(crate) const SHARED_BYTES: usize =
    TILES_BYTES + 2 * 8 * MAX_STAGES + 2 * 8 + 40 + size_of::<u16>() * (MAX_EXPERTS + 1);
const _: () = assert!(SHARED_BYTES <= 227 * 1024, "a block of Hopper has no more");

/// The name by which `XTRAIN_PREFER` selects the kernels for all GPUs instead.
const PORTABLE: &str = "grouped_portable";

pub(crate) const RAGGED: Header = Header::new("ragged.cuh", include_str!("ragged.cuh")).with_constants(&[&[
    ("CLUSTER", CLUSTER as i64),
    ("BAND", BAND as i64),
    ("TILE_M", TILE_M as i64),
    ("TILES_BYTES", TILES_BYTES as i64),
]]);

/// How the multiplying warps of a block share its tiles, and store them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stores {
    /// Both groups multiply a part of each tile, then store it.
    Together,
    /// Each group multiplies every second tile, and stores it while the other multiplies.
    InTurns,
    /// As [`Stores::Together`], but TMA stores half of a tile from shared memory during the next one. It is
    /// only for gradients of weights in FP8 (docs/decisions/sums-of-wgrad.md).
    Staged,
}

/// A variant of a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Variant {
    pub(crate) stores: Stores,
    /// Columns of a tile.
    pub(crate) width: usize,
}

impl Variant {
    /// Its name, as `XTRAIN_PREFER` takes it.
    fn name(self) -> String {
        let how = match self.stores {
            Stores::Together => "",
            Stores::InTurns => "turns_",
            Stores::Staged => "staged_",
        };
        format!("grouped_{how}{}", self.width)
    }

    /// Columns that tiles of this width compute.
    fn computed(self, columns: usize) -> usize {
        columns.next_multiple_of(self.width)
    }
}

/// Names of these variants and of the kernels for all GPUs.
pub(crate) fn names(variants: impl IntoIterator<Item = Variant>) -> Vec<String> {
    let names: BTreeSet<String> = variants.into_iter().map(Variant::name).collect();
    names.into_iter().chain([PORTABLE.to_owned()]).collect()
}

/// The variants to choose from for an output of so many columns: those that compute few that it does not
/// have. Of those that store together the first that computes the fewest, since they differ in nothing else.
pub(crate) fn candidates(variants: &[Variant], columns: usize, is_wgrad: bool) -> Vec<Variant> {
    let is_together = |variant: &&Variant| variant.stores == Stores::Together;
    let together = variants.iter().filter(is_together).min_by_key(|variant| variant.computed(columns));
    let least = variants.iter().map(|variant| variant.computed(columns)).min().unwrap_or(0);
    let others = variants.iter().filter(|variant| match variant.stores {
        Stores::Together => false,
        Stores::InTurns => true,
        Stores::Staged => is_wgrad,
    });
    let others = others.filter(|variant| variant.computed(columns) <= least + least / 20);
    together.into_iter().chain(others).copied().collect()
}

/// The work of the fastest of these variants of a kernel, which `prepare` prepares for operands, of which the
/// input `starts` has the starts of groups. They are timed with groups of equal size. None if the GPU refuses
/// all.
pub(crate) fn fastest(
    gpu: &Gpu,
    kernel: &str,
    variants: &[Variant],
    sizes: Sizes,
    operands: &Operands<'_>,
    starts: usize,
    prepare: impl Fn(Variant, &Operands<'_>) -> Result<Work, CudaError>,
) -> Result<Option<Work>, CudaError> {
    let Sizes { rows, experts, outputs, inputs, .. } = sizes;
    let text = format!("{kernel} of {experts} experts, {rows} rows, {outputs} outputs, {inputs} inputs");
    let equal = table(gpu, &equal_starts(sizes))?;
    let mut timing_inputs = operands.inputs.to_vec();
    timing_inputs[starts].place = equal.pointer();
    let timing = Operands { inputs: &timing_inputs, ..*operands };
    let named: BTreeMap<String, Variant> = variants.iter().map(|&v| (v.name(), v)).collect();
    let names: Vec<String> = variants.iter().map(|variant| variant.name()).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let key = ChoiceKey { former: text.clone(), text };
    let flops = 2.0 * rows as f64 * outputs as f64 * inputs as f64;
    gpu.fastest_gemm(&key, flops, &names, [operands, &timing], |name, operands| {
        prepare(named[name], operands)
    })
}

/// Starts of groups of nearly equal size, in whole tiles of rows.
fn equal_starts(Sizes { rows, experts, .. }: Sizes) -> Vec<u32> {
    let tiles = rows / TILE_M;
    (0..=experts).map(|expert| (expert * tiles / experts * TILE_M) as u32).collect()
}

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
    }
}

impl RaggedGroups {
    /// The groups that begin at the rows in `starts`, and the memory of the counter of tiles.
    pub(crate) fn new(
        gpu: &Gpu,
        starts: DevicePtr,
        sizes: Sizes,
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

/// Work that holds memory which it uses.
fn holding(work: Work, memory: DeviceMemory) -> Work {
    Work::new(move |stream| {
        let _held = &memory;
        work.enqueue(stream)
    })
}
