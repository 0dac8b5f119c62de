//! The sum over ranks of what each has sent: the second half of a reduce-scatter, after
//! [`AllToAll`](crate::collective::AllToAll).

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, Shape, TensorType};

/// The largest number of ranks: that of the GPU kernel's counter.
const MAX_RANKS: usize = 1 << 13;

/// `x [n, ...] -> sum f32 [...]`, f32 or bf16: the sum over the ranks in f32, as a binary tree.
///
/// The left half of a tree of n ranks is the largest power of two of ranks before the last: (x_0 + x_1) + x_2
/// for three, (x_0 + x_1) + (x_2 + x_3) for four. An accumulating output is added to this sum. So every
/// device, and every rank that receives equal pieces, computes equal bits.
#[derive(Clone, Copy, Debug)]
pub struct SumRanks;

impl Op for SumRanks {
    fn name(&self) -> &'static str {
        "sum_ranks"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("sum_ranks", inputs, 1)?;
        let ranks = inputs[0].shape.split_first().filter(|(n, _)| (1..=MAX_RANKS).contains(*n));
        let is_summed = matches!(inputs[0].dtype, DType::F32 | DType::BF16);
        match ranks {
            Some((_, piece)) if is_summed => {
                Ok(vec![TensorType { dtype: DType::F32, shape: Shape::new(piece) }])
            }
            _ => Err(OpError(format!(
                "sum_ranks takes the f32 or bf16 tensors of 1 to {MAX_RANKS} ranks, one after the other, not {}",
                inputs[0]
            ))),
        }
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

impl OnGpu for SumRanks {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
