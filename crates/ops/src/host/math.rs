//! Vectorised elementary functions and reductions.
//!
//! In f32 they are polynomials in loops that are compiled for the machine's widest vector unit; in f64, which
//! only gradient checks use, they are the standard library's functions.

use xtrain_tensor::formats;
use xtrain_tensor::{DType, Real, Stored};

pub(crate) use xtrain_tensor::vectorized;

/// Rounding of intermediate operands of a GEMM, which are never stored (the probabilities of attention).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    /// No rounding.
    None,
    /// Rounding to bf16.
    Bf16,
}

impl Rounding {
    /// The rounding to multiply with operands of this type.
    pub(crate) fn for_operands(dtype: DType) -> Self {
        if dtype == DType::BF16 { Rounding::Bf16 } else { Rounding::None }
    }
}

/// [`Rounding::None`] of one number.
#[inline(always)]
pub(crate) fn exact<T>(x: T) -> T {
    x
}

/// [`Rounding::Bf16`] of one number.
#[inline(always)]
pub(crate) fn round_bf16<T: Real>(x: T) -> T {
    T::from_f64(f64::from(formats::round_bf16(x.f64() as f32)))
}

/// e^x, to within 2 units in the last place over f32's range; 0 below -87.33, where results would be
/// subnormal.
///
/// With x = n ln 2 + r and |r| <= ln 2 / 2: e^r by a polynomial of degree 7, times 2^n by its exponent bits.
#[inline(always)]
pub(crate) fn exp_f32(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.336_54, 88.722_84);
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits, where it is read,
    // because a checked conversion to an integer does not vectorise.
    const ROUND: f32 = 12_582_912.0;
    let rounded = clamped.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let n_int = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = n.mul_add(-LN2_LO, n.mul_add(-LN2_HI, clamped));
    let p = 1.984_127e-4f32;
    let p = p.mul_add(r, 1.388_888_9e-3);
    let p = p.mul_add(r, 8.333_334e-3);
    let p = p.mul_add(r, 4.166_666_6e-2);
    let p = p.mul_add(r, 1.666_666_7e-1);
    let p = p.mul_add(r, 0.5);
    let e = (p * r).mul_add(r, r) + 1.0;
    // 2^n in two factors, so that n = 128 does not overflow before the product.
    let half = n_int >> 1;
    let rest = n_int - half;
    let scale = |k: i32| f32::from_bits(((k + 127) as u32) << 23);
    let y = e * scale(half) * scale(rest);
    let y = if x < -87.336_54 { 0.0 } else { y };
    let y = if x > 88.722_84 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// e^x in the compute type: [`exp_f32`] for f32.
#[inline(always)]
pub(crate) fn exp<T: Real>(x: T) -> T {
    // Both branches are decided at compile time; converting to the same type is exact.
    match T::DTYPE {
        DType::F32 => T::from_f64(f64::from(exp_f32(x.f64() as f32))),
        _ => x.exp(),
    }
}

/// 1 / (1 + e^-x). If e^-x overflows to infinity, the result is 0, the limit.
#[inline(always)]
pub(crate) fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + exp(-x))
}

/// Replaces every x by e^(x - max), rounded. Returns the sum before rounding, in 16 interleaved partial sums.
#[inline(always)]
pub(crate) fn exponentials<T: Real>(x: &mut [T], max: T, rounding: Rounding) -> T {
    match rounding {
        Rounding::None => rounded_exponentials(x, max, exact),
        Rounding::Bf16 => rounded_exponentials(x, max, round_bf16),
    }
}

#[inline(always)]
fn rounded_exponentials<T: Real>(x: &mut [T], max: T, round: impl Fn(T) -> T) -> T {
    let mut lanes = [T::ZERO; 16];
    let mut add = |chunk: &mut [T]| {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            let e = exp(*x - max);
            *lane += e;
            *x = round(e);
        }
    };
    let mut chunks = x.chunks_exact_mut(16);
    chunks.by_ref().for_each(&mut add);
    add(chunks.into_remainder());
    lanes.iter().copied().sum()
}

/// The sum of `a[i] * b[i]`, in 16 interleaved partial sums.
#[inline(always)]
pub(crate) fn dot<S: Stored>(a: &[S::Real], b: &[S]) -> S::Real {
    let mut lanes = [S::Real::ZERO; 16];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<16>(), b.as_chunks::<16>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..16 {
            lanes[l] += a[l] * b[l].real();
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += *a * b.real();
    }
    lanes.iter().copied().sum()
}

/// The maximum of `x`, which ignores NaNs, as [`Real::max`] does; negative infinity if there is none.
#[inline(always)]
pub(crate) fn max<T: Real>(x: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; 16];
    let mut chunks = x.chunks_exact(16);
    for chunk in &mut chunks {
        for (lane, &v) in lanes.iter_mut().zip(chunk) {
            *lane = if v > *lane { v } else { *lane };
        }
    }
    let tail = chunks.remainder().iter().copied();
    lanes.iter().copied().chain(tail).fold(T::NEG_INFINITY, |a, b| if b > a { b } else { a })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0f64;
        for i in -870_000..=887_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let ulp = f64::from(f32::EPSILON) * 2f64.powi(exact.log2().floor() as i32);
            worst = worst.max((f64::from(exp_f32(x)) - exact).abs() / ulp);
        }
        assert!(worst < 2.0, "{worst} ulp");
    }

    #[test]
    fn exp_keeps_the_special_values() {
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(100.0), f32::INFINITY);
        assert_eq!(exp_f32(-100.0), 0.0);
        assert_eq!(exp_f32(0.0), 1.0);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn reductions_agree_with_the_plain_loop() {
        for n in [0usize, 1, 15, 16, 17, 100] {
            let x: Vec<f64> = (0..n).map(|i| (i as f64 * 7.3).sin()).collect();
            let exponentials = x.iter().map(|v| (v - 1.0).exp()).collect::<Vec<_>>();
            let mut replaced = x.clone();
            let total = super::exponentials(&mut replaced, 1.0, Rounding::None);
            assert!(replaced == exponentials && (total - exponentials.iter().sum::<f64>()).abs() < 1e-12);
            assert!((dot(&x, &x) - x.iter().map(|v| v * v).sum::<f64>()).abs() < 1e-12);
            assert_eq!(max(&x), x.iter().copied().fold(f64::NEG_INFINITY, f64::max));
        }
    }
}
