//! GEMMs of FP8 operands for the linear layers of experts ([`crate::grouped_linear`]) under the FP8 recipes.
//!
//! Both operands are contiguous along the summed dimension, as in [`crate::scaled_matmul`]. The transpose of
//! the experts' weights is one matrix `[i, E*o]`, so the columns `e*o..(e+1)*o` are those of expert e, and
//! those of the transposes of x and dy are its rows of the ragged tensors. No scale is shared by two experts
//! if their outputs are multiples of 128 and their rows begin at such multiples. (Rows that do not, as in
//! batches of few tokens, are computed with the scales of tiles that experts share.)

mod cpu;
mod cuda;
mod hopper;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::groups::Groups;
use crate::int_vector;
use crate::on_gpu::OnGpu;
use crate::scaled_matmul::check_operands;
use crate::tail;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Arithmetic, Cost, LinearGemm, Op, OpError, Operand, RaggedOp, Tail};
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// The input `starts`.
const STARTS: usize = 4;

/// `(a FP8, a_inv_scale, b FP8, b_inv_scale, starts i32[E + 1]) -> d`, one GEMM per expert e on dequantized
/// operands, summed in f32 and rounded once. `starts[e]..starts[e + 1]` of c are the rows of expert e.
///
/// * Fprop `x_ci, w_(E*o)i -> y_co`: y = x w_e^T in the rows of e, and zeros after `starts[E]`.
/// * Dgrad `dy_co, w_i(E*o) -> dx_ci`: dx = dy w_e in the rows of e, and zeros after `starts[E]`.
/// * Wgrad `dy_oc, x_ic -> dw_(E*o)i`: dw_e = dy^T x over the rows of e. The output accumulates: that of an
///   expert without rows is written as zeros, or stays as it is where dw is added to.
///
/// The pairs of scalings are those of [`crate::scaled_matmul`] but for rows, whose transposes would need a
/// scale for each row and expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupedScaledMatmul {
    /// Fprop, dgrad or wgrad.
    pub gemm: LinearGemm,
    /// The groups of rows of the ragged tensors.
    pub groups: Groups,
    /// Element type of d: F32 or BF16.
    pub out: DType,
    /// Granularity of the scales of a and of b.
    pub scaling: [Scaling; 2],
    /// The tail of y or dx.
    pub tail: Tail,
}

impl Op for GroupedScaledMatmul {
    fn name(&self) -> &'static str {
        "grouped_scaled_matmul"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, 5)?;
        let [[a_rows, a_cols], [b_rows, b_cols]] = check_operands(&inputs[..4], self.scaling, self.out)?;
        let experts = self.groups.experts;
        int_vector("starts", inputs[STARTS], experts + 1)?;
        let k = if self.gemm == LinearGemm::Dgrad { a_cols * experts } else { a_cols };
        OpError::ensure(k == b_cols, || {
            format!(
                "a has {a_cols} columns and b {b_cols}: for {:?} of {experts} experts b needs {k}",
                self.gemm
            )
        })?;
        let (shape, outputs) = match self.gemm {
            LinearGemm::Fprop => {
                OpError::ensure(experts > 0 && b_rows % experts == 0, || {
                    format!("b has {b_rows} rows, which {experts} experts do not divide")
                })?;
                ([a_rows, b_rows / experts], b_rows / experts)
            }
            LinearGemm::Dgrad => ([a_rows, b_rows], a_cols),
            LinearGemm::Wgrad => ([experts * a_rows, b_rows], a_rows),
        };
        OpError::ensure(!self.scaling.contains(&Scaling::Row), || {
            "GEMMs of experts take no scales of rows: they would need one for each row and expert".into()
        })?;
        OpError::ensure(!self.scaling.contains(&Scaling::Block) || outputs.is_multiple_of(TILE), || {
            format!("{outputs} outputs of an expert are no multiple of {TILE}: blocks would cross experts")
        })?;
        Ok(vec![TensorType::new(self.out, shape)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        self.gemm == LinearGemm::Wgrad
    }

    fn gathers_apart(&self) -> bool {
        self.gemm != LinearGemm::Wgrad
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let mnk = match self.gemm {
            LinearGemm::Wgrad => [inputs[0].shape[0], inputs[2].shape[0], self.groups.live_rows],
            _ => [self.groups.live_rows, outputs[0].shape[1], inputs[0].shape[1]],
        };
        let gemm = Arithmetic::Gemm { mnk, operands: inputs[0].dtype, scaling: Some(self.scaling) };
        let (is_wgrad, [rows, cols]) = (self.gemm == LinearGemm::Wgrad, [0, 1].map(|n| inputs[0].shape[n]));
        let rows = if is_wgrad { cols } else { rows };
        let of_input = |(n, ty): (usize, &TensorType)| match self.reads_tail(n) {
            true => ty.bytes() as f64,
            false => self.groups.bytes(*ty, rows),
        };
        let read: f64 = inputs.iter().enumerate().map(of_input).sum();
        Cost::of_kernel(gemm, read + tail::bytes(outputs[0], rows, self.tail))
    }
}

impl RaggedOp for GroupedScaledMatmul {
    fn reads_tail(&self, input: usize) -> bool {
        input >= if self.gemm == LinearGemm::Wgrad { STARTS } else { 2 }
    }

    fn tail(&self, _: usize) -> Option<Tail> {
        (self.gemm != LinearGemm::Wgrad).then_some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        (self.gemm != LinearGemm::Wgrad).then(|| Arc::new(Self { tail, ..*self }) as Arc<dyn Op>)
    }

    fn live_rows(&self) -> Option<usize> {
        Some(self.groups.live_rows)
    }
}

impl OnGpu for GroupedScaledMatmul {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, hopper::SOURCE];
}
