//! Number formats without a type in Rust, and roundings without an operator.

use half::f16;

/// A binary format of 1 sign bit, `exponent` and `mantissa` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Minifloat {
    pub(crate) exponent: u32,
    pub(crate) mantissa: u32,
    /// The bits of the largest finite number.
    pub(crate) max: u8,
    /// The NaN that conversions return.
    pub(crate) nan: u8,
}

/// FP8 with 4 exponent bits, without infinities (OCP 8-bit floating point, section 5).
pub(crate) const E4M3: Minifloat = Minifloat { exponent: 4, mantissa: 3, max: 0x7E, nan: 0x7F };
/// FP8 with 5 exponent bits.
pub(crate) const E5M2: Minifloat = Minifloat { exponent: 5, mantissa: 2, max: 0x7B, nan: 0x7F };

impl Minifloat {
    /// The value of these bits.
    pub(crate) fn decode(self, bits: u8) -> f32 {
        let magnitude = bits & 0x7F;
        let sign = if bits & 0x80 != 0 { -1.0 } else { 1.0 };
        if magnitude > self.max {
            let is_infinity = self == E5M2 && magnitude == self.max + 1;
            return if is_infinity { sign * f32::INFINITY } else { f32::NAN };
        }
        let (exponent, mantissa) =
            (i32::from(magnitude >> self.mantissa), u32::from(magnitude) & ((1 << self.mantissa) - 1));
        let bias = (1 << (self.exponent - 1)) - 1;
        let unit = 2f32.powi(exponent.max(1) - bias - self.mantissa as i32);
        let hidden = if exponent > 0 { 1 << self.mantissa } else { 0 };
        sign * (hidden + mantissa) as f32 * unit
    }

    /// The exponent of the least normal number and of all subnormal ones, with the bias of f32.
    pub(crate) fn least_exponent(self) -> u32 {
        129 - (1 << (self.exponent - 1))
    }

    /// The nearest number, ties to even. Values beyond the largest finite number become that number
    /// (`.rn.satfinite`).
    pub(crate) fn encode(self, x: f32) -> u8 {
        if x.is_nan() {
            return self.nan;
        }
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        let magnitude = x.abs();
        let bias = (1 << (self.exponent - 1)) - 1;
        // Exponent of the f32, but at least that of the format's smallest normal number.
        let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - bias);
        // In units of the last place. Exact within the range of f64, because the factor is a power of two.
        let units = f64::from(magnitude) * 2f64.powi(self.mantissa as i32 - exponent);
        let rounded = units.round_ties_even();
        if rounded >= f64::from(1u32 << 20) {
            return sign | self.max;
        }
        // A carry into the exponent gives the right bits.
        let bits = ((exponent + bias - 1) << self.mantissa) as i64 + rounded as i64;
        sign | bits.min(self.max.into()) as u8
    }
}

/// The nearest bf16, ties to even; every NaN becomes the canonical one.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
    if x.is_nan() { 0x7FFF } else { rounded as u16 }
}

#[inline(always)]
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The value of a binary16.
pub(crate) fn from_f16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// The nearest binary16, ties to even.
pub(crate) fn to_f16(x: f32) -> u16 {
    f16::from_f32(x).to_bits()
}

/// A direction of rounding (PTX ISA, section 9.7.3, and IEEE 754).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

/// `high + low` rounded once to f32; `low` is the rounding error of `high`.
fn round(high: f64, low: f64, rounding: Rounding) -> f32 {
    let nearest = high as f32;
    if rounding == Rounding::Nearest || !high.is_finite() {
        return nearest;
    }
    // The sign of the difference between the nearest and the exact number.
    let off = f64::from(nearest) - high;
    let above = if off != 0.0 { off > 0.0 } else { low < 0.0 };
    let below = if off != 0.0 { off < 0.0 } else { low > 0.0 };
    match rounding {
        Rounding::Down if above => nearest.next_down(),
        Rounding::Up if below => nearest.next_up(),
        Rounding::Zero if above && high > 0.0 => nearest.next_down(),
        Rounding::Zero if below && high < 0.0 => nearest.next_up(),
        _ => nearest,
    }
}

