//! Products of small matrices by a warp (PTX ISA, section 9.7.14): `mma.sync` and the loads of its operands.

use super::memory::Address;
use super::{Decoded, Decoder, unknown};
use crate::fault::{Fault, FaultKind};
use crate::kernel::Action;
use crate::kernel::context::Source;
use crate::numbers::{canonical, from_bf16};
use crate::ptx::{Instruction, Operand, Space};
use crate::registers::{LANES, Lane, Marks, Slot};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    // All lanes execute them, whatever they hold.
    let all = Source::Constant(u32::MAX);
    match (instruction.parts()[0], parts, &instruction.operands[..]) {
        (
            "ldmatrix",
            &["sync", "aligned", "m8n8", count, ref layout @ .., "shared" | "shared::cta", "b16"],
            [target, address],
        ) => {
            let transposed = match layout {
                [] => false,
                ["trans"] => true,
                _ => return unknown(instruction),
            };
            let targets = slots::<u32>(d, target)?;
            let count = count.strip_prefix('x').and_then(|count| count.parse().ok()).unwrap_or(0);
            if targets.len() != count || !matches!(count, 1 | 2 | 4) {
                return unknown(instruction);
            }
            load(targets, Address::of(d, address)?, transposed).map(|execute| Action::Together(all, execute))
        }
        (
            "mma",
            &["sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32"],
            [target, a, b, c],
        ) => {
            let (target, a, b) = (slots::<f32>(d, target)?, sources::<u32>(d, a)?, sources::<u32>(d, b)?);
            let c = sources::<f32>(d, c)?;
            let (Ok(target), Ok(a), Ok(b), Ok(c)) =
                (target.try_into(), a.try_into(), b.try_into(), c.try_into())
            else {
                return unknown(instruction);
            };
            Ok(Action::Together(all, multiply(target, a, b, c)))
        }
        _ => unknown(instruction),
    }
}

fn slots<T: Lane>(d: &Decoder<'_>, operand: &Operand) -> Decoded<Vec<Slot>> {
    d.elements(operand).iter().map(|element| d.target::<T>(element)).collect()
}

fn sources<T: Lane>(d: &Decoder<'_>, operand: &Operand) -> Decoded<Vec<Source<T>>> {
    d.elements(operand).iter().map(|element| d.source::<T>(element)).collect()
}

/// `ldmatrix`: matrices of 8 rows of 8 16-bit numbers. Lanes 8 n to 8 n + 7 have the addresses of matrix n's
/// rows; lane 4 r + c gets the numbers 2 c and 2 c + 1 of row r, or, transposed, of column r.
fn load(targets: Vec<Slot>, address: Address, transposed: bool) -> Decoded<crate::kernel::Execute> {
    Ok(Box::new(move |cx| {
        let addresses = address.read(cx)?;
        if cx.active != u32::MAX {
            return Err(Fault::new(0, FaultKind::Synchronisation, "`ldmatrix` by a part of a warp"));
        }
        for (n, &target) in targets.iter().enumerate() {
            let (mut rows, mut marks) = ([[0u8; 16]; 8], [[0u8; 16]; 8]);
            for row in 0..8 {
                let lane = 8 * n + row;
                let bytes = cx.reach(lane, Space::Shared, addresses[lane], 16, "reads")?;
                (rows[row], marks[row]) = (bytes.read(0), bytes.marks(0));
            }
            let half = |of: &[[u8; 16]; 8], lane: usize, n: usize| {
                let (row, column) = (lane / 4, 2 * (lane % 4) + n);
                let (row, column) = if transposed { (column, row) } else { (row, column) };
                [of[row][2 * column], of[row][2 * column + 1]]
            };
            let word = |of: &[[u8; 16]; 8], lane| {
                let ([a, b], [c, d]) = (half(of, lane, 0), half(of, lane, 1));
                u32::from_le_bytes([a, b, c, d])
            };
            let values: [u32; LANES] = std::array::from_fn(|lane| word(&rows, lane));
            if marks.as_flattened().contains(&0) {
                let unwritten = |lane| {
                    let marks = word(&marks, lane).to_le_bytes();
                    marks.iter().enumerate().map(|(n, mark)| u8::from(*mark == 0) << n).sum()
                };
                let marks = Marks { unwritten: std::array::from_fn(unwritten), from_memory: u32::MAX };
                cx.write_marked(target, &values, &marks);
            } else {
                cx.write(target, &values, 0);
            }
        }
        Ok(())
    }))
}

