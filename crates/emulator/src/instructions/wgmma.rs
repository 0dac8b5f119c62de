//! Asynchronous matrix instructions of four warps, `wgmma` (PTX ISA, section 9.7.15).
//!
//! Each warp computes its 16 of 64 rows. A `wgmma` runs at a random time between its instruction and the wait
//! for its group. Until the wait its accumulators count as never written, and what it reads from memory and
//! registers must not change. FP8 sums are those of `gemm`'s, bf16 sums those of `mma`.

use super::tensor_core::{COLUMNS, K, ROWS, add_products};
use super::{Decoded, Decoder, unknown, whole_warp};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::gemm::{FP8_PRODUCTS, add_fp8_products};
use crate::kernel::cluster::{SharedPlace, UNIT};
use crate::kernel::context::{CommitGroups, Condition, Source, WarpContext, Wgmma, vectorized};
use crate::numbers::{E4M3, E5M2, Minifloat, canonical, from_bf16};
use crate::ptx::{Instruction, Operand};
use crate::registers::{LANES, Lanes, RegisterSlot, WARPGROUP};
use crate::tensor_map::swizzled;
use std::sync::{Arc, LazyLock};

const OVERWRITTEN: &str = "an accumulator is overwritten before the wait for its `wgmma`";

/// An FP8 format, and the values of all bytes.
type Fp8Table = (Minifloat, [f32; 256]);
static TABLES: LazyLock<[Fp8Table; 2]> = LazyLock::new(|| {
    [E4M3, E5M2].map(|format| (format, std::array::from_fn(|byte| format.decode(byte as u8))))
});

/// The table of an FP8 type, or none for bf16.
type Element = Option<&'static Fp8Table>;

fn element(name: &str) -> Option<Element> {
    match name {
        "bf16" => Some(None),
        "e4m3" => Some(Some(&TABLES[0])),
        "e5m2" => Some(Some(&TABLES[1])),
        _ => None,
    }
}

/// A or B.
#[derive(Clone, Copy)]
struct MatrixOperand {
    element: Element,
    /// True if elements along m or n are contiguous in shared memory, else those along k.
    transposed: bool,
    negated: bool,
}

