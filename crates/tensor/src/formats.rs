//! The number formats narrower than 32 bits: casts from and to f32.
//!
//! Every cast rounds to nearest even and saturates to the largest finite value; NaN stays NaN (CUDA's SATFINITE).
//! Sources: "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1; E5M6: DeepSeek-V3 (arXiv 2412.19437), section 3.3.3.
//! Infinities of bf16 stay infinities: bf16 has f32's range and is not saturated.

use crate::DType;
use float8::{F8E4M3, F8E5M2};
use half::bf16;

/// The largest finite value of a format that has fewer than 16 bits.
///
/// # Panics
/// For any other type: only scaled formats have a use for it.
pub const fn max_finite(dtype: DType) -> f32 {
    match dtype {
        DType::E4M3 => 448.0,
        DType::E5M2 => 57344.0,
        DType::E5M6 => 65024.0,
        _ => panic!("only the scaled formats have a maximum that matters"),
    }
}

/// Rounds to bfloat16 and back.
#[inline]
pub fn round_bf16(x: f32) -> f32 {
    f32::from_bits(u32::from(to_bf16(x)) << 16)
}

/// bfloat16's bits of `x`. NaNs become quiet and keep their sign and leading payload.
#[inline]
pub fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // The carry of the rounding addition may run into the exponent: that is the right result, up to infinity.
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    let quiet = (bits >> 16) | 0x40;
    (if bits & 0x7FFF_FFFF > 0x7F80_0000 { quiet } else { rounded }) as u16
}

/// Widens a slice of bfloat16.
pub fn widen_bf16(src: &[bf16], dst: &mut [f32]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = f32::from_bits(u32::from(s.to_bits()) << 16);
    }
}

/// Rounds a slice to bfloat16.
pub fn narrow_bf16(src: &[f32], dst: &mut [bf16]) {
    for (d, s) in dst.iter_mut().zip(src) {
        *d = bf16::from_bits(to_bf16(*s));
    }
}

/// E4M3's byte of `x`.
#[inline]
pub fn to_e4m3(x: f32) -> u8 {
    F8E4M3::from_f32(x.clamp(-448.0, 448.0)).to_bits()
}

/// The value of an E4M3 byte.
#[inline]
pub fn from_e4m3(bits: u8) -> f32 {
    F8E4M3::from_bits(bits).to_f32()
}

/// E5M2's byte of `x`.
#[inline]
pub fn to_e5m2(x: f32) -> u8 {
    F8E5M2::from_f32(x.clamp(-57344.0, 57344.0)).to_bits()
}

/// The value of an E5M2 byte.
#[inline]
pub fn from_e5m2(bits: u8) -> f32 {
    F8E5M2::from_bits(bits).to_f32()
}

/// E5M6's twelve bits of `x`: sign, 5 exponent bits of bias 15, 6 mantissa bits. It is IEEE binary16 with four mantissa bits fewer.
pub fn to_e5m6(x: f32) -> u16 {
    let sign = ((x.to_bits() >> 31) as u16) << 11;
    if x.is_nan() {
        return sign | 0x7FF;
    }
    let magnitude = f64::from(x.abs().min(65024.0));
    // One unit in the last place: 2^(e - 6) for a normal number of exponent e, 2^-20 for subnormals.
    let exponent = if magnitude > 0.0 { (magnitude.log2().floor() as i32).max(-14) } else { -14 };
    let units = (magnitude * 2f64.powi(6 - exponent)).round_ties_even() as u16;
    // A normal number has 64..128 units; 128 carries into the next exponent by itself.
    sign | (((exponent + 14) as u16) << 6).wrapping_add(units)
}

/// The value of E5M6's twelve bits.
pub fn from_e5m6(bits: u16) -> f32 {
    half::f16::from_bits(
        ((bits & 0xFFF) << 4) | if bits & 0x7C0 == 0x7C0 && bits & 0x3F != 0 { 0xF } else { 0 },
    )
    .to_f32()
}

/// Packs E5M6: element 2i in byte 3i and the low half of byte 3i+1, element 2i+1 in the high half and byte 3i+2.
///
/// # Panics
/// If `dst` is not `DType::E5M6.bytes(src.len())` long.
pub fn pack_e5m6(src: &[f32], dst: &mut [u8]) {
    assert_eq!(dst.len(), DType::E5M6.bytes(src.len()), "packed length");
    for (pair, out) in src.chunks(2).zip(dst.chunks_mut(3)) {
        let a = to_e5m6(pair[0]);
        let b = pair.get(1).map_or(0, |&x| to_e5m6(x));
        let packed = [a as u8, (a >> 8) as u8 | ((b & 0xF) << 4) as u8, (b >> 4) as u8];
        out.copy_from_slice(&packed[..out.len()]);
    }
}

/// Unpacks what [`pack_e5m6`] packed.
///
/// # Panics
/// If `src` is not `DType::E5M6.bytes(dst.len())` long.
pub fn unpack_e5m6(src: &[u8], dst: &mut [f32]) {
    assert_eq!(src.len(), DType::E5M6.bytes(dst.len()), "packed length");
    for (bytes, pair) in src.chunks(3).zip(dst.chunks_mut(2)) {
        let word = |i: usize| u16::from(bytes.get(i).copied().unwrap_or(0));
        pair[0] = from_e5m6(word(0) | (word(1) & 0xF) << 8);
        if let Some(second) = pair.get_mut(1) {
            *second = from_e5m6(word(1) >> 4 | word(2) << 4);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The nearest representable value by search over all patterns, ties to the even pattern, saturating.
    fn nearest(x: f32, patterns: impl Iterator<Item = u16>, value: impl Fn(u16) -> f32, max: f32) -> f32 {
        let x = f64::from(x.clamp(-max, max));
        patterns
            .map(|p| (p, f64::from(value(p))))
            .filter(|(_, v)| v.is_finite() && v.abs() <= f64::from(max))
            .min_by(|(p, v), (q, w)| (v - x).abs().total_cmp(&(w - x).abs()).then((p & 1).cmp(&(q & 1))))
            .map(|(_, v)| v as f32)
            .expect("patterns")
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