/// `mma.m16n8k16` of bf16: D = A B + C. With g = lane / 4 and t = lane % 4, a lane has of A rows g and g + 8
/// and columns 2 t, 2 t + 1 and those 8 further; of B, those rows of column g; of C and D, rows g and g + 8
/// and columns 2 t, 2 t + 1.
fn multiply(
    target: [Slot; 4],
    a: [Source<u32>; 4],
    b: [Source<u32>; 2],
    c: [Source<f32>; 4],
) -> crate::kernel::Execute {
    Box::new(move |cx| {
        if cx.active != u32::MAX {
            return Err(Fault::new(0, FaultKind::Synchronisation, "`mma` by a part of a warp"));
        }
        let (mut left, mut right, mut sums) = ([[0f32; K]; 16], [[0f32; COLUMNS]; K], [[0f32; COLUMNS]; 16]);
        for (n, source) in a.into_iter().enumerate() {
            for (lane, pair) in cx.value(source)?.into_iter().enumerate() {
                let (row, column) = (lane / 4 + 8 * (n % 2), 2 * (lane % 4) + 8 * (n / 2));
                left[row][column] = from_bf16(pair as u16);
                left[row][column + 1] = from_bf16((pair >> 16) as u16);
            }
        }
        for (n, source) in b.into_iter().enumerate() {
            for (lane, pair) in cx.value(source)?.into_iter().enumerate() {
                let row = 2 * (lane % 4) + 8 * n;
                right[row][lane / 4] = from_bf16(pair as u16);
                right[row + 1][lane / 4] = from_bf16((pair >> 16) as u16);
            }
        }
        let place = |lane: usize, n: usize| (lane / 4 + 8 * (n / 2), 2 * (lane % 4) + n % 2);
        for (n, source) in c.into_iter().enumerate() {
            for (lane, value) in cx.value(source)?.into_iter().enumerate() {
                let (row, column) = place(lane, n);
                sums[row][column] = value;
            }
        }
        crate::kernel::context::vectorized(
            #[inline(always)]
            || add_products(&left, &right, &mut sums),
        );
        for (n, slot) in target.into_iter().enumerate() {
            let values = std::array::from_fn(|lane| {
                let (row, column) = place(lane, n);
                canonical(sums[row][column])
            });
            cx.write::<f32>(slot, &values, 0);
        }
        Ok(())
    })
}

/// Products that are summed at once, and columns of a tile.
const K: usize = 16;
const COLUMNS: usize = 8;

/// Bits of a term after the largest exponent.
const KEPT: i32 = 25;

/// The exponent of an f32: subnormal numbers have that of the least normal one, zeros one that is below all
/// others.
#[inline(always)]
fn exponent(x: f32) -> i32 {
    let exponent = ((x.to_bits() >> 23 & 0xFF) as i32).max(1) - 127;
    if x == 0.0 { -1000 } else { exponent }
}

/// A number cut off to f32; a zero has no sign.
#[inline(always)]
fn cut(x: f64) -> f32 {
    let smallest = f64::from(f32::from_bits(1));
    let subnormal = (x * (1.0 / smallest)).trunc() * smallest + 0.0;
    let normal = f64::from_bits(x.to_bits() & !((1 << 29) - 1));
    (if x.abs() < f64::from(f32::MIN_POSITIVE) { subnormal } else { normal }) as f32
}

/// The mantissa of an f32 with its leading bit.
#[inline(always)]
fn mantissa(x: f32) -> i32 {
    let bits = x.to_bits();
    (bits & 0x7F_FFFF | if bits >> 23 & 0xFF == 0 { 0 } else { 1 << 23 }) as i32
}

/// The magnitude shifted to the right, with the sign of `signs`; bits that are shifted out are truncated.
#[inline(always)]
fn aligned(magnitude: i32, by: i32, signs: u32) -> i32 {
    let kept = if by < 32 { magnitude >> by } else { 0 };
    if signs >> 31 == 0 { kept } else { -kept }
}

/// Adds the products of a row and a column to each sum, as tensor cores of compute capability 9.0 do: the
/// products and the sum are aligned to the largest exponent (a product's is the sum of its operands'
/// exponents). Each keeps 25 bits after it, and the sum keeps 24; the rest is truncated. Zeros have no
/// exponent. The results equal an H200's to the last bit.
#[inline(always)]
fn add_products(left: &[[f32; K]; 16], right: &[[f32; COLUMNS]; K], sums: &mut [[f32; COLUMNS]; 16]) {
    let (mut exponents, mut mantissas) = ([[0; COLUMNS]; K], [[0; COLUMNS]; K]);
    let mut columns_are_finite = [true; COLUMNS];
    for (k, row) in right.iter().enumerate() {
        for column in 0..COLUMNS {
            exponents[k][column] = exponent(row[column]);
            // Of bf16, the upper 8 bits are all.
            mantissas[k][column] = mantissa(row[column]) >> 16;
            columns_are_finite[column] &= row[column].is_finite();
        }
    }
    for (row, sums) in left.iter().zip(sums) {
        let mut most = sums.map(exponent);
        for (x, exponents) in row.iter().zip(&exponents) {
            let of_row = exponent(*x);
            for column in 0..COLUMNS {
                most[column] = most[column].max(of_row + exponents[column]);
            }
        }
        let mut total = [0i32; COLUMNS];
        for k in 0..K {
            let (of_row, digits, signs) = (exponent(row[k]), mantissa(row[k]) >> 16, row[k].to_bits());
            for column in 0..COLUMNS {
                // 14 bits of the product are behind its exponent.
                let magnitude = (digits * mantissas[k][column]) << (KEPT - 14);
                let by = most[column] - of_row - exponents[k][column];
                total[column] += aligned(magnitude, by, signs ^ right[k][column].to_bits());
            }
        }
        let before = *sums;
        for column in 0..COLUMNS {
            let sum = before[column];
            let by = most[column] - exponent(sum);
            let last = aligned(mantissa(sum) << (KEPT - 23), by, sum.to_bits());
            let unit = f64::from_bits(((most[column].max(-900) - KEPT + 1023) as u64) << 52);
            sums[column] = cut((f64::from(total[column]) + f64::from(last)) * unit);
        }
        let row_is_finite = row.iter().all(|x| x.is_finite());
        for column in 0..COLUMNS {
            if !(row_is_finite && columns_are_finite[column] && before[column].is_finite()) {
                let products = row.iter().zip(right).map(|(x, row)| f64::from(*x) * f64::from(row[column]));
                sums[column] = products.fold(f64::from(before[column]), |sum, product| sum + product) as f32;
            }
        }
    }
}
