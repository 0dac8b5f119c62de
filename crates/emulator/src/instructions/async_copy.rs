//! Asynchronous copies to shared memory (PTX ISA, section 9.7.9.25).
//!
//! A copy runs as late as the ISA allows, when the thread waits for it. Until then its destination counts as
//! never written.

use super::memory::Address;
use super::{Decoded, Decoder, lanes, unknown};
use crate::fault::Outcome;
use crate::kernel::context::{Context, PendingCopies, PendingCopy, Source};
use crate::ptx::{Instruction, Operand, Space};
use crate::registers::{LANES, lanes_of};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    match (parts, &instruction.operands[..]) {
        (
            &["async", "ca" | "cg", "shared" | "shared::cta", "global"],
            [target, source, Operand::Integer(bytes), rest @ ..],
        ) if matches!(bytes, 4 | 8 | 16) && rest.len() < 2 => {
            let bytes = *bytes as u32;
            let source_bytes: Source<u32> = match rest {
                [source_bytes] => d.source(source_bytes)?,
                _ => Source::Constant(bytes),
            };
            let (target, source) = (Address::of(d, target)?, Address::of(d, source)?);
            lanes(Box::new(move |cx| start(cx, &target, &source, bytes, source_bytes)))
        }
        (&["async", "commit_group"], []) => lanes(Box::new(|cx| {
            cx.copies.resize_with(LANES, PendingCopies::default);
            for lane in lanes_of(cx.active) {
                let copies = &mut cx.copies[lane];
                let open = std::mem::take(&mut copies.open);
                copies.committed.push_back(open);
            }
            Ok(())
        })),
        (&["async", "wait_group"], [Operand::Integer(left)]) => {
            let left = *left as usize;
            lanes(Box::new(move |cx| {
                cx.copies.resize_with(LANES, PendingCopies::default);
                for lane in lanes_of(cx.active) {
                    while cx.copies[lane].committed.len() > left {
                        let group = cx.copies[lane].committed.pop_front().unwrap_or_default();
                        finish(cx, lane, group)?;
                    }
                }
                Ok(())
            }))
        }
        (&["async", "wait_all"], []) => lanes(Box::new(|cx| {
            cx.copies.resize_with(LANES, PendingCopies::default);
            for lane in lanes_of(cx.active) {
                let PendingCopies { committed, open } = std::mem::take(&mut cx.copies[lane]);
                for group in committed.into_iter().chain([open]) {
                    finish(cx, lane, group)?;
                }
            }
            Ok(())
        })),
        _ => unknown(instruction),
    }
}

fn start(
    cx: &mut Context<'_>,
    target: &Address,
    source: &Address,
    bytes: u32,
    source_bytes: Source<u32>,
) -> Outcome {
    let (targets, sources, source_bytes) = (target.read(cx)?, source.read(cx)?, cx.value(source_bytes)?);
    cx.copies.resize_with(LANES, PendingCopies::default);
    for lane in lanes_of(cx.active) {
        let source_bytes = source_bytes[lane].min(bytes) as usize;
        cx.check_unused(lane, Space::Shared, targets[lane], bytes.into())?;
        let to = cx.reach(lane, Space::Shared, targets[lane], bytes.into(), "copies to")?;
        to.forget();
        if source_bytes > 0 {
            // Checked now, so that the fault names the line of the copy.
            let sizes = [source_bytes as u64, bytes.into()];
            cx.reach_aligned(lane, Space::Global, sources[lane], sizes, "copies from")?;
        }
        cx.note_copy(lane, targets[lane], sources[lane], [source_bytes as u64, bytes.into()])?;
        let bytes = bytes as usize;
        cx.copies[lane].open.push(PendingCopy {
            target: targets[lane],
            source: sources[lane],
            bytes,
            source_bytes,
        });
    }
    Ok(())
}

fn finish(cx: &mut Context<'_>, lane: usize, copies: Vec<PendingCopy>) -> Outcome {
    cx.changed = true;
    for PendingCopy { target, source, bytes, source_bytes } in copies {
        cx.note_copy(lane, target, source, [source_bytes as u64, bytes as u64])?;
        let to = cx.reach(lane, Space::Shared, target, bytes as u64, "copies to")?;
        let (head, tail) = to.split(source_bytes);
        if source_bytes > 0 {
            let sizes = [source_bytes, bytes].map(|bytes| bytes as u64);
            head.copy_from(cx.reach_aligned(lane, Space::Global, source, sizes, "copies from")?);
        }
        tail.fill(0);
    }
    Ok(())
}
