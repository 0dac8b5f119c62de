//! Casts to and from the formats that need a scale: what the FP8 recipes insert around GEMMs, and DeepSeek-V3's E5M6 for a saved activation.
//!
//! The elements of a region ([`Granularity`]) share `scale = max_finite(format) / amax`, at most the largest finite f32, where amax is the
//! largest magnitude in the region; it multiplies before the cast, and its reciprocal comes out. An amax of 0 gives scale 1. So does an
//! amax that is infinite or NaN, and it comes out as it is, so that the step can be marked as not finite: the cast itself saturates and
//! would hide an infinity.
//!
//! E5M6 is scaled as the others are: DeepSeek-V3 (arXiv 2412.19437, section 3.3.3) keeps that activation with tile scales of powers of two
//! as well, one rule is simpler than two, and with its 5 bits of exponent the region's small values stay 30 binary orders apart from its
//! largest one. Whoever wants no scaling gets it from a power of two: it changes no bit of a mantissa.
//!
//! Deliberately absent: scales from a history (`fp8-delayed`), which belong to a recipe's state.

mod cpu;
mod cuda;
mod granularity;
#[cfg(test)]
mod tests;

pub use granularity::Granularity;

use crate::matrix;
use crate::registry::{Fill, OnCard, Registered, Sample, SampleInput};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// `x [R, C] -> (q [R, C] in the format, inv_scale f32, amax f32)`; the shape of the last two is [`Granularity::scales`].
///
/// q is x * scale in f32, rounded to nearest even and saturated to the largest finite value; NaN stays NaN. amax is the region's element
/// of the largest bits without the sign: a NaN if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize {
    /// E4M3, E5M2 or E5M6 (packed).
    pub format: DType,
    /// Which elements share a scale.
    pub granularity: Granularity,
    /// Whether scales are rounded down to a power of two, so that scaling adds no rounding error.
    pub pow2_scales: bool,
}

/// `(q [R, C], inv_scale) -> x' [R, C]`: q * inv_scale in f32, rounded once into `out`. The shape of the scales tells which elements
/// share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dequantize {
    /// F32 or BF16.
    pub out: DType,
}

fn is_scaled(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::E5M2 | DType::E5M6)
}

fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

impl Op for Quantize {
    fn name(&self) -> &'static str {
        "quantize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("quantize", inputs, 1)?;
        let (rows, cols) = matrix("what is quantized", inputs[0])?;
        OpError::ensure(rows > 0 && cols > 0 && is_plain(inputs[0].dtype), || {
            format!("what is quantized must be f32 or bf16 and not empty, not {}", inputs[0])
        })?;
        OpError::ensure(is_scaled(self.format), || {
            format!("{} takes no scale; quantize makes e4m3, e5m2 or e5m6", self.format)
        })?;
        let scales = TensorType::new(DType::F32, self.granularity.scales(rows, cols));
        Ok(vec![inputs[0].with_dtype(self.format), scales, scales])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Op for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dequantize", inputs, 2)?;
        let (rows, cols) = matrix("what is dequantized", inputs[0])?;
        let (high, wide) = matrix("the scales", inputs[1])?;
        OpError::ensure(rows > 0 && cols > 0 && is_scaled(inputs[0].dtype), || {
            format!("what is dequantized must be e4m3, e5m2 or e5m6 and not empty, not {}", inputs[0])
        })?;
        OpError::ensure(is_plain(self.out), || format!("dequantize makes f32 or bf16, not {}", self.out))?;
        let known = is_plain(inputs[1].dtype) && Granularity::of_scales([high, wide], rows, cols).is_some();
        OpError::ensure(known, || {
            let shapes = Granularity::ALL.map(|g| format!("{:?}", g.scales(rows, cols)));
            format!(
                "the scales of {} must be f32 or bf16 of one of the shapes {}, not {}",
                inputs[0],
                shapes.join(", "),
                inputs[1]
            )
        })?;
        Ok(vec![inputs[0].with_dtype(self.out)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl Registered for Quantize {
    fn samples() -> Vec<Sample> {
        let sample = |format, granularity, pow2_scales, shape| {
            Sample::plain(Quantize { format, granularity, pow2_scales }, [SampleInput::activation(shape)])
        };
        vec![
            sample(DType::E4M3, Granularity::Tensor, false, [13, 7]),
            sample(DType::E5M2, Granularity::Row, false, [3, 17]),
            sample(DType::E4M3, Granularity::Column, true, [19, 5]),
            sample(DType::E4M3, Granularity::Tile1x128, true, [3, 131]),
            sample(DType::E5M2, Granularity::Tile128x1, false, [131, 3]),
            sample(DType::E4M3, Granularity::Block128, true, [129, 130]),
            sample(DType::E5M6, Granularity::Tile1x128, true, [3, 129]),
        ]
    }

    fn large() -> Sample {
        Sample::plain(
            Quantize { format: DType::E4M3, granularity: Granularity::Tensor, pow2_scales: true },
            [SampleInput::activation([300, 160])],
        )
    }
}

impl Registered for Dequantize {
    fn samples() -> Vec<Sample> {
        let sample = |format, scales: [usize; 2], out| {
            let q = SampleInput::activation([5, 131]).in_format(format);
            Sample::plain(Dequantize { out }, [q, SampleInput::activation(scales)])
        };
        vec![
            sample(DType::E4M3, [1, 1], DType::F32),
            sample(DType::E5M2, [5, 2], DType::BF16),
            sample(DType::E5M6, [5, 1], DType::F32),
        ]
    }

    fn large() -> Sample {
        let q = SampleInput::activation([300, 160]).in_format(DType::E4M3);
        Sample::plain(Dequantize { out: DType::BF16 }, [q, SampleInput::activation([3, 2])])
    }
}

impl OnCard for Quantize {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    /// Every format at every granularity, in rows of whole vectors and in others, over several areas; and what a scale must make an
    /// exception of.
    fn card_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            for granularity in Granularity::ALL {
                for (n, shape) in [[300, 264], [131, 277], [1, 1]].into_iter().enumerate() {
                    let op = Quantize { format, granularity, pow2_scales: n == 0 };
                    all.push(Sample::plain(op, [SampleInput::activation(shape)]));
                }
                // Zeros, what f32 holds at its ends, an infinity and numbers that are none, each in a tile of its own.
                let special = [0.0, 1e-44, 3e38, f64::INFINITY, f64::NAN, -0.0];
                let value = |i: usize| {
                    if i.is_multiple_of(5) {
                        special[i / 128 % 6]
                    } else {
                        (i % 128) as f64 * 1e-3 * (i / 128 % 3 / 2) as f64
                    }
                };
                let values = (0..4 * 768).map(value).collect();
                let op = Quantize { format, granularity, pow2_scales: false };
                all.push(Sample::plain(op, [SampleInput::activation([4, 768]).fill(Fill::Values(values))]));
            }
        }
        all
    }
}

impl OnCard for Dequantize {
    const SOURCES: &'static [KernelSource] = &[cuda::DEQUANTIZE];

    fn card_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            for granularity in Granularity::ALL {
                for ([rows, cols], out) in [([300, 264], DType::BF16), ([131, 277], DType::F32)] {
                    let q = SampleInput::activation([rows, cols]).in_format(format);
                    let scales = SampleInput::activation(granularity.scales(rows, cols));
                    all.push(Sample::plain(Dequantize { out }, [q, scales]));
                }
            }
        }
        all
    }
}
