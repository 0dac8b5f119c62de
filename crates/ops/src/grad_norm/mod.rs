//! The global L2 norm of the gradients: what clipping, the step line and the check for non-finite steps start from.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::registry::{MULTIPROCESSORS, OnCard, Registered, Sample, SampleInput};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `(g_0, g_1, ...) -> norm []`: the root of the sum of the squares of all elements of all gradients, of any shapes.
///
/// Squares are summed in f64, so none of f32's overflows and the order matters little; it is fixed all the same. The norm is f32, or f64
/// where the gradients are. One element that is not finite makes it infinite or NaN; so does a norm beyond f32.
#[derive(Clone, Copy, Debug)]
pub struct GradNorm;

impl Op for GradNorm {
    fn name(&self) -> &'static str {
        "grad_norm"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::ensure(!inputs.is_empty(), || "grad_norm takes at least one gradient".into())?;
        let dtype = inputs[0].dtype.compute();
        for (n, ty) in inputs.iter().enumerate() {
            let summed = matches!(ty.dtype, DType::F64 | DType::F32 | DType::BF16);
            OpError::ensure(summed && ty.dtype.compute() == dtype, || {
                format!("gradient {n} is {ty}; all must be f64, or all f32 or bf16")
            })?;
        }
        Ok(vec![TensorType::new(dtype, [])])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Registered for GradNorm {
    fn samples() -> Vec<Sample> {
        vec![
            Sample::plain(GradNorm, [SampleInput::activation([5, 7])]),
            Sample::plain(
                GradNorm,
                [
                    SampleInput::activation([1]),
                    SampleInput::activation([33, 3]),
                    SampleInput::activation([2, 3, 5]),
                ],
            ),
        ]
    }

    fn large() -> Sample {
        Sample::plain(GradNorm, [SampleInput::activation([300, 500]), SampleInput::activation([700, 300])])
    }
}

impl OnCard for GradNorm {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    /// Many gradients of very different lengths.
    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        let most = 3_000_001 * multiprocessors / MULTIPROCESSORS;
        let lengths = [1, 2, 7, 8, 9, 63, 500, 32_767, 32_768, 32_769, 100_000, most];
        let grads: Vec<_> = (0..50).map(|n| SampleInput::activation([lengths[n % lengths.len()]])).collect();
        vec![Sample::plain(GradNorm, grads)]
    }
}
