//! Lookup of table rows by token id, and the gradient of the table.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use crate::{int_vector, matrix};
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Cost, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::{DType, TensorType};

/// `(ids_t, table_vd) -> x_td`: row `ids[t]` of the table for each token t.
///
/// Ids must lie in 0..v, which the data loader checks. On a GPU, a row with an id outside is filled with NaN.
#[derive(Clone, Copy, Debug)]
pub struct Embedding;

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("embedding", inputs, 2)?;
        let (_, width) = matrix("the table", inputs[1])?;
        let tokens = inputs[0].numel();
        int_vector("token ids", inputs[0], tokens)?;
        Ok(vec![TensorType::new(inputs[1].dtype, [tokens, width])])
    }

    fn operand(&self, input: usize) -> Operand {
        if input == 0 { Operand::Full } else { Operand::Compute }
    }

    /// Of the table, the rows of the tokens.
    fn cost(&self, _: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_bytes(2.0 * outputs[0].bytes() as f64)
    }
}

impl Differentiable for Embedding {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let grad = EmbeddingGrad { vocab_size: cx.ty(cx.input(1)).shape[0], out: cx.grad_dtype(1) };
        let dtable = cx.emit(Role::Wgrad, grad, &[cx.input(0), dy])?[0];
        cx.set_grad(1, dtable)
    }
}

/// `(ids_t, dx_td) -> dtable_vd`: row r is the sum of dx over the tokens with id r, in the order of the
/// tokens. The output accumulates.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingGrad {
    /// v, the rows of the table.
    pub vocab_size: usize,
    /// Element type of the gradient.
    pub out: DType,
}

impl Op for EmbeddingGrad {
    fn name(&self) -> &'static str {
        "embedding_grad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("embedding_grad", inputs, 2)?;
        let (tokens, width) = matrix("the output gradient", inputs[1])?;
        int_vector("token ids", inputs[0], tokens)?;
        Ok(vec![TensorType::new(self.out, [self.vocab_size, width])])
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

impl OnGpu for Embedding {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for EmbeddingGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
