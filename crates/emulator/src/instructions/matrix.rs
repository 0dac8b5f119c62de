//! Warp-level matrix instructions (PTX ISA, section 9.7.14): `mma.sync`, `ldmatrix` for its operands, and
//! `stmatrix`, the inverse of `ldmatrix`.

use super::memory::Address;
use super::tensor_core::{COLUMNS, K, ROWS, add_products};
use super::{Decoded, Decoder, unknown, whole_warp};
use crate::kernel::Execute;
use crate::kernel::context::Source;
use crate::numbers::{canonical, from_bf16};
use crate::ptx::{Instruction, Operand, Space};
use crate::races::AccessKind;
use crate::registers::{LANES, Lane, Marks, RegisterSlot};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
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
            whole_warp(instruction, load(targets, Address::decode(d, address)?, transposed))
        }
        (
            "stmatrix",
            &["sync", "aligned", "m8n8", count, ref layout @ .., "shared" | "shared::cta", "b16"],
            [address, sources],
        ) if matches!(layout, [] | ["trans"]) => {
            let values = self::sources::<u32>(d, sources)?;
            if !matches!((count, values.len()), ("x1", 1) | ("x2", 2) | ("x4", 4)) {
                return unknown(instruction);
            }
            whole_warp(instruction, store(values, Address::decode(d, address)?, !layout.is_empty()))
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
            whole_warp(instruction, multiply(target, a, b, c))
        }
        _ => unknown(instruction),
    }
}

fn slots<T: Lane>(d: &Decoder<'_>, operand: &Operand) -> Decoded<Vec<RegisterSlot>> {
    d.elements(operand).iter().map(|element| d.target::<T>(element)).collect()
}

fn sources<T: Lane>(d: &Decoder<'_>, operand: &Operand) -> Decoded<Vec<Source<T>>> {
    d.elements(operand).iter().map(|element| d.source::<T>(element)).collect()
}

/// `ldmatrix`: loads matrices of 8 rows of 8 16-bit elements. Lanes 8 n to 8 n + 7 hold the addresses of the
/// rows of matrix n. Lane 4 r + c receives elements 2 c and 2 c + 1 of row r, or, with `.trans`, of column r.
fn load(targets: Vec<RegisterSlot>, address: Address, transposed: bool) -> Execute {
    Box::new(move |cx| {
        let addresses = address.read(cx)?;
        for (n, &target) in targets.iter().enumerate() {
            let (mut rows, mut marks) = ([[0u8; 16]; 8], [[0u8; 16]; 8]);
            for row in 0..8 {
                let lane = 8 * n + row;
                cx.note_lane(lane, Space::Shared, addresses[lane], 16, AccessKind::READ)?;
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
                let unwritten = std::array::from_fn(unwritten);
                let marks = Marks { unwritten, from_memory: u32::MAX, strict: 0 };
                cx.write_marked(target, &values, &marks);
            } else {
                cx.write(target, &values, 0);
            }
        }
        Ok(())
    })
}

/// `stmatrix`: stores matrices of 8 rows of 8 16-bit elements, where [`load`] finds them.
fn store(values: Vec<Source<u32>>, address: Address, transposed: bool) -> Execute {
    Box::new(move |cx| {
        let addresses = address.read(cx)?;
        for (n, &value) in values.iter().enumerate() {
            let mut rows = [[0u8; 16]; 8];
            for (lane, word) in cx.value(value)?.into_iter().enumerate() {
                for (half, bytes) in word.to_le_bytes().as_chunks::<2>().0.iter().enumerate() {
                    let (row, column) = (lane / 4, 2 * (lane % 4) + half);
                    let (row, column) = if transposed { (column, row) } else { (row, column) };
                    rows[row][2 * column..][..2].copy_from_slice(bytes);
                }
            }
            for (row, bytes) in rows.into_iter().enumerate() {
                let lane = 8 * n + row;
                cx.check_unused(lane, Space::Shared, addresses[lane], 16)?;
                cx.note_lane(lane, Space::Shared, addresses[lane], 16, AccessKind::WRITE)?;
                cx.reach(lane, Space::Shared, addresses[lane], 16, "writes")?.write(0, bytes);
            }
        }
        cx.changed = true;
        Ok(())
    })
}

/// `mma.m16n8k16` of bf16: D = A B + C. With g = lane / 4 and t = lane % 4, a lane holds these elements. Of
/// A: rows g and g + 8, columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. Of B: the same k as rows, column g. Of C
/// and D: rows g and g + 8, columns 2 t and 2 t + 1.
fn multiply(
    target: [RegisterSlot; 4],
    a: [Source<u32>; 4],
    b: [Source<u32>; 2],
    c: [Source<f32>; 4],
) -> Execute {
    Box::new(move |cx| {
        let (mut left, mut right, mut sums) =
            ([[0f32; ROWS]; K], [[0f32; COLUMNS]; K], [[0f32; ROWS]; COLUMNS]);
        for (n, source) in a.into_iter().enumerate() {
            for (lane, pair) in cx.value(source)?.into_iter().enumerate() {
                let (row, column) = (lane / 4 + 8 * (n % 2), 2 * (lane % 4) + 8 * (n / 2));
                left[column][row] = from_bf16(pair as u16);
                left[column + 1][row] = from_bf16((pair >> 16) as u16);
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
                sums[column][row] = value;
            }
        }
        add_products(&left, &right, &mut sums);
        for (n, slot) in target.into_iter().enumerate() {
            let values = std::array::from_fn(|lane| {
                let (row, column) = place(lane, n);
                canonical(sums[column][row])
            });
            cx.write::<f32>(slot, &values, 0);
        }
        Ok(())
    })
}
