//! Bulk copies and tensor copies (PTX ISA, sections 9.7.9.25.4 and 9.7.9.27).
//!
//! A copy is checked when it is issued, and runs in a random order with other work. Its target counts as
//! never written until then.

use super::mbarrier::{Barrier, of_lane};
use super::memory::{Address, located};
use super::{Decoded, Decoder, lanes, unknown};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::cluster::{BulkCopy, Completion, CopyPiece, Reduction, SharedPlace};
use crate::kernel::context::{BulkStore, Source, WarpContext, groups};
use crate::memory::Bytes;
use crate::ptx::{Instruction, Operand, Space};
use crate::registers::lanes_of;
use crate::tensor_map::TensorMap;
use std::sync::Arc;

/// Alignment of sizes, global addresses, and shared addresses of bulk copies.
const BULK: u64 = 16;
/// Alignment of a tensor copy's shared address.
const TENSOR: u64 = 128;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    // Hints: the cache policy, which is the last operand, and the default mode of tensor copies.
    let (mut parts, mut operands) = (parts.to_vec(), &instruction.operands[..]);
    parts.retain(|part| *part != "tile");
    if let (Some(n), [others @ .., _]) = (parts.iter().position(|part| *part == "L2::cache_hint"), operands) {
        parts.remove(n);
        operands = others;
    }
    let source = |operand: &Operand| Address::decode(d, operand);
    let barrier = |operand| Ok::<_, String>(Barrier { space: Space::Cluster, address: source(operand)? });
    let location = instruction.location;
    match (&parts[..], operands) {
        (
            ["async", "bulk", "shared::cluster", "global", COMPLETES, cast @ ..],
            [to, from, bytes, at, mask @ ..],
        ) if is_cast(cast, mask) => {
            let (from, bytes) = (source(from)?, d.source::<u32>(bytes)?);
            let load = BulkLoad::decode(d, to, barrier(at)?, mask, BULK, location)?;
            lanes(Box::new(move |cx| {
                let (from, bytes) = (from.read(cx)?, cx.value(bytes)?);
                load.issue(cx, |cx, lane, shared| {
                    Ok((bulk_pieces(cx, lane, from[lane], shared, bytes[lane].into())?, None))
                })
            }))
        }
        (
            ["async", "bulk", "tensor", dimensions, "shared::cluster", "global", COMPLETES, cast @ ..],
            [to, Operand::Box(map, coordinates), at, mask @ ..],
        ) if is_cast(cast, mask) => {
            let tensor = TensorBox::decode(d, dimensions, map, coordinates)?;
            let load = BulkLoad::decode(d, to, barrier(at)?, mask, TENSOR, location)?;
            lanes(Box::new(move |cx| {
                load.issue(cx, |cx, lane, shared| {
                    let (map, at) = tensor.read(cx, lane)?;
                    Ok((map.pieces(&at, shared), Some(map.swizzle_bits)))
                })
            }))
        }
        (["async", "bulk", "global", "shared::cta", "bulk_group"], [to, from, bytes]) => {
            store(d, from, to, bytes, None, location)
        }
        (
            ["reduce", "async", "bulk", "global", "shared::cta", "bulk_group", "add", "f32"],
            [to, from, bytes],
        ) => store(d, from, to, bytes, Some(add_f32), location),
        (
            ["async", "bulk", "tensor", dimensions, "global", "shared::cta", "bulk_group"],
            [Operand::Box(map, coordinates), from],
        ) => store_box(d, (dimensions, map, coordinates), from, None, location),
        (
            ["reduce", "async", "bulk", "tensor", dimensions, "global", "shared::cta", "add", "bulk_group"],
            [Operand::Box(map, coordinates), from],
        ) => store_box(d, (dimensions, map, coordinates), from, Some(add_f32), location),
        (["async", "bulk", "commit_group"], []) => lanes(Box::new(|cx| {
            cx.observe(|races, lanes| races.commit_copies(lanes));
            lanes_of(cx.active).for_each(|lane| groups(&mut cx.asynchronous.bulk, lane).commit());
            Ok(())
        })),
        (["async", "bulk", "wait_group", read @ ..], [Operand::Integer(left)])
            if matches!(read, [] | ["read"]) =>
        {
            let (left, reads) = (*left as usize, !read.is_empty());
            lanes(Box::new(move |cx| {
                for lane in lanes_of(cx.active) {
                    let committed = &mut groups(&mut cx.asynchronous.bulk, lane).committed;
                    let over = committed.len().saturating_sub(left);
                    let ended = committed.iter_mut().take(over).flatten();
                    let numbers: Vec<u64> = ended
                        .map(|store| {
                            store.is_read = true;
                            store.number
                        })
                        .collect();
                    if !reads {
                        committed.drain(..over);
                    }
                    for number in numbers {
                        finish(cx, lane, number, reads)?;
                    }
                }
                cx.observe(|races, lanes| races.wait_for_copies(lanes, left, reads));
                Ok(())
            }))
        }
        (
            ["async", "bulk", "prefetch", "tensor", dimensions, "L2", "global"],
            [Operand::Box(map, coordinates)],
        ) => {
            let tensor = TensorBox::decode(d, dimensions, map, coordinates)?;
            lanes(Box::new(move |cx| {
                lanes_of(cx.active).try_for_each(|lane| tensor.read(cx, lane).map(|_| ()))
            }))
        }
        (["async", "bulk", "prefetch", "L2", "global"], [from, bytes]) => {
            let (from, bytes) = (source(from)?, d.source::<u32>(bytes)?);
            lanes(Box::new(move |cx| {
                let (from, bytes) = (from.read(cx)?, cx.value(bytes)?);
                lanes_of(cx.active)
                    .try_for_each(|lane| bulk_pieces(cx, lane, from[lane], 0, bytes[lane].into()).map(|_| ()))
            }))
        }
        _ => unknown(instruction),
    }
}

