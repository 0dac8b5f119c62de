//! Samples of [`RmsQuantize`].

use super::RmsQuantize;
use crate::quantize::{CastSource, Given, Layouts, Quantize};
use crate::samples::{Fill, GpuTolerance, Sample, SampleInput, Sampled};
use xtrain_tensor::{DType, Scaling, TensorType};

impl Sampled for RmsQuantize {
    fn tolerance(&self, _: &[TensorType]) -> GpuTolerance {
        GpuTolerance::FusedCast { exact_bf16: false }
    }

    /// None: bf16 rounds the norm before the cast, so some casts differ from those of f32 by a step of FP8.
    fn samples() -> Vec<Sample> {
        Vec::new()
    }

    fn large() -> Sample {
        sample([300, 160], by_tiles(Layouts::Both), None)
    }

    fn gpu_samples() -> Vec<Sample> {
        let delayed = |scale, layouts| {
            let cast = Quantize::new(DType::E4M3, Scaling::Tensor, false, layouts);
            (Quantize { given: Given::Scale, ..cast }, Some(scale))
        };
        let casts = [
            delayed(30.0, Layouts::Both),
            delayed(0.0, Layouts::Both),
            delayed(30.0, Layouts::RowMajor),
            delayed(30.0, Layouts::Transposed),
            (by_tiles(Layouts::Both), None),
            (by_tiles(Layouts::RowMajor), None),
            (by_tiles(Layouts::Transposed), None),
        ];
        let shapes = [[256, 384], [130, 264]].into_iter();
        shapes.flat_map(|shape| casts.map(|(cast, scale)| sample(shape, cast, scale))).collect()
    }
}

fn by_tiles(layouts: Layouts) -> Quantize {
    Quantize::new(DType::E4M3, Scaling::Tile, false, layouts)
}

/// The op with this cast, and its delayed scale if it has one.
fn sample([t, d]: [usize; 2], cast: Quantize, scale: Option<f64>) -> Sample {
    let mut inputs = vec![SampleInput::activation([t, d]); 2];
    inputs.push(SampleInput::parameter([d]));
    inputs.extend(scale.map(|scale| SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]))));
    Sample::plain(RmsQuantize { eps: 1e-5, cast: Quantize { source: CastSource::Norm, ..cast } }, inputs)
}
