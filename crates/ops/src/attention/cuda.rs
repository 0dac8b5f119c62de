//! [`Attention`] and [`AttentionGrad`] on a GPU: whichever is fastest there of cuDNN's engines and our own
//! kernels on the tensor cores; where neither takes the operands, our own on the ordinary ones.
#![allow(unsafe_code, reason = "it calls cuDNN")]

use super::rehearsal::Rehearsal;
use super::{Attention, AttentionGrad, flash};
use xtrain_cuda::{AlgorithmCandidate, CudaError, CudaKernel, Gpu, Operands, Sdpa, Work, WorkPurpose};
use xtrain_tensor::{DType, TensorType};

impl Attention {
    /// cuDNN's attention over these operands, where it could have an engine for them.
    fn sdpa(&self, qkv: TensorType, documents: bool) -> Option<Sdpa> {
        let (tokens, _) = qkv.shape.rows_cols();
        let Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic } = *self;
        let scale = scale.unwrap_or_else(|| 1.0 / (head_dim as f32).sqrt());
        let sequences = tokens / seq_len;
        let sdpa = Sdpa { sequences, seq_len, heads, kv_heads, head_dim, scale, deterministic };
        (qkv.dtype == DType::BF16 && !documents && sdpa.may_run()).then_some(sdpa)
    }
}

/// The work of cuDNN, where it has an engine.
fn accepted(what: &str, sdpa: &Sdpa, work: Result<Work, CudaError>) -> Option<Work> {
    work.map_err(|why| tracing::debug!("{what} of {sdpa:?} by a kernel of our own: {why}")).ok()
}

/// Attention by whole sequences in shared memory.
pub(super) const WHOLE: &str = "whole";
/// By cuDNN's engines.
pub(super) const CUDNN: &str = "cuDNN";
/// By our own kernels, in tiles.
pub(super) const OWN: &str = "own";

/// Bytes as a tensor.
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
            // SAFETY: the operands have the shapes that `infer` checked against these sizes, and the
            // workspace what was asked for.
            let work =
                unsafe { sdpa.forward(gpu, qkv.place, o.place, lse.place, operands.workspace[0].place) };
            Ok(accepted("attention", &sdpa, work))
        };
        let rehearsal = Rehearsal::new(gpu, self, operands, 1)?;
        let by = |purpose, kernels| self.flash_forward(gpu, rehearsal.of(purpose, operands), kernels);
        let by_whole = |purpose| by(purpose, flash::FORWARD_OF_WHOLE);
        let by_own = |purpose| by(purpose, flash::TILED_FORWARD);
        let candidates = [
            AlgorithmCandidate::new(WHOLE, &by_whole),
            AlgorithmCandidate::new(CUDNN, &by_cudnn),
            AlgorithmCandidate::new(OWN, &by_own),
        ];
        let fastest = gpu.fastest(&self.forward_key(qkv.ty, operands.inputs.len() > 1), &candidates)?;
        fastest.map_or_else(|| self.plain_forward(gpu, operands), Ok)
    }
}

/// The most that a deterministic backward of cuDNN's may work in: it takes two bytes a score.
const MOST_BYTES: usize = 1 << 30;

impl AttentionGrad {
    /// cuDNN's backward, where it could have an engine for these operands that does not take too much memory.
    fn sdpa(&self, inputs: &[TensorType]) -> Option<Sdpa> {
        self.0
            .sdpa(inputs[1], inputs.len() > 4)
            .filter(|sdpa| !sdpa.deterministic || sdpa.backward_bytes() <= MOST_BYTES)
    }
}

impl CudaKernel for AttentionGrad {
    /// The sums of products of outputs and their gradients, and what cuDNN takes where it is asked.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[1].shape.rows_cols();
        let own = 4 * tokens * self.0.heads;
        vec![bytes(self.sdpa(inputs).map_or(own, |sdpa| sdpa.backward_bytes()))]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        let by_cudnn = |_: WorkPurpose| {
            let Some(sdpa) = self.sdpa(&types) else { return Ok(None) };
            let [d_o, qkv, o, lse] = [0, 1, 2, 3].map(|n| operands.inputs[n].place);
            let (dqkv, workspace) = (operands.outputs[0].place, operands.workspace[0].place);
            // SAFETY: as for the forward.
            let work = unsafe { sdpa.backward(gpu, d_o, qkv, o, lse, dqkv, workspace) };
            Ok(accepted("attention's backward", &sdpa, work))
        };
        let rehearsal = Rehearsal::new(gpu, &self.0, operands, 4)?;
        let by = |purpose, kernels| self.0.flash_backward(gpu, rehearsal.of(purpose, operands), kernels);
        let by_whole = |purpose| by(purpose, flash::BACKWARD_OF_WHOLE);
        let by_own = |purpose| by(purpose, flash::TILED_BACKWARD);
        let candidates = [
            AlgorithmCandidate::new(WHOLE, &by_whole),
            AlgorithmCandidate::new(CUDNN, &by_cudnn),
            AlgorithmCandidate::new(OWN, &by_own),
        ];
        let fastest = gpu.fastest(&self.0.backward_key(types[1], types.len() > 4), &candidates)?;
        fastest.map_or_else(|| self.0.plain_backward(gpu, operands), Ok)
    }
}