const COMPLETES: &str = "mbarrier::complete_tx::bytes";

/// True if the name has `.multicast` if there is a mask.
fn is_cast(parts: &[&str], mask: &[Operand]) -> bool {
    matches!((parts, mask), ([], []) | (["multicast::cluster"], [_]))
}

/// A copy to shared memory.
struct BulkLoad {
    to: Barrier,
    at: Barrier,
    mask: Option<Source<u16>>,
    align: u64,
    location: u32,
}

impl BulkLoad {
    fn decode(
        d: &Decoder<'_>,
        to: &Operand,
        at: Barrier,
        mask: &[Operand],
        align: u64,
        location: u32,
    ) -> Decoded<BulkLoad> {
        let to = Barrier { space: Space::Cluster, address: Address::decode(d, to)? };
        let mask = mask.first().map(|mask| d.source(mask)).transpose()?;
        Ok(BulkLoad { to, at, mask, align, location })
    }

    /// Issues the copies of all active lanes; `pieces` returns those of a lane from an offset in
    /// shared memory, and the swizzle.
    fn issue(
        &self,
        cx: &mut WarpContext<'_>,
        pieces: impl Fn(&WarpContext<'_>, usize, u64) -> Outcome<(Vec<CopyPiece>, Option<u32>)>,
    ) -> Outcome {
        let (targets, barriers) = (self.to.address.read(cx)?, self.at.places(cx)?);
        let masks = self.mask.map(|mask| cx.value(mask)).transpose()?;
        let own = cx.position.rank;
        for lane in lanes_of(cx.active) {
            let fault = |problem: String| ThreadFault::new(lane as u32, FaultKind::Synchronisation, problem);
            let target = SharedPlace::locate(targets[lane], own);
            let (pieces, bits) = pieces(cx, lane, target.offset)?;
            let bytes = pieces.iter().map(|piece| piece.bytes).sum();
            check_global(cx, lane, &pieces, "copies from")?;
            let ranks = match &masks {
                None if barriers[lane].rank != target.rank => {
                    return Err(fault("copies to one block and signals an mbarrier of another".into()));
                }
                None => 1 << target.rank,
                Some(masks) => u32::from(masks[lane]),
            };
            let blocks = cx.cluster.blocks.len();
            if ranks == 0 || ranks >> blocks != 0 {
                return Err(fault(format!(
                    "multicasts by the mask {ranks:#b} in a cluster of {blocks} blocks"
                )));
            }
            // Each block receives a copy at the same offset and signals its own mbarrier.
            for rank in lanes_of(ranks) {
                let place = SharedPlace { rank: rank as u32, ..target };
                let signalled = SharedPlace { rank: rank as u32, ..barriers[lane] };
                cx.check_unused(lane, Space::Cluster, place.address(), bytes)?;
                let sizes = [bytes, self.align];
                cx.reach_aligned(lane, Space::Cluster, place.address(), sizes, "copies to")?.forget();
                of_lane(lane, cx.cluster.mbarrier(cx.shared, signalled).map(|_| ()))?;
                let completion = Completion::Bytes(signalled);
                issue(cx, lane, place.rank, (pieces.clone(), bits), completion, self.location)?;
            }
        }
        Ok(())
    }
}

/// Adds a copy to those under way; returns its number.
fn issue(
    cx: &mut WarpContext<'_>,
    lane: usize,
    rank: u32,
    (pieces, swizzle_bits): (Vec<CopyPiece>, Option<u32>),
    completion: Completion,
    location: u32,
) -> Outcome<u64> {
    cx.note_bulk(lane, rank, &pieces, completion)?;
    let thread = (cx.position.rank, cx.position.first_thread + lane as u32);
    let start = pieces.iter().map(|piece| piece.shared).min().unwrap_or(0);
    let span = (start, pieces.iter().map(|piece| piece.shared + piece.bytes).max().unwrap_or(start));
    cx.changed = true;
    let (number, taken) = (0, None);
    let copy = BulkCopy { number, rank, pieces, swizzle_bits, span, completion, taken, location, thread };
    Ok(cx.cluster.issue(copy))
}

/// The pieces of a bulk copy between global and shared memory: one for each allocation of neighbouring memory
/// that it spans.
fn bulk_pieces(
    cx: &WarpContext<'_>,
    lane: usize,
    global: u64,
    shared: u64,
    bytes: u64,
) -> Outcome<Vec<CopyPiece>> {
    if bytes == 0 || !bytes.is_multiple_of(BULK) {
        let problem = format!("a bulk copy of {bytes} bytes, which is no multiple of {BULK}");
        return Err(ThreadFault::new(lane as u32, FaultKind::Alignment, problem));
    }
    let lengths = cx.launch.memory.pieces(global, bytes).unwrap_or_default();
    let lengths: Vec<u64> = lengths.iter().map(|piece| piece.len() as u64).collect();
    // The error names the whole copy if a part of it is outside of memory.
    let first = lengths.first().copied().unwrap_or(bytes);
    cx.reach_aligned(lane, Space::Global, global, [first, BULK], "copies")?;
    let starts = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end - length)
    });
    let piece = |(at, &bytes)| CopyPiece { global: Some(global + at), shared: shared + at, bytes };
    Ok(starts.zip(&lengths).map(piece).collect())
}

