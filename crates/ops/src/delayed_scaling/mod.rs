//! Delayed scaling: scales of FP8 casts from the amaxes of earlier steps, so that a cast needs no pass over
//! the tensor to find its amax.
//!
//! Source: NVIDIA's Transformer Engine, `DelayedScaling`. It updates scales once per micro-batch; here they
//! are updated once per optimizer step, so that recomputation and accumulation use one scale.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;

use crate::on_gpu::OnGpu;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, TensorType};

/// Inputs per tensor: amax, history and scale. The last two are also outputs, in place.
const OPERANDS: usize = 3;

/// `(for each tensor amax f32[1], history f32[L], scale f32[1, 1] (, halted u32[1])) -> (max_amax f32[1], for
/// each tensor history', scale' in place)`.
///
/// A positive, finite amax is shifted into the history as its first element, and the last one is dropped. The
/// scale is then `max_finite(format) * 2^-margin / a`, at most the largest finite f32, where a is the maximum
/// of the history or, with `latest`, its first element. For any other amax the history and the scale of the
/// tensor stay: no pass wrote it, the tensor was all zeros, or it was not finite. Only
/// [`DelayedTensor::in_pieces`] then sets a scale that is 0. `max_amax` is the maximum
/// of all amaxes, or NaN if one is NaN; it tells whether the step was finite. Histories may differ in length.
///
/// If `halted` is an input and not 0, histories and scales stay, because the step is repeated
/// ([`CheckRoom`](crate::room::CheckRoom)).
#[derive(Clone, Debug)]
pub struct DelayedScaling {
    tensors: Vec<DelayedTensor>,
    margin: u32,
    latest: bool,
    in_place: Vec<(usize, usize)>,
}

/// The cast of one tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedTensor {
    /// Its format: E4M3 or E5M2.
    pub format: DType,
    /// True if the scale is rounded down to a power of two.
    pub pow2_scales: bool,
    /// True if ranks cast pieces of the tensor, for which "not set" would mean scales of their own: a scale
    /// of 0 that no amax sets becomes 1.
    pub in_pieces: bool,
}

impl DelayedScaling {
    /// The op for these tensors, in the order of its inputs. Scales leave a headroom of 2^`margin`. They use
    /// the whole history, or with `latest` only the amax of this step.
    pub fn new(tensors: Vec<DelayedTensor>, margin: u32, latest: bool) -> Self {
        let pair = |n: usize| [(1 + 2 * n, OPERANDS * n + 1), (2 + 2 * n, OPERANDS * n + 2)];
        let in_place = (0..tensors.len()).flat_map(pair).collect();
        DelayedScaling { tensors, margin, latest, in_place }
    }

    /// The value to which the amax of a tensor is scaled.
    fn target(&self, tensor: &DelayedTensor) -> f32 {
        max_finite(tensor.format) * (-f64::from(self.margin)).exp2() as f32
    }
}

impl Op for DelayedScaling {
    fn name(&self) -> &'static str {
        "delayed_scaling"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let operands = OPERANDS * self.tensors.len();
        if let Some(halted) = inputs.get(operands) {
            OpError::ensure(*halted == TensorType::new(DType::U32, [1]), || {
                format!("the flag must be u32[1], not {halted}")
            })?;
        }
        OpError::arity("delayed_scaling", &inputs[..operands.min(inputs.len())], operands)?;
        OpError::arity("delayed_scaling", inputs, inputs.len().min(operands + 1))?;
        let mut outputs = vec![TensorType::new(DType::F32, [1])];
        for (n, (tensor, operands)) in self.tensors.iter().zip(inputs.as_chunks::<OPERANDS>().0).enumerate() {
            let [amax, history, scale] = *operands;
            let is_history = history.dtype == DType::F32 && matches!(*history.shape, [length] if length > 0);
            let fits =
                amax == TensorType::new(DType::F32, [1]) && scale == TensorType::new(DType::F32, [1, 1]);
            OpError::ensure(is_history && fits, || {
                format!(
                    "tensor {n}: amax, history and scale must be f32[1], f32[L] and f32[1, 1], not {amax}, {history} and {scale}"
                )
            })?;
            OpError::ensure(matches!(tensor.format, DType::E4M3 | DType::E5M2), || {
                format!("tensor {n}: {} is not an FP8 format; use e4m3 or e5m2", tensor.format)
            })?;
            outputs.extend([history, scale]);
        }
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }
}

