//! Samples of [`Normal`].

use super::Normal;
use crate::samples::{GpuTolerance, MULTIPROCESSORS, Sample, Sampled};
use xtrain_tensor::{Shape, TensorType};

impl Sampled for Normal {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::Exact
    }

    fn samples() -> Vec<Sample> {
        let parts = [(&[3, 11][..], 5, 33), (&[2, 3], 1, 1), (&[7], 2, 5), (&[64], 8, 0), (&[12], 4, 9)];
        let parts = parts.map(|(shape, first, elements)| part(shape, first, elements));
        [sample(&[3, 11]), sample(&[1]), sample(&[64])].into_iter().chain(parts).collect()
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
    part(shape, 0, shape.iter().product())
}

/// Elements from `first_element` on, and zeros after them.
fn part(shape: &[usize], first_element: u64, elements: usize) -> Sample {
    let (shape, seed) = (Shape::new(shape), 0xFEDC_BA98_7654_3210);
    let op = Normal { shape, std: 0.02, seed, step: u32::MAX, site: 7, first_element, elements };
    Sample::plain(op, [])
}