fn check_global(cx: &WarpContext<'_>, lane: usize, pieces: &[CopyPiece], does: &str) -> Outcome {
    let inside = pieces.iter().filter_map(|piece| Some((piece.global?, piece.bytes)));
    for (address, bytes) in inside {
        cx.reach_aligned(lane, Space::Global, address, [bytes, 1], does)?;
    }
    Ok(())
}

/// `cp.async.bulk` from shared to global memory.
fn store(
    d: &Decoder<'_>,
    from: &Operand,
    to: &Operand,
    bytes: &Operand,
    reduction: Reduction,
    location: u32,
) -> Decoded {
    let (from, to, bytes) = (Address::decode(d, from)?, Address::decode(d, to)?, d.source::<u32>(bytes)?);
    lanes(Box::new(move |cx| {
        let (from, to, bytes) = (from.read(cx)?, to.read(cx)?, cx.value(bytes)?);
        for lane in lanes_of(cx.active) {
            let bytes = bytes[lane].into();
            let pieces = bulk_pieces(cx, lane, to[lane], from[lane], bytes)?;
            cx.reach_aligned(lane, Space::Shared, from[lane], [bytes, BULK], "copies from")?;
            issue_store(cx, lane, pieces, reduction, location)?;
        }
        Ok(())
    }))
}

/// A copy of a box from shared memory to a tensor, or the addition to a tensor of f32 numbers.
fn store_box(
    d: &Decoder<'_>,
    (dimensions, map, coordinates): (&str, &Operand, &[Operand]),
    from: &Operand,
    reduction: Reduction,
    location: u32,
) -> Decoded {
    let (tensor, from) = (TensorBox::decode(d, dimensions, map, coordinates)?, Address::decode(d, from)?);
    lanes(Box::new(move |cx| {
        let from = from.read(cx)?;
        for lane in lanes_of(cx.active) {
            let (map, at) = tensor.read(cx, lane)?;
            if reduction.is_some() && map.element_bytes != 4 {
                let problem = format!("adds f32 numbers to a tensor of {}-byte elements", map.element_bytes);
                return Err(ThreadFault::new(lane as u32, FaultKind::Address, problem));
            }
            let pieces = of_lane(lane, map.stored_pieces(&at, from[lane]))?;
            let sizes = [map.box_bytes(), TENSOR];
            cx.reach_aligned(lane, Space::Shared, from[lane], sizes, "copies from")?;
            issue_store(cx, lane, pieces, reduction, location)?;
        }
        Ok(())
    }))
}

