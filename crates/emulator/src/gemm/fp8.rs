//! FP8 GEMMs with the sums of Hopper's tensor cores (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
//!
//! 32 products and the previous sum are aligned to the largest exponent among them. The exponent of a product
//! is the sum of its operands' exponents, in which subnormal numbers have that of their format's least normal
//! one; zeros have none. Each term keeps 13 bits after that exponent, and
//! the result 13 after its leading bit; the rest is truncated. Unless accumulation is fast, sums leave the
//! tensor cores every 128 products and are added in f32.
//!
//! All of it is exact in f32: a product has 8 bits, and 33 numbers of 15 bits add up to less than 2^21 of the
//! last kept one.

use super::matrix::Matrix;
use super::{Element, GemmLayout, ScaleMode};
use crate::kernel::context::vectorized;
use crate::memory::Memory;

/// Products that are summed at once.
pub(crate) const AT_ONCE: usize = 32;
/// Products after which sums leave the tensor cores; also the elements along k that share a scale.
const PROMOTION_LENGTH: usize = 128;
/// Bits of a term after the largest exponent, and of a sum after its leading bit.
const TERM_BITS: u32 = 13;

/// Rows of D that are computed together.
const LANES: usize = 16;
type Lanes = [f32; LANES];

/// The scales of an operand.
pub(super) struct Scales {
    mode: ScaleMode,
    /// The scales without padding.
    values: Vec<f32>,
    /// Rows of op(A), or columns of op(B).
    rows: usize,
    /// Blocks of 128 along k.
    blocks: usize,
}

impl Scales {
    /// Reads the scales of op(A), or of the transpose of op(B), which has `rows` rows. An address of 0 means
    /// a scale of 1.
    pub(super) fn read(
        memory: &Memory,
        operand: &'static str,
        mode: ScaleMode,
        address: u64,
        [rows, k]: [usize; 2],
    ) -> Result<Scales, String> {
        let blocks = k.div_ceil(PROMOTION_LENGTH);
        // Rows, columns and leading dimension of the matrix of scales.
        let (length, columns, leading) = match mode {
            ScaleMode::Tensor => (1, 1, 1),
            ScaleMode::OuterVector => (rows, 1, rows),
            ScaleMode::Vector128 => (rows, blocks, rows),
            ScaleMode::Block128 => (blocks, rows.div_ceil(PROMOTION_LENGTH), blocks.next_multiple_of(4)),
        };
        let layout = GemmLayout { element: Element::F32, rows: length, columns, leading };
        let name = if operand == "A" { "A's scales" } else { "B's scales" };
        let values = match address {
            0 => vec![1.0],
            _ => Matrix { name, address, layout }.read(memory)?,
        };
        Ok(Scales { mode, values, rows, blocks })
    }

    /// The scale of a whole row.
    fn of_row(&self, row: usize) -> f32 {
        match self.mode {
            ScaleMode::Tensor => self.values[0],
            ScaleMode::OuterVector => self.values[row],
            ScaleMode::Vector128 | ScaleMode::Block128 => 1.0,
        }
    }

    /// The scale of 128 elements of a row.
    fn of_block(&self, row: usize, block: usize) -> f32 {
        match self.mode {
            ScaleMode::Tensor | ScaleMode::OuterVector => 1.0,
            ScaleMode::Vector128 => self.values[block * self.rows + row],
            ScaleMode::Block128 => self.values[row / PROMOTION_LENGTH * self.blocks + block],
        }
    }
}

