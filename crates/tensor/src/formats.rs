//! The number formats narrower than 32 bits: casts from and to f32.
//!
//! Every cast rounds to nearest even and saturates to the largest finite value; NaN stays NaN (CUDA's
//! SATFINITE). Infinities of bf16 stay infinities: bf16 has f32's range and is not saturated.
//!
//! Sources: "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1; E5M6: DeepSeek-V3 (arXiv
//! 2412.19437), section 3.3.3.

use crate::minifloat::Minifloat;
use crate::{DType, vectorized};
use half::bf16;

const E4M3: Minifloat = Minifloat { exponent: 4, mantissa: 3, max: 448.0, infinities: false };
const E5M2: Minifloat = Minifloat { exponent: 5, mantissa: 2, max: 57344.0, infinities: true };
const E5M6: Minifloat = Minifloat { exponent: 5, mantissa: 6, max: 65024.0, infinities: true };

/// The largest finite value of a scaled format, that is one of fewer than 16 bits.
///
/// # Panics
/// For any other type.
pub const fn max_finite(dtype: DType) -> f32 {
    match dtype {
        DType::E4M3 => E4M3.max,
        DType::E5M2 => E5M2.max,
        DType::E5M6 => E5M6.max,
        _ => panic!("only the scaled formats have a maximum that matters"),
    }
}

/// The least magnitude that a cast to an FP8 format saturates: half a step above its largest number. Smaller
/// ones would round to that number in any case.
///
/// # Panics
/// For any other type.
pub const fn overflow(dtype: DType) -> f32 {
    let step = match dtype {
        DType::E4M3 => 32.0,
        DType::E5M2 => 8192.0,
        _ => panic!("only casts to FP8 saturate"),
    };
    max_finite(dtype) + step / 2.0
}

/// The scale by which the numbers of a region with this amax are multiplied before the cast to `format`: it
/// maps amax to the largest finite value. It is at most the largest finite f32, and rounded down to a power
/// of two if `pow2`. The scale is 1 if amax is 0 or not finite.
///
/// # Panics
/// For a format without a scale, as in [`max_finite`].
pub fn cast_scale(format: DType, amax: f32, pow2: bool) -> f32 {
    if amax == 0.0 || !amax.is_finite() {
        return 1.0;
    }
    scale_to(max_finite(format), amax, pow2)
}

/// The scale that maps a positive, finite amax to `most`. It is at most the largest finite f32, and rounded
/// down to a power of two if `pow2`.
pub fn scale_to(most: f32, amax: f32, pow2: bool) -> f32 {
    let scale = (most / amax).min(f32::MAX);
    if pow2 { f32::from_bits(scale.to_bits() & 0xFF80_0000) } else { scale }
}

/// Rounds to bfloat16 and back.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(x)) << 16)
}

/// The bits of `x` as bfloat16. NaNs become quiet and keep their sign and leading payload.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // A carry into the exponent is correct, up to infinity.
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
    let wide = if bits & 0x7FFF_FFFF > 0x7F80_0000 { bits | 0x40_0000 } else { rounded };
    // Vector units pack the upper halves of signed words with one instruction.
    (wide as i32 >> 16) as u16
}

/// Rounds to bfloat16 and back by stochastic rounding. `random` holds 16 uniform bits in its lower half; the
/// mean over all of them is `x`. bfloat16 numbers are exact. NaN and numbers without a finite neighbour round
/// as in [`to_bf16`].
#[inline(always)]
pub fn round_bf16_stochastic(x: f32, random: u32) -> f32 {
    let bits = x.to_bits();
    let magnitude = bits & 0x7FFF_FFFF;
    // The largest finite number and everything above it, infinities and NaNs included.
    let rounded = if magnitude >= 0x7F7F_0000 {
        u32::from(to_bf16(x)) << 16
    } else {
        bits.wrapping_add(random & 0xFFFF) & 0xFFFF_0000
    };
    f32::from_bits(rounded)
}

/// The value of a bfloat16.
#[inline(always)]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Widens a slice of bfloat16.
pub fn widen_bf16(src: &[bf16], dst: &mut [f32]) {
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src).for_each(|(d, s)| *d = from_bf16(*s)),
    );
}

/// Rounds a slice to bfloat16.
pub fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
    vectorized(
        #[inline(always)]
        || dst.iter_mut().zip(src).for_each(|(d, s)| *d = bf16::from_bits(to_bf16(*s))),
    );
}

