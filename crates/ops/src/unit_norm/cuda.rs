//! Launches of the GPU kernels of [`UnitSquares`] and [`UnitSquaredNorm`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{UnitSquaredNorm, UnitSquares, counts};
use crate::device::{suffix, table};
use crate::grad_norm::cuda::{CHUNK, SQUARES, THREADS};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DeviceMemory, DevicePtr, Gpu, KernelSource, Launch, Operands, Work,
    kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("SUM_THREADS", SUM_THREADS as i64)]],
    headers: &[SQUARES],
    structs: &[Arguments::LAYOUT, UnitChunk::LAYOUT, Range::LAYOUT, RangeArguments::LAYOUT],
    ..KernelSource::new("unit_norm/kernel.cu", include_str!("kernel.cu"))
};

/// Threads per block of the sums of chunks.
const SUM_THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        chunks: DevicePtr,
        sums: DevicePtr,
    }

    struct UnitChunk {
        first: DevicePtr,
        elements: u32,
        flags: u32,
    }

    struct RangeArguments {
        terms: DevicePtr,
        ranges: DevicePtr,
        sums: DevicePtr,
        /// Null if only the sums of ranges are wanted.
        total: DevicePtr,
        count: u64,
    }

    struct Range {
        first: u32,
        count: u32,
    }
}

impl CudaKernel for UnitSquares {
    /// One sum for each chunk.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![TensorType::new(DType::F64, [chunks(inputs, &self.unit_elements).sum::<usize>()])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let sums = operands.outputs[0].place;
        let units = Units::new(gpu, operands.inputs, &self.unit_elements, operands.workspace[0].place, sums)?;
        units.work(gpu, None)
    }
}

impl CudaKernel for UnitSquaredNorm {
    /// One sum for each chunk, each unit and each gradient.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let chunks = chunks(inputs, &self.unit_elements).sum::<usize>();
        let units = counts("", inputs, &self.unit_elements).map_or(0, |counts| counts.iter().sum());
        [chunks, units, inputs.len()].map(|sums| TensorType::new(DType::F64, [sums])).into()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [chunk_sums, unit_sums, sums] = [0, 1, 2].map(|n| operands.workspace[n].place);
        let units = Units::new(gpu, operands.inputs, &self.unit_elements, chunk_sums, unit_sums)?;
        let mut end = 0;
        let of_gradients = units.per_gradient.iter().map(|&count| {
            end += count;
            Range { first: end - count, count }
        });
        let ranges = of_gradients.collect::<Vec<_>>();
        let count = ranges.len() as u64;
        let ranges = table(gpu, &ranges)?;
        let total = operands.outputs[0].place;
        let of_gradients = RangeArguments { terms: unit_sums, ranges: ranges.pointer(), sums, total, count };
        units.work(gpu, Some((of_gradients, ranges)))
    }
}

/// Chunks of each unit of each gradient.
fn chunks<'a>(gradients: &'a [TensorType], unit_elements: &'a [usize]) -> impl Iterator<Item = usize> + 'a {
    gradients.iter().zip(unit_elements).flat_map(|(grad, &unit)| {
        (0..grad.numel()).step_by(unit).map(move |first| unit.min(grad.numel() - first).div_ceil(CHUNK))
    })
}

/// The tables of all chunks and of all units.
struct Units {
    chunks: DeviceMemory,
    ranges: DeviceMemory,
    chunk_count: u32,
    of_chunks: Arguments,
    of_units: RangeArguments,
    per_gradient: Vec<u32>,
}

impl Units {
    fn new(
        gpu: &Gpu,
        gradients: &[CudaTensor],
        unit_elements: &[usize],
        chunk_sums: DevicePtr,
        unit_sums: DevicePtr,
    ) -> Result<Units, CudaError> {
        let (mut chunks, mut ranges, mut per_gradient) = (Vec::new(), Vec::new(), Vec::new());
        for (grad, &unit) in gradients.iter().zip(unit_elements) {
            let before = ranges.len();
            let is_bf16 = u32::from(suffix(grad.ty) == "bf16");
            for first in (0..grad.ty.numel()).step_by(unit) {
                let end = grad.ty.numel().min(first + unit);
                let first_chunk = chunks.len() as u32;
                for at in (first..end).step_by(CHUNK) {
                    let bytes = grad.ty.dtype.bytes(at);
                    let is_unaligned = u32::from(bytes % 16 != 0);
                    let elements = CHUNK.min(end - at) as u32;
                    let flags = is_bf16 | is_unaligned << 1;
                    chunks.push(UnitChunk { first: grad.place.offset(bytes), elements, flags });
                }
                ranges.push(Range { first: first_chunk, count: chunks.len() as u32 - first_chunk });
            }
            per_gradient.push((ranges.len() - before) as u32);
        }
        let (chunk_count, count) = (chunks.len() as u32, ranges.len() as u64);
        let (chunks, ranges) = (table(gpu, &chunks)?, table(gpu, &ranges)?);
        let of_chunks = Arguments { chunks: chunks.pointer(), sums: chunk_sums };
        let (pointer, sums) = (ranges.pointer(), unit_sums);
        let of_units =
            RangeArguments { terms: chunk_sums, ranges: pointer, sums, total: DevicePtr(0), count };
        Ok(Units { chunks, ranges, chunk_count, of_chunks, of_units, per_gradient })
    }

    /// Sums chunks and units and, if asked, gradients, whose table of ranges is kept.
    fn work(
        self,
        gpu: &Gpu,
        of_gradients: Option<(RangeArguments, DeviceMemory)>,
    ) -> Result<Work, CudaError> {
        let chunks = gpu.function(&SOURCE, &[], "unit_norm_chunks")?;
        let ranges = gpu.function(&SOURCE, &[], "unit_norm_ranges")?;
        let total = gpu.function(&SOURCE, &[], "unit_norm_total")?;
        Ok(Work::new(move |stream| {
            // Keeps the tables' memory allocated as long as this work.
            let _tables = (&self.chunks, &self.ranges);
            if self.chunk_count > 0 {
                // SAFETY: the kernel takes one `Arguments`. The table holds one `UnitChunk` for each block,
                // whose elements lie in a gradient and have the type and the alignment of its flags; there is
                // one sum for each block.
                unsafe { chunks.launch(Launch::row(self.chunk_count, THREADS), &self.of_chunks, stream)? };
            }
            let blocks = self.of_units.count.div_ceil(u64::from(SUM_THREADS)) as u32;
            if blocks > 0 {
                // SAFETY: the kernel takes one `RangeArguments`. The first launch wrote the sums of all
                // chunks, of which the table holds a `Range` for each of `count` units.
                unsafe { ranges.launch(Launch::row(blocks, SUM_THREADS), &self.of_units, stream)? };
            }
            let Some((of_gradients, _)) = &of_gradients else { return Ok(()) };
            // SAFETY: the kernel takes one `RangeArguments` and runs in one block. The launch before wrote
            // the sums of all units, of which the table holds a `Range` for each of `count` gradients, and
            // the total is one f64.
            unsafe { total.launch(Launch::row(1, SUM_THREADS), of_gradients, stream) }
        }))
    }
}