/// `A^T B` times the scales, m by n. A is k by m and B k by n, both column-major without gaps; m is a
/// multiple of 16. `least` are the least exponents of their formats.
pub(super) fn sums(
    [m, n, k]: [usize; 3],
    [a, b]: &[Vec<f32>; 2],
    [a_scales, b_scales]: &[Scales; 2],
    least: [u32; 2],
    promotes: bool,
) -> Vec<f32> {
    let mut sums = vec![0.0; m * n];
    for first in (0..m).step_by(LANES) {
        let rows = |f: &dyn Fn(usize) -> f32| -> Lanes { std::array::from_fn(|lane| f(first + lane)) };
        let a: Vec<Lanes> = (0..k).map(|at| rows(&|row| a[row * k + at])).collect();
        let blocks = 0..k.div_ceil(PROMOTION_LENGTH);
        let scales: Vec<Lanes> = blocks.map(|block| rows(&|row| a_scales.of_block(row, block))).collect();
        let whole = rows(&|row| a_scales.of_row(row));
        for (column, b) in b.chunks(k).enumerate() {
            let of_b = |block| b_scales.of_block(column, block);
            let mut sum = vectorized(
                #[inline(always)]
                || column_sums(&a, b, &scales, of_b, least, promotes),
            );
            let of_column = b_scales.of_row(column);
            sum.iter_mut().zip(whole).for_each(|(sum, of_row)| *sum *= of_row * of_column);
            sums[column * m + first..][..LANES].copy_from_slice(&sum);
        }
    }
    sums
}

/// The sums of a few rows and one column.
#[inline(always)]
fn column_sums(
    a: &[Lanes],
    b: &[f32],
    a_scales: &[Lanes],
    b_scale: impl Fn(usize) -> f32,
    least: [u32; 2],
    promotes: bool,
) -> Lanes {
    let (mut outside, mut sum) = ([0.0; LANES], [0.0; LANES]);
    for (block, (a, b)) in a.chunks(PROMOTION_LENGTH).zip(b.chunks(PROMOTION_LENGTH)).enumerate() {
        for (a, b) in a.chunks(AT_ONCE).zip(b.chunks(AT_ONCE)) {
            sum = add(sum, a, b, least);
        }
        if promotes {
            let of_b = b_scale(block);
            for lane in 0..LANES {
                outside[lane] += sum[lane] * (a_scales[block][lane] * of_b);
            }
            sum = [0.0; LANES];
        }
    }
    if promotes { outside } else { sum }
}

