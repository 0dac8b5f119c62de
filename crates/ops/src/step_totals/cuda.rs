//! Launches of the GPU kernels of [`RankWords`] and [`StepTotals`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Losses, MAX_PARTS, PieceUnits, PlacedUnits, RankWords, StepTotals};
use crate::device::table;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("MAX_PARTS", MAX_PARTS as i64)]],
    structs: &[WordsArguments::LAYOUT, Gradient::LAYOUT, TotalsArguments::LAYOUT],
    ..KernelSource::new("step_totals/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of the only block of each kernel.
const THREADS: u32 = 256;

kernel_struct! {
    struct WordsArguments {
        squares: DevicePtr,
        losses: DevicePtr,
        objectives: DevicePtr,
        /// Not read if there are two columns.
        sources: DevicePtr,
        stop: DevicePtr,
        /// Null if the op has no amax.
        amax: DevicePtr,
        words: DevicePtr,
        square_words: u32,
        micro_batches: u32,
        /// Numbers of a micro-batch.
        columns: u32,
        padding: u32,
    }

    struct Gradient {
        parts: u32,
        part_stride: u32,
        pieces: u32,
        piece_stride: u32,
        first: u32,
        units: u32,
        before: u32,
        first_rank: u32,
    }

    struct TotalsArguments {
        words: DevicePtr,
        /// Null if the squares are one word.
        gradients: DevicePtr,
        sums: DevicePtr,
        grad_norm: DevicePtr,
        loss: DevicePtr,
        objective: DevicePtr,
        amax: DevicePtr,
        stop: DevicePtr,
        /// Null without sources.
        sources: DevicePtr,
        ranks: u32,
        rank_words: u32,
        square_words: u32,
        micro_batches: u32,
        columns: u32,
        count: u32,
        /// Neighbouring ranks that compute parts of a micro-batch.
        parts: u32,
        padding: u32,
    }
}

impl CudaKernel for RankWords {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|input| input.ty).collect();
        let Losses { micro_batches, columns, stop } = RankWords::losses(&types);
        let input = |n: usize| operands.inputs.get(n).map_or(DevicePtr(0), |input| input.place);
        // The losses of micro-batches are one input, a row each.
        let column = |n: usize| if stop == 2 { input(1).offset(DType::F32.bytes(n)) } else { input(1 + n) };
        let arguments = WordsArguments {
            squares: input(0),
            losses: column(0),
            objectives: column(1),
            sources: column(2),
            stop: input(stop),
            amax: input(stop + 1),
            words: operands.outputs[0].place,
            square_words: types[0].numel() as u32,
            micro_batches: micro_batches as u32,
            columns: columns as u32,
            padding: 0,
        };
        let function = gpu.function(&SOURCE, &[], "rank_words")?;
        // SAFETY: the kernel takes one `WordsArguments` and runs in one block. The inputs have the sizes and
        // types that `infer` checks, and there are as many words as it returns.
        Ok(unsafe { Work::launch(function, Launch::row(1, THREADS), arguments) })
    }
}

impl CudaKernel for StepTotals {
    /// One sum for each gradient.
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        match self.squares.placed().len() {
            0 => Vec::new(),
            gradients => vec![TensorType::new(DType::F64, [gradients])],
        }
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let output = |n: usize| operands.outputs[n].place;
        let words = operands.inputs[0];
        let gradient = |PlacedUnits { units: of, first_rank, before }| {
            let PieceUnits { parts, shard, first, units } = of;
            let numbers =
                [parts.size, parts.stride, shard.size, shard.stride, first, units, before, first_rank];
            let [parts, part_stride, pieces, piece_stride, first, units, before, first_rank] =
                numbers.map(|number| number as u32);
            Gradient { parts, part_stride, pieces, piece_stride, first, units, before, first_rank }
        };
        let gradients: Vec<Gradient> = self.squares.placed().into_iter().map(gradient).collect();
        let count = gradients.len() as u32;
        let gradients = table(gpu, &gradients)?;
        let arguments = TotalsArguments {
            words: words.place,
            gradients: if count > 0 { gradients.pointer() } else { DevicePtr(0) },
            sums: operands.workspace.first().map_or(DevicePtr(0), |sums| sums.place),
            grad_norm: output(0),
            loss: output(1),
            objective: output(2),
            amax: output(3),
            stop: output(4),
            sources: operands.outputs.get(5).map_or(DevicePtr(0), |sources| sources.place),
            ranks: words.ty.shape[0] as u32,
            rank_words: words.ty.shape[1] as u32,
            square_words: self.squares.words() as u32,
            micro_batches: self.micro_batches as u32,
            columns: self.columns() as u32,
            count,
            parts: self.parts as u32,
            padding: 0,
        };
        let function = gpu.function(&SOURCE, &[], "step_totals")?;
        Ok(Work::new(move |stream| {
            // Keeps the table's memory allocated as long as this work.
            let _table = &gradients;
            // SAFETY: the kernel takes one `TotalsArguments` and runs in one block. There are `rank_words`
            // words for each rank, a `Gradient` and a sum for each of `count` gradients, whose units are
            // among the words, and the outputs have the types that `infer` returns.
            unsafe { function.launch(Launch::row(1, THREADS), &arguments, stream) }
        }))
    }
}
