//! The losses of the micro-steps of a step, each kept by itself.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(loss f32[], objective f32[], micro_step u32[], losses f32[k, 2 + 2S] (, sources f32[S, 2])) -> losses'`,
/// in place: row `micro_step` of the losses becomes (loss, objective, sources). Nothing is stored if there is
/// no such row. `sources` are the sums of losses of S sources, if any.
#[derive(Clone, Copy, Debug)]
pub struct RecordLosses;

impl Op for RecordLosses {
    fn name(&self) -> &'static str {
        "record_losses"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let number = TensorType::new(DType::F32, []);
        let is_valid = || -> Option<TensorType> {
            let (numbers, rest) = inputs.split_at_checked(3)?;
            let (&losses, sources) = rest.split_first()?;
            let sums: usize = sources.iter().map(TensorType::numel).sum();
            let are_sources = sources.is_empty() || sources == [TensorType::new(DType::F32, [sums / 2, 2])];
            let are_numbers = numbers == [number, number, TensorType::new(DType::U32, [])];
            let is_table =
                losses.dtype == DType::F32 && matches!(*losses.shape, [_, columns] if columns == 2 + sums);
            (are_numbers && are_sources && is_table).then_some(losses)
        };
        let losses = is_valid().ok_or_else(|| {
            OpError(format!(
                "record_losses takes loss and objective f32[], a number u32[], f32[k, 2 + 2S] and, with S sources, f32[S, 2], not \
                 {inputs:?}"
            ))
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
