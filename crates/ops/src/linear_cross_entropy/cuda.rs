//! [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`] on a GPU.
//!
//! For each chunk: the GEMM of its logits, a kernel over its rows, and for gradients two more GEMMs. Rows of
//! logits are aligned to 128 bytes, so that GEMMs and kernel read and write whole vectors even if the
//! vocabulary is odd.
//!
//! If all tokens have a target, or nearly all, chunks are ranges of tokens. Otherwise the rows of tokens with
//! a target are gathered first ([`Portions`]), and gradients of x scattered; chunks behind them do not run.
//!
//! For a vocabulary that is not a multiple of 8, cuBLASLt has only slow kernels. The last rows of the weight
//! then get GEMMs of their own.

use super::chunks::{Chunks, STRIDE_ELEMENTS, row_of};
use super::gathered::GatheredChunks;
use super::portions::{Portions, count_trained};
use super::{LinearCrossEntropy, LinearCrossEntropyGrad};
use xtrain_cuda::{CudaError, CudaKernel, CudaOutput, CudaTensor, Gemm, Gpu, Operands, Variants, Work};
use xtrain_tensor::{DType, TensorType};

/// The index of the targets among the inputs.
const TARGETS: usize = 2;

impl CudaKernel for LinearCrossEntropy {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(self, inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        prepare(self, gpu, operands, [None, None])
    }

    fn varies_with(&self) -> Option<usize> {
        Some(TARGETS)
    }

    fn variant(&self, inputs: &[TensorType], targets: &[u8]) -> usize {
        self.portions(inputs[0]).variant(count_trained(targets))
    }
}

impl CudaKernel for LinearCrossEntropyGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(&self.loss, inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let mut gradients = operands.outputs[self.loss.outputs()..].iter().copied();
        let dx = if self.dx { gradients.next() } else { None };
        prepare(&self.loss, gpu, operands, [dx, gradients.next()])
    }

    fn varies_with(&self) -> Option<usize> {
        Some(TARGETS)
    }

    fn variant(&self, inputs: &[TensorType], targets: &[u8]) -> usize {
        self.loss.portions(inputs[0]).variant(count_trained(targets))
    }
}

impl LinearCrossEntropy {
    /// The rows that are computed if not all tokens have a target.
    fn portions(&self, x: TensorType) -> Portions {
        Portions::new(x.shape[0], self.longest(x.shape[0]))
    }
}

/// Workspace: the terms unless they are an output, the logits of the longest chunk, the workspace of the
/// GEMMs, the list of tokens with a target with two more numbers, and gathered rows of x, which become those
/// of dx.
fn workspace(loss: &LinearCrossEntropy, inputs: &[TensorType]) -> Vec<TensorType> {
    let ((tokens, _), (vocab, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
    let logits =
        TensorType::new(inputs[0].dtype, [loss.longest(tokens), vocab.next_multiple_of(STRIDE_ELEMENTS)]);
    let list = TensorType::new(DType::I32, [tokens + 2]);
    let x = TensorType::new(inputs[0].dtype, [loss.portions(inputs[0]).large, inputs[0].shape[1]]);
    loss.terms_workspace(inputs[0]).into_iter().chain([logits, Gemm::workspace(), list, x]).collect()
}

/// The terms, an output or the first tensor of the workspace, and the rest of the workspace.
pub(super) fn terms_of<'a>(
    loss: &LinearCrossEntropy,
    operands: &Operands<'a>,
) -> (CudaTensor, &'a [CudaTensor]) {
    if loss.terms.are_output() {
        let CudaOutput { ty, place, .. } = operands.outputs[2];
        return (CudaTensor { ty, place }, operands.workspace);
    }
    let [terms, rest @ ..] = operands.workspace else { unreachable!("the terms come first") };
    (*terms, rest)
}

fn prepare(
    loss: &LinearCrossEntropy,
    gpu: &Gpu,
    operands: &Operands<'_>,
    [dx_td, dw_vd]: [Option<CudaOutput>; 2],
) -> Result<Work, CudaError> {
    let [x_td, w_vd, targets_t, inv_targets] = operands.inputs else { unreachable!("four inputs") };
    let (terms, workspace) = terms_of(loss, operands);
    let [logits, gemm_workspace, list, gathered] = workspace else { unreachable!("as it was asked for") };
    let ((t, d), (v, _)) = (x_td.ty.shape.rows_cols(), w_vd.ty.shape.rows_cols());
    let chunks = Chunks {
        gpu,
        z_loss: loss.z_loss,
        gradients: dx_td.is_some() || dw_vd.is_some(),
        x_td: *x_td,
        targets_t: *targets_t,
        inv_targets: *inv_targets,
        logits: *logits,
        terms,
        gemm_workspace: gemm_workspace.place,
        v,
        d,
    };
    let mut in_place = Vec::new();
    let mut dw_holds_a_sum = dw_vd.is_some_and(|dw| dw.accumulate);
    for tokens in loss.chunks(t) {
        let rows = chunks.of_tokens(&tokens);
        chunks.logits(&rows, w_vd, &mut in_place)?;
        in_place.push(chunks.rows(&rows)?);
        if let Some(dx) = dx_td {
            chunks.dx(&rows, w_vd, row_of(dx.ty, dx.place, tokens.start), &mut in_place)?;
        }
        if let Some(dw) = dw_vd {
            chunks.dw(&rows, dw, dw_holds_a_sum, &mut in_place)?;
            dw_holds_a_sum = true;
        }
    }
    in_place.push(chunks.sum(operands.outputs, None)?);
    let portions = loss.portions(x_td.ty);
    let gathered = GatheredChunks { chunks, portions, list: list.place, x: gathered.place };
    let mut parts = vec![Work::sequence(in_place).only_in(Variants::only(|number| number == 0))];
    gathered.append(w_vd, operands.outputs, [dx_td, dw_vd], &mut parts)?;
    Ok(Work::sequence(parts))
}