/// Adds up to 32 products to a sum. `least` are the least exponents of the operands' formats.
#[inline(always)]
pub(crate) fn add(sum: Lanes, a: &[Lanes], b: &[f32], least: [u32; 2]) -> Lanes {
    // With the bias of f32, in which all FP8 numbers are normal.
    let exponent = |x: f32| x.to_bits() >> 23 & 0xFF;
    let mut products = [[0.0f32; LANES]; AT_ONCE];
    let mut largest = sum.map(exponent);
    for ((products, a), &b) in products.iter_mut().zip(a).zip(b) {
        let of_b = exponent(b).max(least[1]);
        for lane in 0..LANES {
            products[lane] = a[lane] * b;
            let of_product =
                if products[lane] == 0.0 { 0 } else { exponent(a[lane]).max(least[0]) + of_b - 127 };
            largest[lane] = largest[lane].max(of_product);
        }
    }
    // The last bit that terms keep, and its inverse. Sums below 2^-113 are cut to 0; of infinities and NaNs
    // any bit will do.
    let (mut unit, mut inverse) = ([0.0; LANES], [0.0; LANES]);
    for lane in 0..LANES {
        let exponent = largest[lane].clamp(TERM_BITS + 1, 254);
        unit[lane] = f32::from_bits((exponent - TERM_BITS) << 23);
        inverse[lane] = f32::from_bits((2 * 127 + TERM_BITS - exponent) << 23);
    }
    let mut all = [0.0; LANES];
    for lane in 0..LANES {
        all[lane] = (sum[lane] * inverse[lane]).trunc();
    }
    for products in &products[..b.len()] {
        for lane in 0..LANES {
            all[lane] += (products[lane] * inverse[lane]).trunc();
        }
    }
    // f32 has 23 bits after the leading one.
    std::array::from_fn(
        #[inline(always)]
        |lane| f32::from_bits((all[lane] * unit[lane]).to_bits() & !((1 << (23 - TERM_BITS)) - 1)),
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::numbers::{E4M3, E5M2, Minifloat};
    use crate::random::Random;

    /// The least exponents of E4M3 numbers.
    const LEAST: [u32; 2] = [121; 2];

    /// The sum of products of operands in these formats and another number, by definition.
    pub(crate) fn defined(operands: &[[f64; 2]], formats: [Minifloat; 2], sum: f64) -> f64 {
        // The power of two of a number's leading bit.
        let leading = |x: f64| f64::from_bits(x.to_bits() & 0x7FF << 52);
        let unit = |leading: f64| if leading == 0.0 { 1.0 } else { leading / 8192.0 };
        let cut = |x: f64, unit: f64| (x / unit).trunc() * unit;
        let least = formats.map(|format| f64::from(f32::from_bits(format.least_exponent() << 23)));
        let of_product = |[x, y]: &[f64; 2]| match x * y {
            0.0 => 0.0,
            _ => leading(*x).max(least[0]) * leading(*y).max(least[1]),
        };
        let common = unit(operands.iter().map(of_product).fold(leading(sum), f64::max));
        let total: f64 = operands.iter().map(|[x, y]| cut(x * y, common)).sum::<f64>() + cut(sum, common);
        cut(total, unit(leading(total)))
    }

    /// The sum of a row and a column; `scale` is that of a block.
    fn modelled(
        [a, b]: [&[f32]; 2],
        formats: [Minifloat; 2],
        scale: impl Fn(usize) -> f32,
        promotes: bool,
    ) -> f32 {
        let (mut outside, mut sum) = (0.0f32, 0.0f64);
        let operands: Vec<[f64; 2]> = a.iter().zip(b).map(|(&a, &b)| [a.into(), b.into()]).collect();
        for (n, chunk) in operands.chunks(AT_ONCE).enumerate() {
            sum = defined(chunk, formats, sum);
            let done = n * AT_ONCE + chunk.len();
            if promotes && (done.is_multiple_of(PROMOTION_LENGTH) || done == operands.len()) {
                outside += sum as f32 * scale(n * AT_ONCE / PROMOTION_LENGTH);
                sum = 0.0;
            }
        }
        if promotes { outside } else { sum as f32 }
    }

    /// Random numbers of a format: of all magnitudes, or up to the largest.
    fn numbers(random: &mut Random, format: Minifloat, count: usize, is_wide: bool) -> Vec<f32> {
        let mut number = || match is_wide {
            true => {
                format.decode(random.below(usize::from(format.max) + 1) as u8 | (random.below(2) << 7) as u8)
            }
            false => format.decode(format.encode(448.0 * random.below(1 << 20) as f32 / (1 << 20) as f32)),
        };
        (0..count).map(|_| number()).collect()
    }

    fn scales(random: &mut Random, mode: ScaleMode, [rows, k]: [usize; 2]) -> Scales {
        let blocks = k.div_ceil(PROMOTION_LENGTH);
        let count = match mode {
            ScaleMode::Tensor => 1,
            ScaleMode::OuterVector => rows,
            ScaleMode::Vector128 => rows * blocks,
            ScaleMode::Block128 => rows.div_ceil(PROMOTION_LENGTH) * blocks,
        };
        let values = (0..count).map(|_| 0.25 * (1 + random.below(16)) as f32).collect();
        Scales { mode, values, rows, blocks }
    }

    #[test]
    fn sums_are_those_of_the_plain_model() {
        let mut random = Random::new(5);
        let pairs = [
            [ScaleMode::Tensor; 2],
            [ScaleMode::OuterVector; 2],
            [ScaleMode::Vector128; 2],
            [ScaleMode::Vector128, ScaleMode::Block128],
            [ScaleMode::Block128, ScaleMode::Vector128],
        ];
        let (m, n) = (144, 4);
        for ((modes, k), is_wide) in pairs
            .into_iter()
            .flat_map(|modes| [16, 48, 128, 144, 400, 1024].map(|k| (modes, k)))
            .flat_map(|case| [false, true].map(|is_wide| (case, is_wide)))
        {
            for formats in [[E4M3, E4M3], [E5M2, E4M3], [E4M3, E5M2]] {
                let mut input =
                    |format: Minifloat, rows: usize| numbers(&mut random, format, rows * k, is_wide);
                let inputs = [input(formats[0], m), input(formats[1], n)];
                let scales = [scales(&mut random, modes[0], [m, k]), scales(&mut random, modes[1], [n, k])];
                let may_be_fast = matches!(modes[0], ScaleMode::Tensor | ScaleMode::OuterVector);
                for promotes in [true, false].into_iter().filter(|promotes| *promotes || may_be_fast) {
                    let least = formats.map(Minifloat::least_exponent);
                    let found = sums([m, n, k], &inputs, &scales, least, promotes);
                    for (at, found) in found.into_iter().enumerate() {
                        let (row, column) = (at % m, at / m);
                        let operands = [&inputs[0][row * k..][..k], &inputs[1][column * k..][..k]];
                        let of_block =
                            |block| scales[0].of_block(row, block) * scales[1].of_block(column, block);
                        let of_whole = scales[0].of_row(row) * scales[1].of_row(column);
                        let expected = modelled(operands, formats, of_block, promotes) * of_whole;
                        assert_eq!(found.to_bits(), expected.to_bits(), "{modes:?} k {k} {row}, {column}");
                    }
                }
            }
        }
    }

    #[test]
    fn thirteen_bits_are_kept_and_the_rest_is_cut_off() {
        let one = || Scales { mode: ScaleMode::Tensor, values: vec![1.0], rows: 16, blocks: 2 };
        let sum = |at: usize, [x, y]: [f32; 2], promotes| {
            let input = |number| {
                let mut row = vec![0.0; 256];
                (row[0], row[at]) = (1.0, number);
                row.repeat(16)
            };
            sums([16, 16, 256], &[input(x), input(y)], &[one(), one()], LEAST, promotes)[0]
        };
        let (kept, lost) = ([2f32.powi(-7), 2f32.powi(-6)], [1.5 * 2f32.powi(-7), 2f32.powi(-7)]);
        for (at, promotes) in [1, 40, 100].into_iter().flat_map(|at| [(at, false), (at, true)]) {
            assert_eq!(sum(at, kept, promotes), 1.0 + 2f32.powi(-13));
            assert_eq!(sum(at, lost, promotes), 1.0);
        }
        assert_eq!(sum(200, lost, false), 1.0);
        assert_eq!(sum(200, lost, true), 1.0 + 1.5 * 2f32.powi(-14));
    }

    #[test]
    fn infinities_and_nans_reach_the_sum() {
        let one = || Scales { mode: ScaleMode::Tensor, values: vec![1.0], rows: 16, blocks: 1 };
        let sum = |numbers: [f32; 2]| {
            let mut row = vec![1.0; 64];
            row[..2].copy_from_slice(&numbers);
            sums([16, 16, 64], &[row.repeat(16), vec![1.0; 16 * 64]], &[one(), one()], LEAST, true)[0]
        };
        assert_eq!(sum([f32::INFINITY, 1.0]), f32::INFINITY);
        assert_eq!(sum([1.0, f32::NEG_INFINITY]), f32::NEG_INFINITY);
        assert!(sum([f32::INFINITY, f32::NEG_INFINITY]).is_nan() && sum([1.0, f32::NAN]).is_nan());
        assert_eq!(add([1.0; LANES], &[[f32::INFINITY; LANES]], &[448.0], LEAST), [f32::INFINITY; LANES]);
    }
}
