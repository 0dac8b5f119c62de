//! GEMM of FP8 operands, for the linear layers of the FP8 recipes.
//!
//! Hopper's FP8 tensor cores need both operands contiguous along the summed dimension (the "TN" layout).
//! Fprop is x_ti w_oi^T, dgrad is dy_to (w^T)_io^T and wgrad is (dy^T)_ot (x^T)_it^T, so that each of x, w
//! and dy is cast both row-major and transposed ([`crate::quantize`]).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use crate::quantize::DEQUANTIZE;
use xtrain_cuda::{Gemm, KernelSource};
use xtrain_program::{Arithmetic, Cost, Op, OpError, Operand, ScaledGemm};
use xtrain_tensor::{DType, Scaling, TensorType};

/// FP8 tensor cores need sizes that are multiples of this.
pub(crate) const MULTIPLE: usize = 16;

/// `(a_mk FP8, a_inv_scale, b_nk FP8, b_inv_scale [, bias_n]) -> d_mn`: `d = (a a_inv_scale) (b
/// b_inv_scale)^T + bias`, summed in f32 and rounded once. Without a bias the output accumulates.
///
/// The pairs of scalings are those that tensor cores and cuBLASLt support: tensor with tensor, row with row,
/// tile with tile, tile with block, block with tile. At most one operand is E5M2. On a GPU, GEMMs with sizes
/// that are not multiples of 16 run in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledMatmul {
    /// Element type of d: F32 or BF16.
    pub out: DType,
    /// Granularity of the scales of a and of b.
    pub scaling: [Scaling; 2],
    /// True if tensor cores may accumulate all products, with about 14 bits (DeepSeek-V3, arXiv 2412.19437,
    /// section 3.5.2). Only for scales of tensors and rows. A CPU sums in f32 in any case.
    pub fast_accumulation: bool,
    /// True if there is a bias. cuBLASLt then needs a bias and an output in bf16.
    pub bias: bool,
}

impl ScaledMatmul {
    /// The op for a GEMM with operands in these formats.
    pub fn new(gemm: ScaledGemm, out: DType, bias: bool) -> Self {
        let ScaledGemm { operands, fast_accumulation } = gemm;
        ScaledMatmul { out, scaling: operands.map(|operand| operand.scaling), fast_accumulation, bias }
    }
}

impl Op for ScaledMatmul {
    fn name(&self) -> &'static str {
        "scaled_matmul"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("scaled_matmul", inputs, if self.bias { 5 } else { 4 })?;
        let ((m, k), (n, b_k)) = (matrix("a", inputs[0])?, matrix("b", inputs[2])?);
        OpError::ensure(k == b_k, || format!("a has {k} columns, b has {b_k}"))?;
        check_operands(&inputs[..4], self.scaling, self.out)?;
        let one = self.scaling[0];
        let may_be_fast = matches!(one, Scaling::Tensor | Scaling::Row);
        OpError::ensure(!self.fast_accumulation || may_be_fast, || {
            format!(
                "with scales by {one:?} sums leave the tensor cores every 128 products: there is no fast accumulation"
            )
        })?;
        if let Some(bias) = inputs.get(4) {
            let shape = TensorType::new(DType::BF16, [n]);
            OpError::ensure(*bias == shape && self.out == DType::BF16, || {
                format!(
                    "the bias must be {shape} and the output bf16, but the bias is {bias} and the output {}",
                    self.out
                )
            })?;
        }
        Ok(vec![TensorType::new(self.out, [m, n])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        !self.bias
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let mnk = [inputs[0].shape[0], inputs[2].shape[0], inputs[0].shape[1]];
        let gemm = Arithmetic::Gemm { mnk, operands: inputs[0].dtype, scaling: Some(self.scaling) };
        Cost::of_operands(gemm, inputs, outputs)
    }
}

/// Rows and columns of a and b of `(a, a_inv_scale, b, b_inv_scale)` with these scalings, whose product is of
/// type `out`.
pub(crate) fn check_operands(
    inputs: &[TensorType],
    scaling: [Scaling; 2],
    out: DType,
) -> Result<[[usize; 2]; 2], OpError> {
    let ((m, k), (n, b_k)) = (matrix("a", inputs[0])?, matrix("b", inputs[2])?);
    let formats = [inputs[0].dtype, inputs[2].dtype];
    let pair = [[DType::E4M3; 2], [DType::E5M2, DType::E4M3], [DType::E4M3, DType::E5M2]].contains(&formats);
    OpError::ensure(pair, || {
        format!("operands must be e4m3, or one of them e5m2, not {} and {}", formats[0], formats[1])
    })?;
    for (scales, scaling, rows, cols) in [(inputs[1], scaling[0], m, k), (inputs[3], scaling[1], n, b_k)] {
        let shape = scaling.shape(rows, cols);
        OpError::ensure(scales == TensorType::new(DType::F32, shape), || {
            format!("the scales of [{rows}, {cols}] by {scaling:?} must be f32{shape:?}, not {scales}")
        })?;
    }
    let [one, other] = scaling;
    let is_pair = match one {
        Scaling::Tensor | Scaling::Row => other == one,
        Scaling::Tile => matches!(other, Scaling::Tile | Scaling::Block),
        Scaling::Block => other == Scaling::Tile,
    };
    OpError::ensure(is_pair, || {
        format!("scales of a by {one:?} cannot be combined with scales of b by {other:?}")
    })?;
    OpError::ensure(matches!(out, DType::F32 | DType::BF16), || {
        format!("the output must be f32 or bf16, not {out}")
    })?;
    Ok([[m, k], [n, b_k]])
}

impl OnGpu for ScaledMatmul {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE, Gemm::BLOCK_SCALED_SOURCE, DEQUANTIZE];
}