impl OnGpu for DelayedScaling {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_op::run;
    use xtrain_tensor::HostTensor;

    /// History, scale and max_amax after these amaxes, one step each.
    fn after(op: &DelayedScaling, amaxes: &[f64], length: usize) -> (Vec<f64>, f64, f64) {
        let tensor = |values: &[f64], shape: &[usize]| {
            HostTensor::from_f64(
                TensorType { dtype: DType::F32, shape: xtrain_tensor::Shape::new(shape) },
                values,
            )
        };
        let (mut history, mut scale, mut max_amax) = (vec![0.0; length], 0.0, 0.0);
        for &amax in amaxes {
            let inputs = [tensor(&[amax], &[1]), tensor(&history, &[length]), tensor(&[scale], &[1, 1])];
            let outputs = run(op, &inputs.each_ref());
            (max_amax, history, scale) =
                (outputs[0].to_f64()[0], outputs[1].to_f64(), outputs[2].to_f64()[0]);
        }
        (history, scale, max_amax)
    }

    fn one(format: DType, margin: u32, latest: bool) -> DelayedScaling {
        DelayedScaling::new(
            vec![DelayedTensor { format, pow2_scales: false, in_pieces: false }],
            margin,
            latest,
        )
    }

    #[test]
    fn the_maximum_of_the_history_sets_the_scale_until_it_is_dropped() {
        let op = one(DType::E4M3, 0, false);
        assert_eq!(after(&op, &[2.0], 3), (vec![2.0, 0.0, 0.0], 224.0, 2.0));
        assert_eq!(after(&op, &[2.0, 4.0, 1.0], 3), (vec![1.0, 4.0, 2.0], 112.0, 1.0));
        assert_eq!(after(&op, &[2.0, 4.0, 1.0, 0.5, 0.25], 3), (vec![0.25, 0.5, 1.0], 448.0, 0.25));
        assert_eq!(after(&one(DType::E4M3, 0, true), &[2.0, 4.0, 1.0], 3).1, 448.0);
        assert_eq!(after(&one(DType::E5M2, 3, false), &[2.0], 3).1, 57344.0 / 8.0 / 2.0);
    }

    #[test]
    fn an_amax_of_zero_or_not_finite_changes_no_scale_and_is_reported() {
        let op = one(DType::E4M3, 0, false);
        let before = after(&op, &[2.0, 4.0], 3);
        assert_eq!(after(&op, &[2.0, 4.0, 0.0], 3), (before.0.clone(), before.1, 0.0));
        assert_eq!(after(&op, &[2.0, 4.0, f64::INFINITY], 3), (before.0.clone(), before.1, f64::INFINITY));
        let (history, scale, max_amax) = after(&op, &[2.0, 4.0, f64::NAN], 3);
        assert!((history, scale) == (before.0, before.1) && max_amax.is_nan());
    }

    #[test]
    fn a_scale_that_no_amax_sets_becomes_1_if_ranks_have_pieces() {
        let mut op = one(DType::E4M3, 0, false);
        assert_eq!(after(&op, &[0.0], 2).1, 0.0);
        op.tensors[0].in_pieces = true;
        assert_eq!(after(&op, &[0.0], 2), (vec![0.0, 0.0], 1.0, 0.0));
        assert_eq!(after(&op, &[0.0, 2.0, 0.0], 2).1, 224.0);
    }
}