/// A form of the instruction.
struct Form {
    n: usize,
    left: MatrixOperand,
    right: MatrixOperand,
}

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    match (parts, &instruction.operands[..]) {
        // `unfenced` in `compile` says where it is missing.
        (&["fence", "sync", "aligned"], []) => whole_warp(instruction, |_| Ok(())),
        (&["commit_group", "sync", "aligned"], []) => whole_warp(instruction, |cx| {
            cx.asynchronous.wgmma.commit();
            cx.observe(|races, _| races.commit_wgmma());
            Ok(())
        }),
        (&["wait_group", "sync", "aligned"], [Operand::Integer(left)]) => {
            let left = *left as usize;
            whole_warp(instruction, move |cx| {
                while let Some(group) = cx.asynchronous.wgmma.pop(left) {
                    finish(cx, group)?;
                }
                cx.observe(|races, _| races.wait_for_wgmma(left));
                Ok(())
            })
        }
        (
            &["mma_async", "sync", "aligned", shape, "f32", left, right],
            [d_registers, a, b, scale_d, rest @ ..],
        ) => {
            let (Some(left), Some(right)) = (element(left), element(right)) else {
                return unknown(instruction);
            };
            let k = if left.is_none() { K } else { FP8_PRODUCTS };
            let n = shape.strip_prefix("m64n").and_then(|rest| rest.strip_suffix(&format!("k{k}")));
            let n: usize = n.and_then(|n| n.parse().ok()).unwrap_or(0);
            let is_valid = left.is_none() == right.is_none() && n.is_multiple_of(8) && (8..=256).contains(&n);
            let from_registers = matches!(a, Operand::Vector(_));
            let number = |operand: &Operand| if let Operand::Integer(n) = operand { Some(*n) } else { None };
            let numbers: Vec<i64> = rest.iter().map_while(number).collect();
            // The signs of A and B, then for bf16 the transposition of each that lies in shared memory.
            let [left_sign @ (1 | -1), right_sign @ (1 | -1), ref transposed @ ..] = numbers[..] else {
                return unknown(instruction);
            };
            let in_memory = 2 - usize::from(from_registers);
            if !is_valid
                || numbers.len() != rest.len()
                || transposed.len() != if left.is_none() { in_memory } else { 0 }
            {
                return unknown(instruction);
            }
            let operand =
                |element, transposed, sign| MatrixOperand { element, transposed, negated: sign < 0 };
            let form = Form {
                n,
                left: operand(left, transposed.len() == 2 && transposed[0] == 1, left_sign),
                right: operand(right, transposed.last() == Some(&1), right_sign),
            };
            let accumulators: Vec<RegisterSlot> =
                d.elements(d_registers).iter().map(|slot| d.target::<f32>(slot)).collect::<Decoded<_>>()?;
            let a_registers: Vec<RegisterSlot> = match a {
                Operand::Vector(parts) => parts.iter().map(|a| d.target::<u32>(a)).collect::<Decoded<_>>()?,
                _ => Vec::new(),
            };
            if accumulators.len() != n / 2 || from_registers && a_registers.len() != 4 {
                return unknown(instruction);
            }
            let a = if from_registers { Source::Constant(0) } else { d.source::<u64>(a)? };
            let is_fenced = !d.unfenced.contains(&std::ptr::from_ref(instruction));
            let (descriptors, scale_d) = ([a, d.source(b)?], d.predicate(scale_d)?);
            issue(instruction, form, accumulators.into(), a_registers, descriptors, scale_d, is_fenced)
        }
        _ => unknown(instruction),
    }
}

/// The value that all lanes have.
fn uniform<T: Copy + PartialEq>(values: &Lanes<T>, what: &str) -> Outcome<T> {
    match values.iter().position(|value| *value != values[0]) {
        None => Ok(values[0]),
        Some(lane) => {
            let problem = format!("`wgmma` whose {what} differs from that of lane 0");
            Err(ThreadFault::new(lane as u32, FaultKind::Synchronisation, problem))
        }
    }
}

