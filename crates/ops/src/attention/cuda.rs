//! [`Attention`] and [`AttentionGrad`] on a GPU, by the fastest of four algorithms: cuDNN's engines, our
//! kernels for Hopper, our tiled kernels on tensor cores, and our kernels that hold whole sequences in shared
//! memory. Operands that none of these supports are computed by our kernels on CUDA cores
//! ([`super::plain`]).
#![allow(unsafe_code, reason = "it calls cuDNN")]

use super::timing_operands::TimingOperands;
use super::{Attention, AttentionGrad, flash, hopper};
use xtrain_cuda::{AlgorithmCandidate, CudaError, CudaKernel, Gpu, Operands, Sdpa, Work, WorkPurpose};
use xtrain_tensor::{DType, TensorType};

impl Attention {
    /// cuDNN's attention for these operands, if it may have an engine for them.
    fn sdpa(&self, qkv: TensorType, documents: bool) -> Option<Sdpa> {
        let (tokens, _) = qkv.shape.rows_cols();
        let Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic } = *self;
        let scale = scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt());
        let sequences = tokens / seq_len;
        let sdpa = Sdpa { sequences, seq_len, heads, kv_heads, head_dim, scale, deterministic };
        (qkv.dtype == DType::BF16 && !documents && sdpa.may_run()).then_some(sdpa)
    }
}

/// The work of cuDNN, or `None`, with the reason logged, if it has no engine.
fn accepted(name: &str, sdpa: &Sdpa, work: Result<Work, CudaError>) -> Option<Work> {
    work.map_err(|why| tracing::debug!("cuDNN has no engine for {name} {sdpa:?}, using our kernels: {why}"))
        .ok()
}

/// Name of the algorithm that holds whole sequences in shared memory.
pub(super) const WHOLE: &str = "whole";
/// Name of cuDNN's engines.
pub(super) const CUDNN: &str = "cuDNN";
/// Name of our tiled kernels.
pub(super) const OWN: &str = "own";

/// The type of a workspace of `n` bytes.
fn bytes(n: usize) -> TensorType {
    TensorType::new(DType::U8, [n])
}

impl CudaKernel for Attention {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.sdpa(inputs[0], inputs.len() > 1).map(|sdpa| bytes(sdpa.forward_bytes())).into_iter().collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (qkv, o, lse) = (operands.inputs[0], operands.outputs[0], operands.outputs[1]);
        let by_cudnn = |_: WorkPurpose| {
            let Some(sdpa) = self.sdpa(qkv.ty, operands.inputs.len() > 1) else { return Ok(None) };
            // SAFETY: `infer` checked the shapes of the operands against these sizes, and the workspace has
            // `forward_bytes`.
            let work =
                unsafe { sdpa.forward(gpu, qkv.place, o.place, lse.place, operands.workspace[0].place) };
            Ok(accepted("attention", &sdpa, work))
        };
        let timing = TimingOperands::new(gpu, self, operands, 1)?;
        let by_flash = |purpose, kernels| self.flash_forward(gpu, timing.pair(purpose, operands), kernels);
        let by_whole = |purpose| by_flash(purpose, flash::WHOLE_FORWARD_KERNELS);
        let by_own = |purpose| by_flash(purpose, flash::TILED_FORWARD_KERNELS);
        let by_hopper = |purpose| self.hopper_forward(gpu, &timing.pair(purpose, operands)[0]);
        let candidates = [
            AlgorithmCandidate::new(WHOLE, &by_whole),
            AlgorithmCandidate::new(CUDNN, &by_cudnn),
            AlgorithmCandidate::new(hopper::NAME, &by_hopper),
            AlgorithmCandidate::new(OWN, &by_own),
        ];
        let fastest = gpu.fastest(&self.forward_key(qkv.ty, operands.inputs.len() > 1), &candidates)?;
        fastest.map_or_else(|| self.plain_forward(gpu, operands), Ok)
    }
}

/// Maximum workspace of cuDNN's deterministic backward, which needs two bytes per score.
const MAX_DETERMINISTIC_BYTES: usize = 1 << 30;

impl AttentionGrad {
    /// cuDNN's backward for these operands, if it may have an engine whose workspace is not too large.
    fn sdpa(&self, inputs: &[TensorType]) -> Option<Sdpa> {
        self.0
            .sdpa(inputs[1], inputs.len() > 4)
            .filter(|sdpa| !sdpa.deterministic || sdpa.backward_bytes() <= MAX_DETERMINISTIC_BYTES)
    }
}

impl CudaKernel for AttentionGrad {
    /// The workspace of cuDNN's backward, or of that for Hopper, or delta for our other kernels: f32 `[B, h,
    /// s]`.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[1].shape.rows_cols();
        let own = 4 * tokens * self.0.heads;
        let hopper = self.0.hopper_backward_bytes(inputs[1], inputs.len() > 4);
        vec![bytes(self.sdpa(inputs).map_or(own, |sdpa| sdpa.backward_bytes()).max(hopper))]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        let by_cudnn = |_: WorkPurpose| {
            let Some(sdpa) = self.sdpa(&types) else { return Ok(None) };
            let [d_o, qkv, o, lse] = [0, 1, 2, 3].map(|n| operands.inputs[n].place);
            let (dqkv, workspace) = (operands.outputs[0].place, operands.workspace[0].place);
            // SAFETY: as for the forward, with `backward_bytes`.
            let work = unsafe { sdpa.backward(gpu, d_o, qkv, o, lse, dqkv, workspace) };
            Ok(accepted("attention's backward", &sdpa, work))
        };
        let timing = TimingOperands::new(gpu, &self.0, operands, 4)?;
        let by_flash = |purpose, kernels| self.0.flash_backward(gpu, timing.pair(purpose, operands), kernels);
        let by_whole = |purpose| by_flash(purpose, flash::WHOLE_BACKWARD_KERNELS);
        let by_own = |purpose| by_flash(purpose, flash::TILED_BACKWARD_KERNELS);
        let by_hopper = |purpose| self.0.hopper_backward(gpu, &timing.pair(purpose, operands)[0]);
        let candidates = [
            AlgorithmCandidate::new(WHOLE, &by_whole),
            AlgorithmCandidate::new(CUDNN, &by_cudnn),
            AlgorithmCandidate::new(hopper::NAME, &by_hopper),
            AlgorithmCandidate::new(OWN, &by_own),
        ];
        let fastest = gpu.fastest(&self.0.backward_key(types[1], types.len() > 4), &candidates)?;
        fastest.map_or_else(|| self.0.plain_backward(gpu, operands), Ok)
    }
}