/// `a * b + c`, rounded once.
#[inline(always)]
pub(crate) fn fma(a: f32, b: f32, c: f32, rounding: Rounding) -> f32 {
    if rounding == Rounding::Nearest {
        return a.mul_add(b, c);
    }
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    // The product is exact, and so is the rounding error of the sum (Knuth's two-sum).
    let sum = product + c;
    let part = sum - product;
    let lost = (product - (sum - part)) + (c - part);
    if sum == 0.0 && lost == 0.0 {
        // Sign of an exact zero: that of both terms if they agree, else minus when rounding down.
        let same = product.is_sign_negative() == c.is_sign_negative();
        let negative = if same { c.is_sign_negative() } else { rounding == Rounding::Down };
        return if negative { -0.0 } else { 0.0 };
    }
    round(sum, lost, rounding)
}

/// Converts f64 to f32. A NaN keeps its sign and the first bits of its mantissa, and becomes quiet, as on
/// GPUs of compute capability 9.0; the ISA leaves this open.
pub(crate) fn narrow(x: f64, rounding: Rounding) -> f32 {
    if x.is_nan() {
        let bits = x.to_bits();
        return f32::from_bits((bits >> 32) as u32 & 1 << 31 | 0x7FC0_0000 | (bits >> 29) as u32 & 0x3F_FFFF);
    }
    round(x, 0.0, rounding)
}

/// The NaN that f32 instructions return on GPUs. The PTX ISA (section 9.7.3) leaves its bits open.
pub(crate) const NAN_F32: f32 = f32::from_bits(0x7FFF_FFFF);

/// Replaces any NaN by the canonical one. Tests bits, because LLVM removes a comparison `x != x` after a
/// square root.
#[inline(always)]
pub(crate) fn canonical(x: f32) -> f32 {
    let is_nan = x.to_bits() & 0x7FFF_FFFF > f32::INFINITY.to_bits();
    if is_nan { NAN_F32 } else { x }
}

/// Replaces a subnormal number by a zero of its sign (`.ftz`).
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0f32.copysign(x) } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16 as reference_bf16;
    use xtrain_tensor::formats;

    #[test]
    fn minifloats_round_to_the_nearest_and_saturate() {
        for format in [E4M3, E5M2] {
            let finite: Vec<f32> = (0..=format.max).map(|bits| format.decode(bits)).collect();
            for (bits, &value) in finite.iter().enumerate() {
                assert_eq!(format.encode(value), bits as u8, "{value}");
                assert_eq!(format.encode(-value), bits as u8 | 0x80);
                if let Some(&next) = finite.get(bits + 1) {
                    let middle = (value + next) / 2.0;
                    let even = if bits % 2 == 0 { bits } else { bits + 1 };
                    assert_eq!(format.encode(middle), even as u8, "{middle}");
                    assert_eq!(format.encode(middle.next_up()), bits as u8 + 1);
                    assert_eq!(format.encode(middle.next_down()), bits as u8);
                }
            }
            assert_eq!([1e30, f32::INFINITY].map(|x| format.encode(x)), [format.max; 2]);
            assert_eq!(format.encode(f32::NAN), format.nan);
        }
    }

    #[test]
    fn bf16_rounds_as_the_library_does() {
        for bits in (0..=u32::MAX).step_by(9973) {
            let x = f32::from_bits(bits);
            if !x.is_nan() {
                assert_eq!(to_bf16(x), reference_bf16::from_f32(x).to_bits(), "{x}");
            }
        }
    }

    /// Every sign, exponent and upper half of the mantissa. The lower 11 bits decide only whether a number
    /// lies on a tie or beside it.
    #[test]
    fn casts_are_those_of_the_cpu_kernels() {
        let check = |bits: u32| {
            let x = f32::from_bits(bits);
            // The CPU kernels keep the sign of a NaN.
            let same = |found: u8, expected: u8| found == expected || x.is_nan() && found == expected & 0x7F;
            assert!(same(E4M3.encode(x), formats::to_e4m3(x)), "{bits:#x} in e4m3");
            assert!(same(E5M2.encode(x), formats::to_e5m2(x)), "{bits:#x} in e5m2");
            assert!(x.is_nan() || to_bf16(x) == formats::to_bf16(x), "{bits:#x} in bf16");
        };
        for upper in 0..1 << 21 {
            [0, 1, 0x400, 0x7FF].into_iter().for_each(|lower| check(upper << 11 | lower));
        }
    }
}