/// A step that begins a `wgmma`.
fn issue(
    instruction: &Instruction,
    form: Form,
    accumulators: Arc<[RegisterSlot]>,
    a_registers: Vec<RegisterSlot>,
    [a, b]: [Source<u64>; 2],
    scale_d: Condition,
    is_fenced: bool,
) -> Decoded {
    let (form, location) = (Arc::new(form), instruction.location);
    let compute: Arc<dyn Fn(&mut WarpContext<'_>, &Wgmma) -> Outcome + Send + Sync> = {
        let form = form.clone();
        Arc::new(move |cx, wgmma| form.run(cx, wgmma))
    };
    whole_warp(instruction, move |cx| {
        if !is_fenced {
            let problem = "`wgmma` without a `wgmma.fence` before it and after other uses of its registers";
            return cx.fault(FaultKind::Synchronisation, problem);
        }
        let descriptors =
            [uniform(&cx.value(a)?, "descriptor of A")?, uniform(&cx.value(b)?, "descriptor of B")?];
        let begins_within =
            |of: &u64| of >> 49 & 7 != 0 || (of & 0x3FFF) >> 3 & ((1 << swizzle_bits(*of)) - 1) != 0;
        if descriptors.iter().any(begins_within) {
            let problem = "a descriptor of a matrix that does not begin with a pattern of its swizzle: 256, 512 or 1024 bytes \
                           by the width of 32, 64 or 128; base offsets are not emulated";
            return cx.fault(FaultKind::Address, problem);
        }
        let scale_d = match cx.decided(scale_d)? {
            0 => false,
            u32::MAX => true,
            _ => {
                return cx
                    .fault(FaultKind::Synchronisation, "`wgmma` whose scale of D differs between lanes");
            }
        };
        let is_open = cx.asynchronous.wgmma.all().any(|wgmma| wgmma.accumulators == accumulators);
        for &slot in accumulators.iter() {
            if !cx.registers.is_reserved(slot) {
                if is_open {
                    return cx.fault(FaultKind::Synchronisation, OVERWRITTEN);
                }
                if scale_d {
                    cx.value::<f32>(Source::Slot(slot))?;
                }
                cx.registers.reserve(slot);
            }
        }
        let a_registers = (a_registers.iter())
            .map(|&slot| Ok((slot, cx.value::<u32>(Source::Slot(slot))?)))
            .collect::<Outcome<Vec<_>>>()?;
        let warp = cx.position.first_thread / LANES as u32 % WARPGROUP as u32;
        let mut units = form.right.units(descriptors[1], 0, form.n);
        if a_registers.is_empty() {
            units.extend(form.left.units(descriptors[0], ROWS * warp as usize, ROWS));
        }
        let units: Option<Vec<u16>> = units.into_iter().map(|unit| u16::try_from(unit).ok()).collect();
        let length = cx.own_shared().len() as u64;
        let Some(units) =
            units.filter(|units| units.iter().all(|&unit| (u64::from(unit) + 1) * UNIT <= length))
        else {
            let problem = format!(
                "a descriptor of `wgmma` reaches beyond the {length} bytes of a block's shared memory"
            );
            return cx.fault(FaultKind::Address, problem);
        };
        cx.note_wgmma(&units)?;
        cx.cluster.add_readers(cx.position.rank, &units, location);
        let [a, b] = descriptors;
        let hash = cx.asynchronous.executed.0.rotate_left(5) ^ a ^ b.rotate_left(32) ^ u64::from(location);
        cx.asynchronous.executed = (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15), location);
        let (compute, accumulators) = (compute.clone(), accumulators.clone());
        let swizzle_bits = descriptors.map(swizzle_bits);
        let wgmma = Wgmma {
            compute,
            accumulators,
            a_registers,
            scale_d,
            swizzle_bits,
            units,
            has_run: false,
            location,
        };
        cx.asynchronous.wgmma.open.push(wgmma);
        Ok(())
    })
}

/// Runs the oldest `wgmma` that has not run, of a warp that may be anywhere.
pub(crate) fn advance(cx: &mut WarpContext<'_>) -> Outcome {
    let CommitGroups { mut committed, mut open } = std::mem::take(&mut cx.asynchronous.wgmma);
    let next = committed.iter_mut().flatten().chain(&mut open).find(|wgmma| !wgmma.has_run);
    let result = next.map_or(Ok(()), |wgmma| run(cx, wgmma));
    cx.asynchronous.wgmma = CommitGroups { committed, open };
    result
}

fn run(cx: &mut WarpContext<'_>, wgmma: &mut Wgmma) -> Outcome {
    wgmma.has_run = true;
    let result = (wgmma.compute)(cx, wgmma);
    result.map_err(|fault| Box::new(ThreadFault { location: Some(wgmma.location), ..*fault }))
}

/// Ends the oldest group: its `wgmma` have run, and their accumulators can be read.
fn finish(cx: &mut WarpContext<'_>, mut group: Vec<Wgmma>) -> Outcome {
    for wgmma in &mut group {
        if !wgmma.has_run {
            run(cx, wgmma)?;
        }
        cx.cluster.remove_readers(cx.position.rank, &wgmma.units);
        if wgmma.a_registers.iter().any(|(slot, values)| cx.registers.read::<u32>(*slot) != *values) {
            return ThreadFault::of_work(
                "a register of A is overwritten before the wait for its `wgmma`",
                wgmma.location,
            );
        }
        if wgmma.accumulators.iter().any(|&slot| !cx.registers.is_reserved(slot)) {
            return ThreadFault::of_work(OVERWRITTEN, wgmma.location);
        }
    }
    for wgmma in &group {
        // Those that add to the same accumulators share all of them.
        if !cx.asynchronous.wgmma.all().any(|later| later.accumulators == wgmma.accumulators) {
            wgmma.accumulators.iter().for_each(|&slot| cx.registers.unreserve(slot));
        }
    }
    Ok(())
}

