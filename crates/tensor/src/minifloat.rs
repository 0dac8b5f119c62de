//! Casts between f32 and formats of fewer than 16 bits, from the layout of their bits. They are integer
//! operations without branches, so the compiler vectorises loops over them.

/// A format of one sign bit, `exponent` and `mantissa` bits, and the usual bias 2^(exponent - 1) - 1.
#[derive(Clone, Copy)]
pub(crate) struct Minifloat {
    /// Bits of the exponent.
    pub(crate) exponent: u32,
    /// Bits of the mantissa.
    pub(crate) mantissa: u32,
    /// The largest finite value.
    pub(crate) max: f32,
    /// True if the largest exponent encodes infinities and NaNs, as in IEEE 754. If false, only the pattern
    /// of all ones is a NaN.
    pub(crate) infinities: bool,
}

const F32_MANTISSA: u32 = 23;
const F32_BIAS: u32 = 127;
const F32_INFINITY: u32 = 0x7F80_0000;

impl Minifloat {
    #[inline(always)]
    const fn bias(self) -> u32 {
        (1 << (self.exponent - 1)) - 1
    }

    /// A mask of all bits except the sign.
    #[inline(always)]
    const fn mask(self) -> u32 {
        (1 << (self.exponent + self.mantissa)) - 1
    }

    /// The pattern of `x`, rounded to nearest even, saturated to the largest finite value. NaN becomes all
    /// ones except the sign, as with the instructions of GPUs.
    #[inline(always)]
    pub(crate) fn encode(self, x: f32) -> u32 {
        let dropped = F32_MANTISSA - self.mantissa;
        let sign = (x.to_bits() >> 31) << (self.exponent + self.mantissa);
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        let clamped = magnitude.min(self.max.to_bits());
        // Normal numbers: add half a unit less one, and one more if the unit's bit is odd. A carry into the
        // exponent is correct.
        let rounded = clamped + (1 << (dropped - 1)) - 1 + ((clamped >> dropped) & 1);
        let normal = (rounded >> dropped).wrapping_sub((F32_BIAS - self.bias()) << self.mantissa);
        // Subnormal numbers: f32's own addition rounds them to the format's smallest unit, which is that of
        // the sum.
        let rounder = f32::from_bits((F32_BIAS + 1 - self.bias() + dropped) << F32_MANTISSA);
        let subnormal = (f32::from_bits(clamped) + rounder).to_bits().wrapping_sub(rounder.to_bits());
        let least_normal = (F32_BIAS + 1 - self.bias()) << F32_MANTISSA;
        let finite = if clamped < least_normal { subnormal } else { normal };
        if magnitude > F32_INFINITY { self.mask() } else { sign | finite }
    }

    /// The value of a pattern; bits above the sign are ignored.
    #[inline(always)]
    pub(crate) fn decode(self, bits: u32) -> f32 {
        let widened = F32_MANTISSA - self.mantissa;
        let sign = (bits >> (self.exponent + self.mantissa)) << 31;
        let magnitude = bits & self.mask();
        let normal = (magnitude << widened) + ((F32_BIAS - self.bias()) << F32_MANTISSA);
        let unit = f32::from_bits((F32_BIAS + 1 - self.bias() - self.mantissa) << F32_MANTISSA);
        let subnormal = (magnitude as i32 as f32 * unit).to_bits();
        let finite = if magnitude >> self.mantissa == 0 { subnormal } else { normal };
        let special = match self.infinities {
            true => ((1 << self.exponent) - 1) << self.mantissa,
            false => self.mask(),
        };
        // An infinity's mantissa is zero and a NaN's is not, in both formats.
        let magnitude = if magnitude >= special { F32_INFINITY | magnitude << widened } else { finite };
        f32::from_bits(sign | magnitude)
    }
}
