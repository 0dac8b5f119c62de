//! The sums of tensor cores of compute capability 9.0, for bf16 operands.
//!
//! The products and the previous sum are aligned to the largest exponent among them. The exponent of a
//! product is the sum of its operands' exponents; zeros have none. Each term keeps 25 bits after that
//! exponent, and the result keeps 24; the rest is truncated. The results equal an H200's to the last bit.

use crate::kernel::context::dispatch;
use pulp::{Simd, WithSimd};

/// Rows of A and D.
pub(super) const ROWS: usize = 16;
/// Number of products that are summed at once.
pub(super) const K: usize = 16;
/// Columns of B and D.
pub(super) const COLUMNS: usize = 8;

/// Bits of a term after the largest exponent.
const TERM_BITS: i32 = 25;

/// Adds A B to each sum. A and the sums are stored by column, B by row.
pub(super) fn add_products(
    left: &[[f32; ROWS]; K],
    right: &[[f32; COLUMNS]; K],
    sums: &mut [[f32; ROWS]; COLUMNS],
) {
    let before = *sums;
    dispatch(AddProducts { left, right, sums });
    let all = [left.as_flattened(), right.as_flattened(), before.as_flattened()];
    let largest = all.into_iter().flatten().fold(0, |most, x| most.max(x.abs().to_bits()));
    if largest >= f32::INFINITY.to_bits() {
        add_infinities(left, right, &before, sums);
    }
}

/// [`add_products`] of finite numbers.
struct AddProducts<'a> {
    left: &'a [[f32; ROWS]; K],
    right: &'a [[f32; COLUMNS]; K],
    sums: &'a mut [[f32; ROWS]; COLUMNS],
}

impl WithSimd for AddProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let splat = |x: u32| simd.splat_u32s(x);
        // Integers are unsigned; negative ones wrap around.
        let (mut exponents, mut digits, mut signs) =
            ([[0u32; ROWS]; K], [[0u32; ROWS]; K], [[0u32; ROWS]; K]);
        for k in 0..K {
            for row in 0..ROWS {
                (exponents[k][row], digits[k][row], signs[k][row]) = parts(self.left[k][row]);
            }
        }
        for column in 0..COLUMNS {
            let of_column: [_; K] = std::array::from_fn(|k| parts(self.right[k][column]));
            let (mut most, mut total) = ([0u32; ROWS], [0u32; ROWS]);
            for (most, sum) in most.iter_mut().zip(self.sums[column]) {
                *most = exponent(sum) as u32;
            }
            let registers =
                S::as_mut_simd_u32s(&mut most).0.iter_mut().zip(S::as_mut_simd_u32s(&mut total).0);
            for (n, (most, total)) in registers.enumerate() {
                let of_rows = |of: &[u32; ROWS]| S::as_simd_u32s(of).0[n];
                let exponent = |k: usize| simd.add_u32s(of_rows(&exponents[k]), splat(of_column[k].0));
                for k in 0..K {
                    let [one, other] = [*most, exponent(k)].map(|x| simd.transmute_i32s_u32s(x));
                    *most = simd.transmute_u32s_i32s(simd.max_i32s(one, other));
                }
                for (k, (_, of_digits, of_sign)) in of_column.into_iter().enumerate() {
                    // A product has 14 bits after its exponent.
                    let product = simd.mul_u32s(of_rows(&digits[k]), splat(of_digits << (TERM_BITS - 14)));
                    let by = simd.min_u32s(simd.sub_u32s(*most, exponent(k)), splat(31));
                    let kept = simd.wrapping_dyn_shr_u32s(product, by);
                    let sign = simd.xor_u32s(of_rows(&signs[k]), splat(of_sign));
                    *total = simd.add_u32s(*total, simd.sub_u32s(simd.xor_u32s(kept, sign), sign));
                }
            }
            for row in 0..ROWS {
                let sum = &mut self.sums[column][row];
                *sum = rounded(*sum, most[row] as i32, total[row] as i32);
            }
        }
    }
}

/// The exponent of a bf16 number, its eight digits, and a mask that is set if it is negative.
#[inline(always)]
fn parts(x: f32) -> (u32, u32, u32) {
    (exponent(x) as u32, mantissa(x) as u32 >> 16, (x.to_bits() as i32 >> 31) as u32)
}

/// The exponent of an f32. Subnormal numbers have that of the least normal one; zeros have one below all
/// others.
#[inline(always)]
fn exponent(x: f32) -> i32 {
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32).max(1) - 127;
    if x == 0.0 { -1000 } else { exponent }
}

/// The mantissa of an f32 with its leading bit.
#[inline(always)]
fn mantissa(x: f32) -> i32 {
    let bits = x.to_bits();
    (bits & 0x7F_FFFF | if bits >> 23 & 0xFF == 0 { 0 } else { 1 << 23 }) as i32
}

/// `sum` plus `total`, the sum of the products, which is aligned to the exponent `most`.
#[inline(always)]
fn rounded(sum: f32, most: i32, total: i32) -> f32 {
    let by = most - exponent(sum);
    let magnitude = mantissa(sum) << (TERM_BITS - 23);
    let kept = if by < 32 { magnitude >> by } else { 0 };
    let kept = if sum.is_sign_negative() { -kept } else { kept };
    let unit = f64::from_bits(((most.max(-900) - TERM_BITS + 1023) as u64) << 52);
    cut((f64::from(total) + f64::from(kept)) * unit)
}

/// Truncates to f32; a zero loses its sign.
#[inline(always)]
fn cut(x: f64) -> f32 {
    let smallest = f64::from(f32::from_bits(1));
    let subnormal = (x * (1.0 / smallest)).trunc() * smallest + 0.0;
    let normal = f64::from_bits(x.to_bits() & !((1 << 29) - 1));
    (if x.abs() < f64::from(f32::MIN_POSITIVE) { subnormal } else { normal }) as f32
}

/// Recomputes the sums with an infinity or NaN among their terms.
#[cold]
fn add_infinities(
    left: &[[f32; ROWS]; K],
    right: &[[f32; COLUMNS]; K],
    before: &[[f32; ROWS]; COLUMNS],
    sums: &mut [[f32; ROWS]; COLUMNS],
) {
    for (column, row) in (0..COLUMNS).flat_map(|column| (0..ROWS).map(move |row| (column, row))) {
        let before = before[column][row];
        let operands = (0..K).map(|k| (left[k][row], right[k][column]));
        if !before.is_finite() || operands.clone().any(|(x, y)| !x.is_finite() || !y.is_finite()) {
            let products = operands.map(|(x, y)| f64::from(x) * f64::from(y));
            sums[column][row] = products.fold(f64::from(before), |sum, product| sum + product) as f32;
        }
    }
}