/// log2 of the chunks that a descriptor permutes.
fn swizzle_bits(descriptor: u64) -> u32 {
    if descriptor >> 62 == 0 { 0 } else { 4 - (descriptor >> 62) as u32 }
}

impl MatrixOperand {
    /// The 16-byte units of shared memory with `count` rows of the operand from `first` on. Rows are those of
    /// A or columns of B. By row: two units along k. If transposed, by eight rows: a unit for each k.
    fn units(self, descriptor: u64, first: usize, count: usize) -> Vec<u64> {
        let bytes = |shift: u32| (descriptor >> shift & 0x3FFF) << 4;
        let (start, leading, stride) = (bytes(0), bytes(16), bytes(32));
        let bits = swizzle_bits(descriptor);
        // Chunks of 16 bytes in a row of the swizzle's pattern.
        let width = 1 << bits;
        let at = |offset: u64| swizzled(start + offset, bits) / UNIT;
        let rows = first as u64..(first + count) as u64;
        if self.transposed {
            let place = |chunk: u64, k: u64| match bits {
                0 => chunk * stride + k % 8 * 16 + k / 8 * leading,
                _ => chunk % width * 16 + chunk / width * leading + k % 8 * width * 16 + k / 8 * stride,
            };
            (rows.start / 8..rows.end / 8)
                .flat_map(|chunk| (0..K as u64).map(move |k| (chunk, k)))
                .map(|(chunk, k)| at(place(chunk, k)))
                .collect()
        } else {
            let along_k = if bits == 0 { leading } else { 16 };
            rows.flat_map(|row| (0..2).map(move |half| (row, half)))
                .map(|(row, half)| at(row / 8 * stride + row % 8 * width * 16 + half * along_k))
                .collect()
        }
    }

    /// The values of 16 bytes, of which bf16 fills eight.
    #[inline(always)]
    fn values(self, bytes: [u8; 16]) -> [f32; 16] {
        let mut values = [0.0; 16];
        match self.element {
            Some((_, table)) => {
                values.iter_mut().zip(bytes).for_each(|(value, byte)| *value = table[usize::from(byte)])
            }
            None => values.iter_mut().zip(bytes.as_chunks::<2>().0).for_each(|(value, &pair)| {
                *value = from_bf16(u16::from_le_bytes(pair));
            }),
        }
        if self.negated { values.map(|value| -value) } else { values }
    }

    /// Reads rows of the operand, of `k` values each.
    fn read(self, cx: &WarpContext<'_>, units: &[u16], bits: u32, k: usize) -> Outcome<Vec<f32>> {
        let memory = cx.own_shared().bytes(0, cx.own_shared().len() as u64).expect("all of it");
        let mut rows = vec![0.0; units.len() * k / 2];
        for (n, &unit) in units.iter().enumerate() {
            let at = usize::from(unit) * UNIT as usize;
            if memory.marks::<16>(at) != [1; 16] {
                return unwritten(cx, at as u64);
            }
            let content = memory.read(at);
            if let Some((other, location)) = cx.cluster.other_swizzle(cx.position.rank, unit, bits, content) {
                let place = cx.launch.code.describe(location);
                let [bytes, other] = [bits, other].map(|bits| if bits == 0 { 0 } else { 16 << bits });
                let problem = format!(
                    "`wgmma` reads by a descriptor with a swizzle of {bytes} bytes what the copy of {place} wrote with one of {other}"
                );
                return cx.fault(FaultKind::Address, problem);
            }
            let values = self.values(content);
            if self.transposed {
                // Eight rows at one k.
                for (row, value) in values[..8].iter().enumerate() {
                    rows[(n / K * 8 + row) * K + n % K] = *value;
                }
            } else {
                rows[n * k / 2..][..k / 2].copy_from_slice(&values[..k / 2]);
            }
        }
        Ok(rows)
    }
}

