//! Delayed scaling: the scale of a cast to FP8 from the largest magnitudes of earlier steps, so that a tensor is cast as it is made, without a
//! pass to measure it (NVIDIA's Transformer Engine, `DelayedScaling`; there once a micro-batch, here once an optimizer step, so that
//! recomputation and accumulation see one scale).

mod cpu;
mod cuda;

use crate::registry::{Fill, OnCard, Registered, Sample, SampleInput};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, TensorType};

/// Inputs of a tensor: amax, history, scale. The last two are also outputs, in place.
const OPERANDS: usize = 3;

/// `(for each tensor amax f32[1], history f32[L], scale f32[1, 1]) -> (largest f32[1], for each tensor history', scale' in place)`.
///
/// An amax that is positive and finite becomes the first of the history, whose last falls out, and the scale is
/// `max_finite(format) * 2^-margin / a`, at most the largest finite f32, where a is the largest of the history, or with `latest` its first.
/// Any other amax changes nothing of its tensor: it saw no pass, or nothing but zeros, or what is not finite. `largest` is the largest of
/// all amaxes, a NaN if there is one: whether the step was finite. Lengths of histories may differ.
#[derive(Clone, Debug)]
pub struct DelayedScaling {
    tensors: Vec<DelayedTensor>,
    margin: u32,
    latest: bool,
    in_place: Vec<(usize, usize)>,
}

/// How a tensor is cast.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DelayedTensor {
    /// To what.
    pub format: DType,
    /// Whether the scale is rounded down to a power of two.
    pub pow2_scales: bool,
}

impl DelayedScaling {
    /// The next scales of these tensors: `margin` halvings below what reaches the format's largest number, from all of the history or,
    /// `latest`, from this step alone.
    pub fn new(tensors: Vec<DelayedTensor>, margin: u32, latest: bool) -> Self {
        let pair = |n: usize| [(1 + 2 * n, OPERANDS * n + 1), (2 + 2 * n, OPERANDS * n + 2)];
        let in_place = (0..tensors.len()).flat_map(pair).collect();
        DelayedScaling { tensors, margin, latest, in_place }
    }

    /// What the largest magnitude of a tensor is taken to.
    fn most(&self, tensor: &DelayedTensor) -> f32 {
        max_finite(tensor.format) * (-f64::from(self.margin)).exp2() as f32
    }
}

impl Op for DelayedScaling {
    fn name(&self) -> &'static str {
        "delayed_scaling"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("delayed_scaling", inputs, OPERANDS * self.tensors.len())?;
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
                format!("tensor {n}: {} is no format of FP8", tensor.format)
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

/// Tensors with these amaxes, lengths of histories and scales.
fn sample(tensors: &[(f64, usize)], margin: u32, latest: bool) -> Sample {
    let of = |n: usize| match n % 2 {
        0 => DelayedTensor { format: DType::E4M3, pow2_scales: n.is_multiple_of(3) },
        _ => DelayedTensor { format: DType::E5M2, pow2_scales: false },
    };
    let op = DelayedScaling::new((0..tensors.len()).map(of).collect(), margin, latest);
    let given = |values: Vec<f64>| Fill::Values(values);
    let inputs = tensors.iter().flat_map(|&(amax, length)| {
        let past = (0..length).map(|i| if i < length / 2 { (i * 37 % 101) as f64 * 0.25 } else { 0.0 });
        [
            SampleInput::activation([1]).fill(given(vec![amax])).in_format(DType::F32),
            SampleInput::activation([length]).fill(given(past.collect())),
            SampleInput::activation([1, 1]).fill(given(vec![3.5])),
        ]
    });
    Sample::plain(op, inputs.collect::<Vec<_>>())
}

impl Registered for DelayedScaling {
    fn samples() -> Vec<Sample> {
        let some = [(2.5, 4), (0.0, 4), (448.0, 1), (1e-44, 16)];
        vec![sample(&some, 0, false), sample(&some, 3, true)]
    }

    fn large() -> Sample {
        sample(&(0..96).map(|n| (n as f64 * 0.37, 1024)).collect::<Vec<_>>(), 1, false)
    }
}

impl OnCard for DelayedScaling {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    fn card_samples() -> Vec<Sample> {
        let long = [(30.0, 1), (0.125, 255), (2.0, 256), (2.0, 257), (3.0, 1500)];
        let special = [(2.5, 4), (f64::INFINITY, 7), (448.0, 1)];
        vec![
            sample(&long, 0, false),
            sample(&special, 0, false),
            sample(&[(f64::NAN, 3), (1e30, 5)], 1, true),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run_op::run;
    use xtrain_tensor::HostTensor;

    /// History and scale after these amaxes, one step each.
    fn after(op: &DelayedScaling, amaxes: &[f64], length: usize) -> (Vec<f64>, f64, f64) {
        let of = |values: &[f64], shape: &[usize]| {
            HostTensor::from_f64(
                TensorType { dtype: DType::F32, shape: xtrain_tensor::Shape::new(shape) },
                values,
            )
        };
        let (mut history, mut scale, mut largest) = (vec![0.0; length], 0.0, 0.0);
        for &amax in amaxes {
            let inputs = [of(&[amax], &[1]), of(&history, &[length]), of(&[scale], &[1, 1])];
            let made = run(op, &inputs.each_ref());
            (largest, history, scale) = (made[0].to_f64()[0], made[1].to_f64(), made[2].to_f64()[0]);
        }
        (history, scale, largest)
    }

    fn one(format: DType, margin: u32, latest: bool) -> DelayedScaling {
        DelayedScaling::new(vec![DelayedTensor { format, pow2_scales: false }], margin, latest)
    }

    #[test]
    fn the_largest_of_the_history_counts_until_it_falls_out() {
        let op = one(DType::E4M3, 0, false);
        assert_eq!(after(&op, &[2.0], 3), (vec![2.0, 0.0, 0.0], 224.0, 2.0));
        assert_eq!(after(&op, &[2.0, 4.0, 1.0], 3), (vec![1.0, 4.0, 2.0], 112.0, 1.0));
        assert_eq!(after(&op, &[2.0, 4.0, 1.0, 0.5, 0.25], 3), (vec![0.25, 0.5, 1.0], 448.0, 0.25));
        assert_eq!(after(&one(DType::E4M3, 0, true), &[2.0, 4.0, 1.0], 3).1, 448.0);
        assert_eq!(after(&one(DType::E5M2, 3, false), &[2.0], 3).1, 57344.0 / 8.0 / 2.0);
    }

    #[test]
    fn what_is_zero_or_not_finite_leaves_a_tensor_alone_and_is_told() {
        let op = one(DType::E4M3, 0, false);
        let before = after(&op, &[2.0, 4.0], 3);
        assert_eq!(after(&op, &[2.0, 4.0, 0.0], 3), (before.0.clone(), before.1, 0.0));
        assert_eq!(after(&op, &[2.0, 4.0, f64::INFINITY], 3), (before.0.clone(), before.1, f64::INFINITY));
        let (history, scale, largest) = after(&op, &[2.0, 4.0, f64::NAN], 3);
        assert!((history, scale) == (before.0, before.1) && largest.is_nan());
    }
}
