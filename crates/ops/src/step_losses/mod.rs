//! The losses of the micro-steps of a step, each kept by itself.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(loss f32[], objective f32[], micro_step u32[], losses f32[k, 2]) -> losses'`, in place: row `micro_step`
/// of the losses becomes (loss, objective). Nothing is stored if there is no such row.
#[derive(Clone, Copy, Debug)]
pub struct RecordLosses;

impl Op for RecordLosses {
    fn name(&self) -> &'static str {
        "record_losses"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("record_losses", inputs, 4)?;
        let (number, losses) = (TensorType::new(DType::F32, []), inputs[3]);
        let are_numbers = inputs[..3] == [number, number, TensorType::new(DType::U32, [])];
        let is_table = losses.dtype == DType::F32 && matches!(*losses.shape, [_, 2]);
        OpError::ensure(are_numbers && is_table, || {
            format!(
                "record_losses takes loss and objective f32[], a number u32[] and f32[k, 2], not {inputs:?}"
            )
        })?;
        Ok(vec![losses])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &[(0, 3)]
    }
}

impl OnGpu for RecordLosses {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