/// The fault of reading shared memory that nothing has written.
#[cold]
fn unwritten<T>(cx: &WarpContext<'_>, offset: u64) -> Outcome<T> {
    let at = SharedPlace { rank: cx.position.rank, offset };
    let why = match cx.cluster.writer(at, UNIT) {
        Some(location) => {
            format!("which the copy of {} has not written yet", cx.launch.code.describe(location))
        }
        None => "which nothing has written".to_owned(),
    };
    let problem = format!("`wgmma` reads bytes at {offset} of shared memory, {why}");
    cx.fault(FaultKind::Uninitialised, problem)
}

/// Row and column of element `n` of a lane's accumulators.
fn place(lane: usize, n: usize) -> (usize, usize) {
    (lane / 4 + 8 * (n / 2 % 2), 8 * (n / 4) + 2 * (lane % 4) + n % 2)
}

impl Form {
    /// Computes the sums of a warp.
    fn run(&self, cx: &mut WarpContext<'_>, wgmma: &Wgmma) -> Outcome {
        let Form { n: columns, left, right } = *self;
        let k = if left.element.is_none() { K } else { FP8_PRODUCTS };
        let (of_right, of_left) = wgmma.units.split_at(2 * columns);
        let b = right.read(cx, of_right, wgmma.swizzle_bits[1], k)?;
        // By k.
        let mut a = [[0.0; ROWS]; FP8_PRODUCTS];
        if wgmma.a_registers.is_empty() {
            for (row, values) in left.read(cx, of_left, wgmma.swizzle_bits[0], k)?.chunks(k).enumerate() {
                values.iter().enumerate().for_each(|(k, value)| a[k][row] = *value);
            }
        }
        for (n, (_, words)) in wgmma.a_registers.iter().enumerate() {
            for (lane, word) in words.iter().enumerate() {
                let mut bytes = [0; 16];
                bytes[..4].copy_from_slice(&word.to_le_bytes());
                let first = lane % 4 * (k / 8) + n / 2 * k / 2;
                for (i, value) in left.values(bytes)[..k / 8].iter().enumerate() {
                    a[first + i][lane / 4 + n % 2 * 8] = *value;
                }
            }
        }
        let mut sums = vec![[0.0f32; ROWS]; columns];
        if wgmma.scale_d {
            for (n, &slot) in wgmma.accumulators.iter().enumerate() {
                for (lane, value) in cx.registers.read::<f32>(slot).into_iter().enumerate() {
                    let (row, column) = place(lane, n);
                    sums[column][row] = value;
                }
            }
        }
        if let (Some((of_a, _)), Some((of_b, _))) = (left.element, right.element) {
            let least = [of_a.least_exponent(), of_b.least_exponent()];
            vectorized(
                #[inline(always)]
                || {
                    for (sum, b) in sums.iter_mut().zip(b.chunks(k)) {
                        *sum = add_fp8_products(*sum, &a, b, least);
                    }
                },
            );
        } else {
            let a = a.first_chunk::<K>().expect("as many products");
            for (sums, b) in sums.as_chunks_mut::<COLUMNS>().0.iter_mut().zip(b.chunks(COLUMNS * K)) {
                let b = std::array::from_fn(|k| std::array::from_fn(|column| b[column * K + k]));
                add_products(a, &b, sums);
            }
        }
        for (n, &slot) in wgmma.accumulators.iter().enumerate() {
            let values: Lanes<f32> = std::array::from_fn(|lane| {
                let (row, column) = place(lane, n);
                canonical(sums[column][row])
            });
            cx.registers.write_reserved(slot, &values);
        }
        Ok(())
    }
}
