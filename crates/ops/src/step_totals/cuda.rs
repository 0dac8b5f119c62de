//! Launches of the GPU kernels of [`RankWords`] and [`StepTotals`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{RankWords, StepTotals, WORDS};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("WORDS", WORDS as i64)]],
    structs: &[WordsArguments::LAYOUT, TotalsArguments::LAYOUT],
    ..KernelSource::new("step_totals/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct WordsArguments {
        squared_norm: DevicePtr,
        loss: DevicePtr,
        objective: DevicePtr,
        stop: DevicePtr,
        /// Null if the op has no amax.
        amax: DevicePtr,
        words: DevicePtr,
    }

    struct TotalsArguments {
        words: DevicePtr,
        grad_norm: DevicePtr,
        loss: DevicePtr,
        objective: DevicePtr,
        amax: DevicePtr,
        stop: DevicePtr,
        ranks: u32,
        has_whole_gradients: u32,
    }
}

impl CudaKernel for RankWords {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let input = |n: usize| operands.inputs.get(n).map_or(DevicePtr(0), |input| input.place);
        let arguments = WordsArguments {
            squared_norm: input(0),
            loss: input(1),
            objective: input(2),
            stop: input(3),
            amax: input(4),
            words: operands.outputs[0].place,
        };
        let function = gpu.function(&SOURCE, &[], "rank_words")?;
        // SAFETY: the kernel takes one `WordsArguments` and runs in one thread. Every input is one number of
        // the type that `infer` checks, and there are `WORDS` words.
        Ok(unsafe { Work::launch(function, Launch::row(1, 1), arguments) })
    }
}

impl CudaKernel for StepTotals {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let output = |n: usize| operands.outputs[n].place;
        let words = operands.inputs[0];
        let arguments = TotalsArguments {
            words: words.place,
            grad_norm: output(0),
            loss: output(1),
            objective: output(2),
            amax: output(3),
            stop: output(4),
            ranks: words.ty.shape[0] as u32,
            has_whole_gradients: self.has_whole_gradients.into(),
        };
        let function = gpu.function(&SOURCE, &[], "step_totals")?;
        // SAFETY: the kernel takes one `TotalsArguments`. There are `WORDS` words for each rank, and every
        // output is one number of the type that `infer` returns.
        Ok(unsafe { Work::launch(function, Launch::row(1, 32), arguments) })
    }
}
