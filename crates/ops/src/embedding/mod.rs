//! Rows of a table looked up by token id, and the table's gradient.

mod cpu;
mod cuda;

use crate::registry::{Fill, OnCard, Registered, Sample, SampleInput};
use crate::{int_vector, matrix};
use xtrain_cuda::KernelSource;
use xtrain_program::{Backward, Differentiable, Op, OpError, Operand, Role};
use xtrain_tensor::{DType, TensorType};

/// `(ids_t, table_vd) -> x_td`: row `ids[t]` of the table for every token. Ids must lie in 0..v; the loader checks them.
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
}

impl Differentiable for Embedding {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let grad = EmbeddingGrad { vocab_size: cx.ty(cx.input(1)).shape[0], out: cx.grad_dtype(1) };
        let dtable = cx.emit(Role::Wgrad, grad, &[cx.input(0), dy])?[0];
        cx.set_grad(1, dtable)
    }
}

/// `(ids_t, dx_td) -> dtable_vd`: every row's gradients summed, in the order of the tokens. The output accumulates.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingGrad {
    /// v.
    pub vocab_size: usize,
    /// The element type of the gradient.
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

impl Registered for Embedding {
    fn samples() -> Vec<Sample> {
        vec![Sample::forward(Embedding, [SampleInput::ids(23, 11), SampleInput::parameter([11, 7])])]
    }

    fn large() -> Sample {
        Sample::forward(Embedding, [SampleInput::ids(1000, 301), SampleInput::parameter([301, 160])])
    }
}

impl Registered for EmbeddingGrad {
    fn samples() -> Vec<Sample> {
        vec![Sample::plain(
            EmbeddingGrad { vocab_size: 11, out: DType::F32 },
            [SampleInput::ids(23, 11), SampleInput::activation([23, 7])],
        )]
    }

    fn large() -> Sample {
        Sample::plain(
            EmbeddingGrad { vocab_size: 301, out: DType::F32 },
            [SampleInput::ids(1000, 301), SampleInput::activation([1000, 160])],
        )
    }
}

impl OnCard for Embedding {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    fn card_samples() -> Vec<Sample> {
        let sample = |(t, v, d): (usize, usize, usize)| {
            let ids = SampleInput::ids(t, v as i32);
            Sample::forward(Embedding, [ids, SampleInput::parameter([v, d])])
        };
        [(1, 5, 8192), (700, 1001, 512), (33, 40, 2051)].map(sample).into()
    }
}

impl OnCard for EmbeddingGrad {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    /// One token and many, tables that take several passes to sort by, one row that all tokens read, and rows that reach over many runs.
    fn card_samples() -> Vec<Sample> {
        let sample = |ids: SampleInput, v, d, out| {
            let t = ids.ty.numel();
            Sample::plain(EmbeddingGrad { vocab_size: v, out }, [ids, SampleInput::activation([t, d])])
        };
        // A third of the tokens are 7, the others spread.
        let skewed = |t: usize, v: usize| {
            let id = |i: usize| if i % 3 == 1 { 7.0 } else { (i * 7919 % v) as f64 };
            SampleInput::ids(t, v as i32).fill(Fill::Values((0..t).map(id).collect()))
        };
        vec![
            sample(SampleInput::ids(1, 5), 5, 264, DType::F32),
            sample(SampleInput::ids(5000, 1), 1, 96, DType::F32),
            sample(SampleInput::ids(3001, 300_000), 300_000, 8, DType::F32),
            sample(skewed(9000, 4000), 4000, 264, DType::F32),
            sample(skewed(2500, 700), 700, 131, DType::F32),
            sample(skewed(1000, 90), 90, 4104, DType::BF16),
        ]
    }
}