/// The byte of `x` as E4M3.
#[inline(always)]
pub fn to_e4m3(x: f32) -> u8 {
    E4M3.encode(x) as u8
}

/// The value of an E4M3 byte.
#[inline(always)]
pub fn from_e4m3(bits: u8) -> f32 {
    E4M3.decode(bits.into())
}

/// The byte of `x` as E5M2.
#[inline(always)]
pub fn to_e5m2(x: f32) -> u8 {
    E5M2.encode(x) as u8
}

/// The value of an E5M2 byte.
#[inline(always)]
pub fn from_e5m2(bits: u8) -> f32 {
    E5M2.decode(bits.into())
}

/// The twelve bits of `x` as E5M6: sign, 5 exponent bits of bias 15, 6 mantissa bits. E5M6 is IEEE binary16
/// with four mantissa bits fewer.
#[inline(always)]
pub fn to_e5m6(x: f32) -> u16 {
    E5M6.encode(x) as u16
}

/// The value of E5M6's twelve bits; the four bits above them are ignored.
#[inline(always)]
pub fn from_e5m6(bits: u16) -> f32 {
    E5M6.decode(bits.into())
}

/// Rounds a slice to a scaled format, packed if the format is. It is inlined, so that it is vectorised as its
/// caller is.
///
/// # Panics
/// For another type, or if `dst` is not `dtype.bytes(src.len())` long.
#[inline(always)]
pub fn narrow(dtype: DType, src: &[f32], dst: &mut [u8]) {
    assert_eq!(dst.len(), dtype.bytes(src.len()), "bytes of {} elements of {dtype}", src.len());
    match dtype {
        DType::E4M3 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = to_e4m3(s)),
        DType::E5M2 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = to_e5m2(s)),
        DType::E5M6 => pack_e5m6(src, dst),
        other => panic!("{other} is no scaled format"),
    }
}

/// The values of a slice in a scaled format: the inverse of [`narrow`].
///
/// # Panics
/// For another type, or if `src` is not `dtype.bytes(dst.len())` long.
#[inline(always)]
pub fn widen(dtype: DType, src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), dtype.bytes(dst.len()), "bytes of {} elements of {dtype}", dst.len());
    match dtype {
        DType::E4M3 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = from_e4m3(s)),
        DType::E5M2 => dst.iter_mut().zip(src).for_each(|(d, &s)| *d = from_e5m2(s)),
        DType::E5M6 => unpack_e5m6(src, dst),
        other => panic!("{other} is no scaled format"),
    }
}

/// Elements of E5M6 that are cast at once, by vectorised code, before they are packed eight by eight.
const PACKED_AT_ONCE: usize = 64;
const PACKED_BYTES: usize = DType::E5M6.bytes(PACKED_AT_ONCE);

/// Packs E5M6: element 2i in byte 3i and the low half of byte 3i+1, element 2i+1 in the high half and byte
/// 3i+2.
///
/// # Panics
/// If `dst` is not `DType::E5M6.bytes(src.len())` long.
#[inline(always)]
pub fn pack_e5m6(src: &[f32], dst: &mut [u8]) {
    assert_eq!(dst.len(), DType::E5M6.bytes(src.len()), "packed length");
    for (src, dst) in src.chunks(PACKED_AT_ONCE).zip(dst.chunks_mut(PACKED_BYTES)) {
        let mut words = [0; PACKED_AT_ONCE];
        words.iter_mut().zip(src).for_each(|(w, &s)| *w = to_e5m6(s));
        let mut packed = [0; PACKED_BYTES];
        for (out, w) in packed.chunks_exact_mut(12).zip(words.chunks_exact(8)) {
            let w = |i: usize| u32::from(w[i]);
            out[..4].copy_from_slice(&(w(0) | w(1) << 12 | w(2) << 24).to_le_bytes());
            out[4..8].copy_from_slice(&(w(2) >> 8 | w(3) << 4 | w(4) << 16 | w(5) << 28).to_le_bytes());
            out[8..].copy_from_slice(&(w(5) >> 4 | w(6) << 8 | w(7) << 20).to_le_bytes());
        }
        dst.copy_from_slice(&packed[..dst.len()]);
    }
}

