//! Samples of [`CastStatistics`].

use super::CastStatistics;
use crate::samples::{Fill, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling};

impl Sampled for CastStatistics {
    fn samples() -> Vec<Sample> {
        vec![
            sample(DType::E4M3, Scaling::Tensor, false, [13, 7], None),
            sample(DType::E5M2, Scaling::Row, true, [5, 9], None),
            sample(DType::E4M3, Scaling::Tile, false, [3, 131], None),
            sample(DType::E4M3, Scaling::Tile, true, [131, 3], None),
            sample(DType::E5M2, Scaling::Block, true, [129, 130], None),
        ]
    }

    fn large() -> Sample {
        sample(DType::E4M3, Scaling::Tile, true, [300, 160], None)
    }

    /// More rows than blocks, rows longer and shorter than a block has threads, and numbers with counts of
    /// their own.
    fn gpu_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for (format, scaling) in
            [DType::E4M3, DType::E5M2].into_iter().flat_map(|f| Scaling::ALL.map(|s| (f, s)))
        {
            for transposed in [false, true] {
                all.push(sample(format, scaling, transposed, [1030, 264], None));
                all.push(sample(format, scaling, transposed, [131, 777], None));
                let special = [0.0, -0.0, 1e-30, 3e30, f64::INFINITY, f64::NAN, -1e30, 1.0];
                let values = (0..40 * 300).map(|i| special[i * 7 / 3 % 8]).collect();
                all.push(sample(format, scaling, transposed, [40, 300], Some(Fill::Values(values))));
            }
        }
        all
    }
}

/// A sample with numbers around 1 in q and scales around 0.5, so that x is above and below the restored
/// numbers.
fn sample(
    format: DType,
    scaling: Scaling,
    transposed: bool,
    [rows, cols]: [usize; 2],
    fill: Option<Fill>,
) -> Sample {
    let extents = if transposed { [cols, rows] } else { [rows, cols] };
    let x = SampleInput::activation([rows, cols]);
    let x = match fill {
        Some(fill) => x.fill(fill),
        None => x,
    };
    let scales = SampleInput::activation(scaling.shape(extents[0], extents[1])).fill(Fill::Normal(0.5, 0.05));
    let q = SampleInput::activation(extents).in_format(format);
    Sample::plain(CastStatistics { scaling, transposed }, [x, q, scales])
}
