//! Launch of the GPU kernel of [`TokenLogprobs`].
#![allow(unsafe_code, reason = "it launches a kernel")]

use super::{IGNORED, TokenLogprobs};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("IGNORED", IGNORED as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("token_logprobs/kernel.cu", include_str!("kernel.cu"))
};

/// Threads per block, each of which has a token.
const THREADS: u32 = 512;

kernel_struct! {
    struct Arguments {
        logits: DevicePtr,
        targets: DevicePtr,
        logprobs: DevicePtr,
        ranks: DevicePtr,
        top_ids: DevicePtr,
        top_logprobs: DevicePtr,
        v: u32,
        top: u32,
    }
}

impl CudaKernel for TokenLogprobs {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [logits, targets] = operands.inputs else { unreachable!("two inputs") };
        let output = |n: usize| operands.outputs.get(n).map_or(DevicePtr(0), |output| output.place);
        let (tokens, v) = logits.ty.shape.rows_cols();
        let arguments = Arguments {
            logits: logits.place,
            targets: targets.place,
            logprobs: output(0),
            ranks: output(1),
            top_ids: output(2),
            top_logprobs: output(3),
            v: v as u32,
            top: self.top as u32,
        };
        let function = gpu.function(&SOURCE, &[], "token_logprobs")?;
        // SAFETY: the kernel takes one `Arguments`. There is one block for each token, and each output has a
        // row for each; those of top tokens are not accessed if `top` is 0.
        Ok(unsafe { Work::launch(function, Launch::row(tokens as u32, THREADS), arguments) })
    }
}
