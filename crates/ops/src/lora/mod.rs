//! The second half of a low-rank adapter (LoRA; Hu et al., arXiv 2106.09685, section 4.1): products with its
//! B are added to columns of a linear layer's output.
//!
//! A layer that fuses several matrices of a published model has an adapter for each of some of them. Those of
//! one layer are stacked: h has `rank` columns for each, b the rows of each.

mod cpu;
mod cuda;
mod merge;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::matrix;
use crate::on_gpu::OnGpu;
use std::ops::Range;
use xtrain_cuda::{Gemm, KernelSource};
use xtrain_program::{Arithmetic, Backward, Cost, Differentiable, KernelCost, Op, OpError, Role};
use xtrain_tensor::{DType, TensorType};

/// The adapters of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraParts {
    /// The rank of each.
    pub rank: usize,
    /// The columns of the layer's output to which each adds, in ascending order.
    pub columns: Vec<Range<usize>>,
}

impl LoraParts {
    /// n: columns of h.
    pub fn width(&self) -> usize {
        self.rank * self.columns.len()
    }

    /// m: rows of b.
    pub fn rows(&self) -> usize {
        self.columns.iter().map(ExactSizeIterator::len).sum()
    }

    /// For each adapter the first of its columns of h, its columns of the output, and its first row of b.
    fn places(&self) -> impl Iterator<Item = (usize, Range<usize>, usize)> + '_ {
        let mut row = 0;
        self.columns.iter().enumerate().map(move |(n, columns)| {
            let first = row;
            row += columns.len();
            (n * self.rank, columns.clone(), first)
        })
    }

    /// Checks the shapes of the layer's output or its gradient, and of two of h, b and their gradients.
    fn check(&self, y_to: TensorType, h_tn: TensorType, b_mr: TensorType) -> Result<(), OpError> {
        let ((tokens, outputs), h) = (matrix("the layer's output", y_to)?, matrix("h", h_tn)?);
        let b = matrix("b", b_mr)?;
        let is_ascending = self.columns.windows(2).all(|pair| pair[0].end <= pair[1].start);
        OpError::ensure(is_ascending && self.columns.last().is_some_and(|c| c.end <= outputs), || {
            format!("adapters of columns {:?} do not fit an output of {outputs} columns", self.columns)
        })?;
        OpError::ensure(h == (tokens, self.width()) && b == (self.rows(), self.rank), || {
            format!(
                "adapters of rank {} for columns {:?} take h of [{tokens}, {}] and b of [{}, {}], not {h_tn} and {b_mr}",
                self.rank,
                self.columns,
                self.width(),
                self.rows(),
                self.rank
            )
        })
    }

    /// The cost of a GEMM for each adapter, with `y_bytes` for an element of the layer's output, `h_bytes`
    /// for one of h, `b_bytes` for one of b.
    fn cost(&self, tokens: usize, operands: DType, [y_bytes, h_bytes, b_bytes]: [usize; 3]) -> Cost {
        let gemm = |columns: &Range<usize>| {
            let (rows, rank) = (columns.len(), self.rank);
            let bytes = y_bytes * tokens * rows + h_bytes * tokens * rank + b_bytes * rows * rank;
            KernelCost {
                times: 1,
                arithmetic: Arithmetic::Gemm { mnk: [tokens, rows, rank], operands, scaling: None },
                bytes: bytes as f64,
                added_bytes: 0.0,
            }
        };
        Cost { kernels: self.columns.iter().map(gemm).collect(), sent_bytes: 0.0 }
    }
}

/// `(y_to, h_tn, b_mr) -> y_to`, in place of y: each adapter adds h b^T, of its columns of h and its rows of
/// b, to its columns of y. Sums are in f32 (f64), rounded once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraAdd(pub LoraParts);

impl Op for LoraAdd {
    fn name(&self) -> &'static str {
        "lora_add"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 3)?;
        self.0.check(inputs[0], inputs[1], inputs[2])?;
        OpError::ensure(inputs.iter().all(|ty| ty.dtype == inputs[0].dtype), || {
            format!(
                "y, h and b must have one element type, not {}, {} and {}",
                inputs[0], inputs[1], inputs[2]
            )
        })?;
        Ok(vec![inputs[0]])
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 0)]
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let (dtype, bytes) = (inputs[0].dtype, inputs[0].dtype.bytes(1));
        // The output is read and written.
        self.0.cost(inputs[0].shape[0], dtype, [2 * bytes, bytes, bytes])
    }
}

impl Differentiable for LoraAdd {
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError> {
        let Some(dy) = cx.grad(0) else { return Ok(()) };
        let (h, b) = (cx.input(1), cx.input(2));
        if cx.wants(2) {
            let wgrad = LoraWgrad { parts: self.0.clone(), out: cx.grad_dtype(2) };
            let db = cx.emit(Role::Wgrad, wgrad, &[dy, h])?[0];
            cx.set_grad(2, db)?;
        }
        if cx.wants(1) {
            let dh = cx.emit(Role::Dgrad, LoraDgrad(self.0.clone()), &[dy, b])?[0];
            cx.set_grad(1, dh)?;
        }
        cx.set_grad(0, dy)
    }
}

/// `(dy_to, b_mr) -> dh_tn`: for each adapter dh = dy b, of its columns of dy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraDgrad(pub LoraParts);

impl Op for LoraDgrad {
    fn name(&self) -> &'static str {
        "lora_dgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 2)?;
        let (tokens, _) = matrix("dy", inputs[0])?;
        let dh = TensorType::new(inputs[0].dtype, [tokens, self.0.width()]);
        self.0.check(inputs[0], dh, inputs[1])?;
        Ok(vec![dh])
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let (dtype, bytes) = (inputs[0].dtype, inputs[0].dtype.bytes(1));
        self.0.cost(inputs[0].shape[0], dtype, [bytes; 3])
    }
}

/// `(dy_to, h_tn) -> db_mr`: for each adapter db = dy^T h, of its columns of both. The output accumulates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraWgrad {
    /// The adapters.
    pub parts: LoraParts,
    /// Element type of the gradient.
    pub out: DType,
}

impl Op for LoraWgrad {
    fn name(&self) -> &'static str {
        "lora_wgrad"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 2)?;
        let db = TensorType::new(self.out, [self.parts.rows(), self.parts.rank]);
        self.parts.check(inputs[0], inputs[1], db)?;
        Ok(vec![db])
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let (dtype, bytes) = (inputs[0].dtype, inputs[0].dtype.bytes(1));
        self.parts.cost(inputs[0].shape[0], dtype, [bytes, bytes, outputs[0].dtype.bytes(1)])
    }
}

impl OnGpu for LoraAdd {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}

impl OnGpu for LoraDgrad {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}

impl OnGpu for LoraWgrad {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE];
}
