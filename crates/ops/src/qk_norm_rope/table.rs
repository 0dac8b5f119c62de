//! The table of cosines and sines of rotation angles, as in transformers (`modeling_rope_utils.py`).
//!
//! Frequencies, their scaling and the angle position * frequency are f32 operations in transformers' order,
//! because at large positions two implementations agree only if they round the angle equally. Cosine and sine
//! of that f32 angle are exact up to their final rounding.

use rayon::prelude::*;
use std::f64::consts::TAU;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// Scaling of the frequencies for contexts longer than that of the first training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Division of all frequencies by `factor` (position interpolation, Chen et al., arXiv 2306.15595).
    Linear {
        /// Growth of the context.
        factor: f64,
    },
    /// Llama 3's scaling: high frequencies are unchanged, low ones are divided by `factor`, and those between
    /// are interpolated.
    Llama3 {
        /// Growth of the context.
        factor: f64,
        /// Frequencies with wavelengths above `original_max_position_embeddings` / this are divided.
        low_freq_factor: f64,
        /// Frequencies with wavelengths below `original_max_position_embeddings` / this are unchanged.
        high_freq_factor: f64,
        /// Context of the first training, in tokens.
        original_max_position_embeddings: usize,
    },
}

/// The table `f32[positions, head_dim]` that [`QkNormRope`](super::QkNormRope) reads. Row p holds the cosines
/// of p * frequency for the head_dim / 2 frequencies theta^(-2j / head_dim), scaled by `scaling`, then the
/// sines.
///
/// # Panics
/// If `head_dim` is odd.
pub fn rotation_table(positions: usize, head_dim: usize, theta: f64, scaling: RopeScaling) -> HostTensor {
    assert!(
        head_dim.is_multiple_of(2),
        "a head is rotated in pairs of columns, so head_dim must be even, not {head_dim}"
    );
    let frequencies = frequencies(head_dim, theta, scaling);
    let mut table = HostTensor::zeros(TensorType::new(DType::F32, [positions, head_dim]));
    let rows = bytemuck::cast_slice_mut::<u8, f32>(table.bytes_mut()).par_chunks_exact_mut(head_dim.max(1));
    rows.enumerate().for_each(|(position, row)| {
        let (cos, sin) = row.split_at_mut(head_dim / 2);
        for ((c, s), frequency) in cos.iter_mut().zip(sin).zip(&frequencies) {
            let angle = position as f32 * frequency;
            let (sine, cosine) = f64::from(angle).sin_cos();
            (*c, *s) = (cosine as f32, sine as f32);
        }
    });
    table
}

/// The head_dim / 2 scaled frequencies, in radians per token.
fn frequencies(head_dim: usize, theta: f64, scaling: RopeScaling) -> Vec<f32> {
    let base = f64::from(theta as f32);
    let unscaled = (0..head_dim).step_by(2).map(|i| {
        let exponent = i as f32 / head_dim as f32;
        1.0 / (base.powf(f64::from(exponent)) as f32)
    });
    unscaled.map(|frequency| scaled(frequency, scaling)).collect()
}

fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let context = original_max_position_embeddings as f64;
            // torch computes number / tensor as the tensor's reciprocal times the number.
            let wavelength = (1.0 / frequency) * TAU as f32;
            if wavelength > (context / low_freq_factor) as f32 {
                return frequency / factor as f32;
            }
            if wavelength < (context / high_freq_factor) as f32 {
                return frequency;
            }
            let turns = (1.0 / wavelength) * context as f32;
            let smooth = (turns - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
            (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };

    fn near(found: f32, expected: f64) {
        assert!((f64::from(found) / expected - 1.0).abs() < 5e-7, "{found} instead of {expected}");
    }

    #[test]
    fn frequencies_are_powers_of_the_base() {
        let f = frequencies(8, 10_000.0, RopeScaling::None);
        for (found, expected) in f.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            near(*found, expected);
        }
        for (found, expected) in frequencies(8, 10_000.0, RopeScaling::Linear { factor: 4.0 }).iter().zip(f) {
            assert_eq!(*found, expected / 4.0);
        }
    }

    #[test]
    fn llama3_does_not_change_frequencies_with_short_wavelengths() {
        // 2 pi / 0.1 = 63 tokens, below 8192 / 4.
        assert_eq!(scaled(0.1, LLAMA3), 0.1);
    }

    #[test]
    fn llama3_divides_frequencies_with_long_wavelengths() {
        // 2 pi / 1e-4 = 62832 tokens, above 8192 / 1.
        assert_eq!(scaled(1e-4, LLAMA3), 1e-4 / 8.0);
    }

    #[test]
    fn llama3_interpolates_between() {
        // Wavelength 8192/2: 2 turns in the context, 1/3 of the way from 1 to 4, so f (2/3 / 8 + 1/3) = 5/12
        // f.
        near(scaled((TAU / 4096.0) as f32, LLAMA3), 5.0 / 12.0 * TAU / 4096.0);
        // Wavelength 8192/3: 3 turns, 2/3 of the way, so f (1/3 / 8 + 2/3) = 17/24 f.
        near(scaled((TAU * 3.0 / 8192.0) as f32, LLAMA3), 17.0 / 24.0 * TAU * 3.0 / 8192.0);
    }

    #[test]
    fn rows_hold_the_cosines_then_the_sines_of_the_rounded_angle() {
        let table = rotation_table(70_001, 4, 500_000.0, LLAMA3);
        let values: &[f32] = bytemuck::cast_slice(table.bytes());
        assert_eq!(values[..4], [1.0, 1.0, 0.0, 0.0]);
        let frequencies = frequencies(4, 500_000.0, LLAMA3);
        for position in [1usize, 17, 8192, 70_000] {
            let row = &values[position * 4..][..4];
            for j in 0..2 {
                let angle = f64::from(position as f32 * frequencies[j]);
                assert_eq!((row[j], row[2 + j]), (angle.cos() as f32, angle.sin() as f32));
            }
        }
    }
}
