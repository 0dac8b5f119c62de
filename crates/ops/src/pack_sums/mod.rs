//! The sums of a micro-step besides its loss, in one tensor: losses by source, and the figures of experts.
//! The totals of a step over micro-steps and ranks treat them alike.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(sums f32 of each of T tensors) -> f32[n / 2, 2]`: the numbers of all tensors, n in all, one after
/// another. A zero follows an odd number of them. The output accumulates over micro-steps.
#[derive(Clone, Copy, Debug)]
pub struct PackSums;

impl Op for PackSums {
    fn name(&self) -> &'static str {
        "pack_sums"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        if let Some(other) = inputs.iter().find(|ty| ty.dtype != DType::F32) {
            return Err(OpError(format!("pack_sums takes f32, not {other}")));
        }
        let numbers: usize = inputs.iter().map(TensorType::numel).sum();
        OpError::ensure(numbers > 0, || "pack_sums takes at least one number".into())?;
        Ok(vec![TensorType::new(DType::F32, [numbers.div_ceil(2), 2])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, _: usize) -> bool {
        true
    }
}

impl OnGpu for PackSums {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
