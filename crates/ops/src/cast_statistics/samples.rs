//! Samples of [`CastStatistics`].

use super::CastStatistics;
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, Scaling};

impl Sampled for CastStatistics {
    fn samples() -> Vec<Sample> {
        vec![
            sample(DType::E4M3, Scaling::Tensor, false, [13, 7]),
            sample(DType::E5M2, Scaling::Row, true, [5, 9]),
            sample(DType::E4M3, Scaling::Tile, false, [3, 131]),
            sample(DType::E4M3, Scaling::Tile, true, [131, 3]),
            sample(DType::E5M2, Scaling::Block, true, [129, 130]),
        ]
    }

    fn large() -> Sample {
        sample(DType::E4M3, Scaling::Tile, true, [300, 160])
    }

    /// More rows than blocks, rows longer and shorter than a block has threads, and numbers with counts of
    /// their own.
    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for (format, scaling) in
            [DType::E4M3, DType::E5M2].into_iter().flat_map(|f| Scaling::ALL.map(|s| (f, s)))
        {
            for transposed in [false, true] {
                let mut large = sample(format, scaling, transposed, [1030, 264]);
                // The largest number is in the first row.
                let x = |i: usize| if i == 3 { -5.0 } else { (i * 7919 % 2003) as f64 / 501.0 - 2.0 };
                large.inputs[0].fill = Fill::each(x);
                all.push(large);
                all.push(sample(format, scaling, transposed, [131, 777]));
                all.push(special(format, scaling, transposed));
            }
        }
        all
    }
}

/// A sample with numbers around 1 in q and scales around 0.5, so that x is above and below the restored
/// numbers.
fn sample(format: DType, scaling: Scaling, transposed: bool, [rows, cols]: [usize; 2]) -> Sample {
    let extents = if transposed { [cols, rows] } else { [rows, cols] };
    let x = SampleInput::activation([rows, cols]);
    let scales = SampleInput::activation(scaling.shape(extents[0], extents[1])).fill(Fill::Normal(0.5, 0.05));
    let q = SampleInput::activation(extents).in_format(format);
    Sample::plain(CastStatistics { scaling, transposed }, [x, q, scales])
}

/// A sample with numbers that have counts of their own, among them some just below and just above the least
/// one that saturates.
fn special(format: DType, scaling: Scaling, transposed: bool) -> Sample {
    let mut sample = sample(format, scaling, transposed, [40, 300]);
    let (max, scale) = (f64::from(max_finite(format)), 0.5);
    let x = [0.0, -0.0, 1e-30, 3e30, f64::INFINITY, f64::NAN, -1e30, 1.0];
    let near = [1.0, 1.02, -1.05, 1.1].map(|of| of * max * scale);
    let x: Vec<f64> = x.into_iter().chain(near).collect();
    let q = [max, 1.0, -max, 0.0, max];
    let contents = [x, q.to_vec(), vec![scale]];
    for (input, contents) in sample.inputs.iter_mut().zip(contents) {
        input.fill = Fill::each(move |i| contents[i * 7 / 3 % contents.len()]);
    }
    sample
}
