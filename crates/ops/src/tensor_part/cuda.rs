//! Launches of the GPU kernels of [`TakePart`], [`PlacePart`] and [`JoinColumns`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{JoinColumns, PlacePart, Side, TakePart};
use crate::device::ELEMENTWISE_THREADS;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_program::CutRegion;

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("tensor_part/kernel.cu", include_str!("kernel.cu"))
};

/// Words of a thread.
const PER_THREAD: i64 = 4;

kernel_struct! {
    struct Arguments {
        from: DevicePtr,
        to: DevicePtr,
        place: DevicePtr,
        /// Words of a line of one rank.
        width: u64,
        /// Words that are written.
        words: u64,
        ranks: u32,
        padding: u32,
    }
}

impl CudaKernel for TakePart {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        launches(gpu, operands, self.0.groups.size, &self.0.regions(operands.inputs[0].ty), Side::Whole)
    }
}

impl CudaKernel for PlacePart {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        launches(gpu, operands, self.0.groups.size, &self.0.regions(operands.outputs[0].ty), Side::Part)
    }
}

impl CudaKernel for JoinColumns {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (rows, width) = operands.inputs[0].ty.shape.rows_cols();
        let region = CutRegion { in_whole: 0, in_part: 0, lines: rows / self.ranks, width };
        launches(gpu, operands, self.ranks, &[region], Side::Parts)
    }
}

/// A launch for each region of the whole, which is taken from or written as `side` says.
fn launches(
    gpu: &Gpu,
    operands: &Operands<'_>,
    ranks: usize,
    regions: &[CutRegion],
    side: Side,
) -> Result<Work, CudaError> {
    let name = match side {
        Side::Whole => "take_part",
        Side::Part => "place_part",
        Side::Parts => "join_columns",
    };
    let (from, to) = (operands.inputs[0], operands.outputs[0]);
    // The parts of all ranks need no place.
    let place = operands.inputs.get(1).map_or(DevicePtr(0), |place| place.place);
    let (takes, bytes) = (side == Side::Whole, from.ty.dtype.bytes(1));
    // The largest word that all regions consist of.
    let fits = |word: &usize| {
        let whole_words = |elements: usize| (elements * bytes).is_multiple_of(*word);
        let fits = |region: &CutRegion| {
            whole_words(region.width) && whole_words(region.in_part) && whole_words(region.in_whole)
        };
        regions.iter().all(fits)
    };
    let word = [16, 4, 2].into_iter().find(fits).unwrap_or(1);
    let function = gpu.function(&SOURCE, &[], &format!("{name}_{word}"))?;
    let launch = |&CutRegion { in_whole, in_part, lines, width }: &CutRegion| {
        let at = |offset: usize| (offset * bytes) as u64;
        let (from_at, to_at) = if takes { (at(in_whole), at(in_part)) } else { (at(in_part), at(in_whole)) };
        let (width, ranks) = ((width * bytes / word) as u64, ranks as u64);
        let words = lines as u64 * width * if takes { 1 } else { ranks };
        let arguments = Arguments {
            from: DevicePtr(from.place.0 + from_at),
            to: DevicePtr(to.place.0 + to_at),
            place,
            width,
            words,
            ranks: ranks as u32,
            padding: 0,
        };
        let blocks = words.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD as u64).max(1);
        let launch = Launch::row(blocks as u32, ELEMENTWISE_THREADS);
        // SAFETY: the kernel takes one `Arguments`. It writes `words` words of the region, and reads those of
        // the place, which is less than `ranks`, or of all ranks; all lie in the tensors whose types `infer`
        // has checked.
        unsafe { Work::launch(function.clone(), launch, arguments) }
    };
    Ok(Work::sequence(regions.iter().map(launch).collect()))
}
