//! The GEMM of FP8 matrices: the GEMMs of linear layers under the FP8 recipes.
//!
//! Both operands are stored along the sums, as Hopper's tensor cores want them: fprop is x_ti w_oi^T, dgrad
//! dy_to (w^T)_io^T and wgrad (dy^T)_ot (x^T)_it^T, so each of the three tensors is cast row-major or
//! transposed ([`crate::quantize`]).

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

/// Sizes of FP8 operands on tensor cores are multiples of it.
pub(crate) const MULTIPLE: usize = 16;

/// `(a_mk FP8, inv_scale, b_nk FP8, inv_scale [, bias_n]) -> d_mn`: `d = (a inv_scale) (b inv_scale)^T +
/// bias`, summed in f32 and rounded once. Without a bias the output accumulates.
///
/// The pairs of scalings are those of tensor cores and cuBLASLt: tensor with tensor, row with row, tile with
/// tile, tile with block, block with tile. At most one operand is E5M2. On a GPU, GEMMs whose sizes are no
/// multiples of 16 run in bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledMatmul {
    /// F32 or BF16.
    pub out: DType,
    /// The elements of a that share a scale, and those of b.
    pub scaling: [Scaling; 2],
    /// True if sums may stay in the tensor cores, which keep 14 bits of them (DeepSeek-V3, arXiv 2412.19437,
    /// section 3.5.2); for scales of tensors and rows. A CPU sums in f32 in any case.
    pub fast_accumulation: bool,
    /// True if there is a bias. It is bf16, and so is the output: cuBLASLt has no other.
    pub bias: bool,
}

impl ScaledMatmul {
    /// The GEMM of operands in this format.
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
        let formats = [inputs[0].dtype, inputs[2].dtype];
        let pair =
            [[DType::E4M3; 2], [DType::E5M2, DType::E4M3], [DType::E4M3, DType::E5M2]].contains(&formats);
        OpError::ensure(pair, || {
            format!("operands are e4m3, or one of them e5m2, not {} and {}", formats[0], formats[1])
        })?;
        for (scales, scaling, rows) in [(inputs[1], self.scaling[0], m), (inputs[3], self.scaling[1], n)] {
            let shape = scaling.shape(rows, k);
            OpError::ensure(scales == TensorType::new(DType::F32, shape), || {
                format!("the scales of [{rows}, {k}] by {scaling:?} are f32{shape:?}, not {scales}")
            })?;
        }
        let (one, other) = (self.scaling[0], self.scaling[1]);
        let is_pair = match one {
            Scaling::Tensor | Scaling::Row => other == one,
            Scaling::Tile => matches!(other, Scaling::Tile | Scaling::Block),
            Scaling::Block => other == Scaling::Tile,
        };
        OpError::ensure(is_pair, || format!("scales by {one:?} do not go with scales by {other:?}"))?;
        let may_be_fast = matches!(one, Scaling::Tensor | Scaling::Row);
        OpError::ensure(!self.fast_accumulation || may_be_fast, || {
            format!(
                "sums with scales by {one:?} leave the tensor cores every 128 numbers: there is no fast accumulation"
            )
        })?;
        OpError::ensure(matches!(self.out, DType::F32 | DType::BF16), || {
            format!("scaled_matmul makes f32 or bf16, not {}", self.out)
        })?;
        if let Some(bias) = inputs.get(4) {
            let shape = TensorType::new(DType::BF16, [n]);
            OpError::ensure(*bias == shape && self.out == DType::BF16, || {
                format!(
                    "a bias is {shape}, added to a result in bf16; it is {bias}, and the result in {}",
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

impl OnGpu for ScaledMatmul {
    const SOURCES: &'static [KernelSource] = &[Gemm::FALLBACK_SOURCE, Gemm::BLOCK_SCALED_SOURCE, DEQUANTIZE];
}
