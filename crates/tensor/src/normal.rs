//! Normal numbers from random words, by Box and Muller's transform (Annals of Mathematical Statistics 29,
//! 1958, p. 610) in f64.
//!
//! It uses only sums, products, quotients and square roots, which every processor rounds alike, and no fused
//! operations: a kernel that does the same in the same order (`ops/src/normal/kernel.cu`) computes the same
//! bits. A system's `ln`, `sin` and `cos` would not.

use std::f64::consts::{LN_2, SQRT_2, TAU};

/// Two normal numbers of standard deviation `std` from two words.
#[inline(always)]
pub(crate) fn pair(a: u32, b: u32, std: f64) -> [f32; 2] {
    let radius = (-2.0 * ln(a)).sqrt() * std;
    let (sin, cos) = sin_cos(b);
    [(radius * cos) as f32, (radius * sin) as f32]
}

/// ln((a + 1) / 2^32), of a number in (0, 1], so it is finite. It is exact to 2 units in the last place.
#[inline(always)]
fn ln(a: u32) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = (f64::from(a) + 1.0).to_bits();
    // a + 1 = m 2^e with m about 1: in (sqrt(1/2), sqrt(2)].
    let m = f64::from_bits(bits & MANTISSA | 1.0f64.to_bits());
    let halve = m > SQRT_2;
    let m = if halve { 0.5 * m } else { m };
    let e = (bits >> 52) as i32 - 1023 + i32::from(halve);
    // ln m = 2 artanh s. The series needs eleven terms for |s| < 0.172.
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut sum = 1.0 / 21.0;
    for divisor in [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * z + 1.0 / divisor;
    }
    f64::from(e - 32) * LN_2 + 2.0 * s * sum
}

/// Sine and cosine of `b` / 2^32 turns. The nearest quarter turn is subtracted exactly; the rest, up to an
/// eighth, goes into the series.
#[inline(always)]
fn sin_cos(b: u32) -> (f64, f64) {
    let quarters = b.wrapping_add(1 << 29) >> 30;
    let rest = b.wrapping_sub(quarters << 30) as i32;
    let x = f64::from(rest) * (TAU / 4_294_967_296.0);
    let z = x * x;
    // x (1 - z/(2 3) (1 - z/(4 5) (...))) and 1 - z/(1 2) (1 - z/(3 4) (...)).
    let (mut sin, mut cos) = (1.0, 1.0);
    for n in [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        sin = 1.0 - z * (1.0 / (n * (n + 1.0))) * sin;
    }
    for n in [17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        cos = 1.0 - z * (1.0 / (n * (n + 1.0))) * cos;
    }
    let sin = x * sin;
    let (sin, cos) = if quarters & 1 == 1 { (cos, sin) } else { (sin, cos) };
    let sin = if quarters & 2 == 2 { -sin } else { sin };
    let cos = if (quarters + 1) & 2 == 2 { -cos } else { cos };
    (sin, cos)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Philox;

    /// Words at the edges of all cases, and random others.
    fn words() -> Vec<u32> {
        let mut words: Vec<u32> =
            (0..32).flat_map(|bit| [1u32 << bit, (1 << bit) - 1, !(1 << bit)]).collect();
        for eighth in 0..8u32 {
            words.extend((0..5).map(|off| (eighth << 29).wrapping_add(off).wrapping_sub(2)));
        }
        // Near the square root of two.
        words.extend((0..9).map(|off| 0xB504_F333 - 5 + off));
        let rng = Philox::new(5, 6, 7);
        words.extend((0..100_000).map(|i| rng.word(i)));
        words
    }

    #[test]
    fn the_functions_are_those_of_the_system_but_for_its_last_bits() {
        for word in words() {
            let exact = ((f64::from(word) + 1.0) / 4_294_967_296.0).ln();
            assert!((ln(word) - exact).abs() <= 2.0 * f64::EPSILON * exact.abs(), "ln of {word}");
            let angle = TAU * f64::from(word) / 4_294_967_296.0;
            let (sin, cos) = sin_cos(word);
            // The system's functions receive an angle that is already rounded.
            assert!(
                (sin - angle.sin()).abs() < 1.5e-15 && (cos - angle.cos()).abs() < 1.5e-15,
                "turn by {word}"
            );
            assert!((sin * sin + cos * cos - 1.0).abs() < 1e-15, "turn by {word}");
        }
        assert_eq!(ln(u32::MAX), 0.0);
        assert_eq!(
            [0, 1, 2, 3].map(|q| sin_cos(q << 30)),
            [(0.0, 1.0), (1.0, 0.0), (0.0, -1.0), (-1.0, 0.0)]
        );
    }
}
