//! Samples of [`DelayedScaling`].

use super::{DelayedScaling, DelayedTensor};
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::DType;

impl Sampled for DelayedScaling {
    fn samples() -> Vec<Sample> {
        let some = [(2.5, 4), (0.0, 4), (448.0, 1), (1e-44, 16)];
        let halted = |word| {
            let mut sample = sample(&some, 0, false);
            sample.inputs.push(SampleInput::counters([word]));
            sample
        };
        vec![sample(&some, 0, false), sample(&some, 3, true), halted(0), halted(1)]
    }

    fn large() -> Sample {
        sample(&(0..96).map(|n| ((n * 37 % 96) as f64 * 0.37, 1024)).collect::<Vec<_>>(), 1, false)
    }

    fn gpu_samples() -> Vec<Sample> {
        let long = [(30.0, 1), (0.125, 255), (2.0, 256), (2.0, 257), (3.0, 1500)];
        let special = [(2.5, 4), (f64::INFINITY, 7), (448.0, 1)];
        vec![
            sample(&long, 0, false),
            sample(&special, 0, false),
            sample(&[(f64::NAN, 3), (1e30, 5)], 1, true),
        ]
    }
}

/// A sample with these tensors: amaxes and lengths of histories.
fn sample(tensors: &[(f64, usize)], margin: u32, latest: bool) -> Sample {
    let tensor = |n: usize| match n % 2 {
        0 => DelayedTensor {
            format: DType::E4M3,
            pow2_scales: n.is_multiple_of(3),
            in_pieces: n.is_multiple_of(4),
        },
        _ => DelayedTensor { format: DType::E5M2, pow2_scales: false, in_pieces: true },
    };
    let op = DelayedScaling::new((0..tensors.len()).map(tensor).collect(), margin, latest);
    let inputs = tensors.iter().enumerate().flat_map(|(n, &(amax, length))| {
        // One number is larger than all others: in each tensor at another place, first at the end, after
        // the oldest number is dropped.
        let largest = (2 * length - 2 - n * length / tensors.len()) % length;
        let past = (0..length).map(move |i| match i {
            _ if i == largest => 30.0,
            _ if i < length / 2 => (i * 37 % 101) as f64 * 0.25,
            _ => 0.0,
        });
        [
            SampleInput::activation([1]).fill(Fill::Values(vec![amax])).in_format(DType::F32),
            SampleInput::activation([length]).fill(Fill::Values(past.collect())),
            SampleInput::activation([1, 1]).fill(Fill::Values(vec![if n % 3 == 1 { 0.0 } else { 3.5 }])),
        ]
    });
    Sample::plain(op, inputs.collect::<Vec<_>>())
}
