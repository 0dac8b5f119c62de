//! Samples of [`Normal`].

use super::Normal;
use crate::samples::{GpuTolerance, MULTIPROCESSORS, Sample, Sampled};
use xtrain_tensor::{Shape, TensorType};

impl Sampled for Normal {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        vec![sample(&[3, 11]), sample(&[1]), sample(&[64])]
    }

    fn large() -> Sample {
        sample(&[300, 161])
    }

    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        // Enough random words to take every branch of the logarithm, sine and cosine.
        vec![sample(&[4097 * multiprocessors / MULTIPROCESSORS, 1023])]
    }
}

fn sample(shape: &[usize]) -> Sample {
    let op =
        Normal { shape: Shape::new(shape), std: 0.02, seed: 0xFEDC_BA98_7654_3210, step: u32::MAX, site: 7 };
    Sample::plain(op, [])
}