/// Unpacks the output of [`pack_e5m6`].
///
/// # Panics
/// If `src` is not `DType::E5M6.bytes(dst.len())` long.
#[inline(always)]
pub fn unpack_e5m6(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), DType::E5M6.bytes(dst.len()), "packed length");
    for (src, dst) in src.chunks(PACKED_BYTES).zip(dst.chunks_mut(PACKED_AT_ONCE)) {
        let mut packed = [0; PACKED_BYTES];
        packed[..src.len()].copy_from_slice(src);
        let mut words = [0; PACKED_AT_ONCE];
        for (bytes, w) in packed.chunks_exact(12).zip(words.chunks_exact_mut(8)) {
            let b = |i: usize| {
                u32::from_le_bytes([bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2], bytes[4 * i + 3]])
            };
            let (a, b, c) = (b(0), b(1), b(2));
            let parts = [a, a >> 12, a >> 24 | b << 8, b >> 4, b >> 16, b >> 28 | c << 4, c >> 8, c >> 20];
            w.iter_mut().zip(parts).for_each(|(w, part)| *w = part as u16 & 0xFFF);
        }
        dst.iter_mut().zip(words).for_each(|(d, w)| *d = from_e5m6(w));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use float8::{F8E4M3, F8E5M2};
    use proptest::prelude::*;

    /// The nearest representable value, by search over all patterns; ties to the even pattern, saturating.
    fn nearest(x: f32, patterns: impl Iterator<Item = u16>, value: impl Fn(u16) -> f32, max: f32) -> f32 {
        let x = f64::from(x.clamp(-max, max));
        patterns
            .map(|p| (p, f64::from(value(p))))
            .filter(|(_, v)| v.is_finite() && v.abs() <= f64::from(max))
            .min_by(|(p, v), (q, w)| (v - x).abs().total_cmp(&(w - x).abs()).then((p & 1).cmp(&(q & 1))))
            .map(|(_, v)| v as f32)
            .expect("patterns")
    }

    #[test]
    fn stochastic_rounding_to_bf16_is_unbiased() {
        let numbers = [1.0f32, -1.0, 1.003, -0.7, 3.38e38, 1e-39, -9.3e-41, 0.0, -0.0, 2.9999998, 1e-3];
        for x in numbers {
            let all = (0..1 << 16).map(|random| round_bf16_stochastic(x, random | 0xABCD_0000));
            let mut sum = 0.0;
            for y in all {
                assert!(
                    y == round_bf16(y)
                        && (f64::from(x) - f64::from(y)).abs()
                            <= f64::from(x.abs()).max(f32::MIN_POSITIVE.into()) / 128.0
                );
                sum += f64::from(y);
            }
            assert_eq!(sum / 65536.0, f64::from(x), "{x:e}");
        }
        for random in [0, 0x8000, 0xFFFF] {
            for pattern in 0..=u16::MAX {
                let x = from_bf16(bf16::from_bits(pattern));
                let y = round_bf16_stochastic(x, random);
                assert!(y.to_bits() == x.to_bits() || x.is_nan() && y.is_nan(), "{x:e} became {y:e}");
            }
            assert!(round_bf16_stochastic(f32::from_bits(0x7F80_0001), random).is_nan());
            assert_eq!(round_bf16_stochastic(f32::MIN, random), f32::NEG_INFINITY);
        }
    }

    /// E5M6 by arithmetic in f64 instead of bit operations.
    fn to_e5m6_in_f64(x: f32) -> u16 {
        let sign = ((x.to_bits() >> 31) as u16) << 11;
        let magnitude = f64::from(x.abs().min(65024.0));
        // One unit in the last place: 2^(e - 6) for a normal number of exponent e, 2^-20 for subnormals.
        let exponent = if magnitude > 0.0 { (magnitude.log2().floor() as i32).max(-14) } else { -14 };
        let units = (magnitude * 2f64.powi(6 - exponent)).round_ties_even() as u16;
        // A normal number has 64..128 units; 128 carries into the next exponent by itself.
        sign | (((exponent + 14) as u16) << 6).wrapping_add(units)
    }

    /// No format has more than 6 bits of mantissa, so the low 12 bits of f32 only distinguish a tie from
    /// numbers above it: a few of their patterns stand for all.
    #[test]
    fn casts_agree_with_other_definitions_on_every_class_of_numbers() {
        for high in 0..1u32 << 20 {
            for low in [0, 1, 0x800, 0xFFF] {
                let x = f32::from_bits(high << 12 | low);
                if !x.is_nan() {
                    assert_eq!(
                        to_e4m3(x),
                        F8E4M3::from_f32(x.clamp(-448.0, 448.0)).to_bits(),
                        "e4m3 of {x:e}"
                    );
                    assert_eq!(
                        to_e5m2(x),
                        F8E5M2::from_f32(x.clamp(-57344.0, 57344.0)).to_bits(),
                        "e5m2 of {x:e}"
                    );
                    assert_eq!(to_e5m6(x), to_e5m6_in_f64(x), "e5m6 of {x:e}");
                }
            }
        }
    }

    #[test]
    fn every_pattern_has_the_value_of_other_definitions() {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for p in 0..=255u8 {
            assert!(same(from_e4m3(p), F8E4M3::from_bits(p).to_f32()), "e4m3 {p:x}");
            assert!(same(from_e5m2(p), F8E5M2::from_bits(p).to_f32()), "e5m2 {p:x}");
        }
        for p in 0..4096u16 {
            assert!(same(from_e5m6(p), half::f16::from_bits(p << 4).to_f32()), "e5m6 {p:x}");
        }
    }

    #[test]
    fn slices_are_cast_as_their_elements_are() {
        for n in [0usize, 1, 2, 63, 64, 65, 129, 200] {
            let mut x = vec![0.0f32; n];
            crate::Philox::new(n as u64, 0, 0).fill_normal(100.0, &mut x);
            for dtype in [DType::E4M3, DType::E5M2, DType::E5M6] {
                let mut bytes = vec![0xAA; dtype.bytes(n)];
                narrow(dtype, &x, &mut bytes);
                let mut back = vec![0.0; n];
                widen(dtype, &bytes, &mut back);
                let one = |x: f32| match dtype {
                    DType::E4M3 => from_e4m3(to_e4m3(x)),
                    DType::E5M2 => from_e5m2(to_e5m2(x)),
                    _ => from_e5m6(to_e5m6(x)),
                };
                assert_eq!(back, x.iter().map(|&x| one(x)).collect::<Vec<_>>(), "{dtype} of {n}");
            }
        }
    }

    fn any_magnitude() -> impl Strategy<Value = f32> {
        prop_oneof![
            any::<f32>().prop_filter("number", |x| !x.is_nan()),
            (-25f32..18.0, any::<bool>()).prop_map(|(e, s)| { if s { -e.exp2() } else { e.exp2() } })
        ]
    }

    proptest! {
        #[test]
        fn every_cast_is_to_the_nearest_even_saturating(x in any_magnitude()) {
            prop_assert_eq!(from_e4m3(to_e4m3(x)), nearest(x, 0..256, |p| from_e4m3(p as u8), 448.0));
            prop_assert_eq!(from_e5m2(to_e5m2(x)), nearest(x, 0..256, |p| from_e5m2(p as u8), 57344.0));
            prop_assert_eq!(from_e5m6(to_e5m6(x)), nearest(x, 0..4096, from_e5m6, 65024.0));
            prop_assert_eq!(to_bf16(x), bf16::from_f32(x).to_bits());
        }

        #[test]
        fn packing_keeps_every_element(src in proptest::collection::vec(any_magnitude(), 0..40)) {
            let mut packed = vec![0; DType::E5M6.bytes(src.len())];
            pack_e5m6(&src, &mut packed);
            let mut back = vec![0.0; src.len()];
            unpack_e5m6(&packed, &mut back);
            for (x, y) in src.iter().zip(&back) {
                prop_assert_eq!(from_e5m6(to_e5m6(*x)).to_bits(), y.to_bits());
            }
        }
    }

    #[test]
    fn every_pattern_survives_a_round_trip() {
        for p in 0..=255u8 {
            if !from_e4m3(p).is_nan() {
                assert_eq!(to_e4m3(from_e4m3(p)), p);
            }
            if from_e5m2(p).is_finite() {
                assert_eq!(to_e5m2(from_e5m2(p)), p);
            }
        }
        for p in 0..4096u16 {
            if from_e5m6(p).is_finite() {
                assert_eq!(to_e5m6(from_e5m6(p)), p);
            }
        }
    }

    #[test]
    fn nan_stays_nan_and_infinity_saturates() {
        assert!(from_e4m3(to_e4m3(f32::NAN)).is_nan());
        assert!(from_e5m2(to_e5m2(f32::NAN)).is_nan());
        assert!(from_e5m6(to_e5m6(f32::NAN)).is_nan());
        assert!(round_bf16(f32::NAN).is_nan());
        assert_eq!(from_e4m3(to_e4m3(f32::INFINITY)), 448.0);
        assert_eq!(from_e5m2(to_e5m2(f32::NEG_INFINITY)), -57344.0);
        assert_eq!(from_e5m6(to_e5m6(f32::INFINITY)), 65024.0);
        assert_eq!(round_bf16(f32::INFINITY), f32::INFINITY);
    }
}