fn issue_store(
    cx: &mut WarpContext<'_>,
    lane: usize,
    pieces: Vec<CopyPiece>,
    reduction: Reduction,
    location: u32,
) -> Outcome {
    check_global(cx, lane, &pieces, "copies to")?;
    let number = issue(cx, lane, cx.position.rank, (pieces, None), Completion::Group(reduction), location)?;
    let store = BulkStore { number, is_read: false, location };
    groups(&mut cx.asynchronous.bulk, lane).open.push(store);
    Ok(())
}

/// Runs a copy now, or only reads its source.
fn finish(cx: &mut WarpContext<'_>, lane: usize, number: u64, reads: bool) -> Outcome {
    let Some(index) = cx.cluster.copies.iter().position(|copy| copy.number == number) else { return Ok(()) };
    cx.changed = true;
    if !reads {
        return of_lane(
            lane,
            cx.cluster.run_copy(cx.launch.memory, cx.shared, index, &|location| cx.launch.place(location)),
        );
    }
    if cx.cluster.copies[index].taken.is_none() {
        let mut copy = cx.cluster.copies.swap_remove(index);
        cx.cluster.take(&mut copy, cx.shared);
        cx.cluster.copies.push(copy);
    }
    Ok(())
}

/// Adds numbers to those in memory.
fn add_f32(to: Bytes<'_>, from: Bytes<'_>) -> Result<(), String> {
    for at in (0..to.len()).step_by(4) {
        if to.marks::<4>(at) != [1; 4] {
            return Err("a copy adds to memory that nothing has written".into());
        }
        let [x, y] = [to, from].map(|bytes| f32::from_le_bytes(bytes.read(at)));
        to.write(at, (x + y).to_le_bytes());
    }
    Ok(())
}

/// A box of a tensor.
struct TensorBox {
    map: Source<u64>,
    coordinates: Vec<Source<i32>>,
}

impl TensorBox {
    fn decode(
        d: &Decoder<'_>,
        dimensions: &str,
        map: &Operand,
        coordinates: &[Operand],
    ) -> Decoded<TensorBox> {
        if dimensions != format!("{}d", coordinates.len()) {
            return Err(format!("a `{dimensions}` copy with {} coordinates", coordinates.len()));
        }
        let coordinates =
            coordinates.iter().map(|coordinate| d.source(coordinate)).collect::<Decoded<_>>()?;
        Ok(TensorBox { map: d.source(map)?, coordinates })
    }

    /// A lane's map and coordinates.
    fn read(&self, cx: &WarpContext<'_>, lane: usize) -> Outcome<(Arc<TensorMap>, Vec<i32>)> {
        let address = cx.value(self.map)?[lane];
        let bytes = cx.reach_aligned(lane, Space::Generic, address, [128, 64], "reads a tensor map in")?;
        let words = std::array::from_fn(|n| u64::from_le_bytes(bytes.read(8 * n)));
        let map = TensorMap::decode(&words).filter(|map| map.extents.len() == self.coordinates.len());
        let (space, _) = located(Space::Generic, address);
        if !matches!(space, Space::Global | Space::Param) {
            let problem = format!(
                "uses a tensor map in {space:?} memory; it must be in global memory or a `__grid_constant__` parameter"
            );
            return Err(ThreadFault::new(lane as u32, FaultKind::Address, problem));
        }
        let Some(map) = map else {
            let problem = format!(
                "uses {address:#x} in {space:?} memory as a map of a tensor with {} dimensions, which it is not",
                self.coordinates.len()
            );
            return Err(ThreadFault::new(lane as u32, FaultKind::Address, problem));
        };
        let at = self.coordinates.iter().map(|&coordinate| Ok(cx.value(coordinate)?[lane]));
        let at: Vec<i32> = at.collect::<Outcome<_>>()?;
        // A GPU ends the kernel with "illegal instruction".
        let byte = i64::from(at[0]) * map.element_bytes as i64;
        if byte % 16 != 0 {
            let problem = format!("copies a box from byte {byte} of rows, which is no multiple of 16");
            return Err(ThreadFault::new(lane as u32, FaultKind::Address, problem));
        }
        Ok((map, at))
    }
}
