//! Asynchronous copies to shared memory (PTX ISA, section 9.7.9.25).
//!
//! A copy runs as late as the ISA allows, when the thread waits for it. Until then its destination counts as
//! never written.

use super::memory::Address;
use super::{Decoded, Decoder, lanes, unknown};
use crate::fault::Outcome;
use crate::kernel::context::{PendingCopy, Source, WarpContext, groups};
use crate::ptx::{Instruction, Operand, Space};
use crate::registers::lanes_of;

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
            let (target, source) = (Address::decode(d, target)?, Address::decode(d, source)?);
            lanes(Box::new(move |cx| start(cx, &target, &source, bytes, source_bytes)))
        }
        (&["async", "commit_group"], []) => lanes(Box::new(|cx| {
            lanes_of(cx.active).for_each(|lane| groups(&mut cx.asynchronous.copies, lane).commit());
            Ok(())
        })),
        (&["async", "wait_group"], [Operand::Integer(left)]) => wait(*left as usize, false),
        (&["async", "wait_all"], []) => wait(0, true),
        _ => unknown(instruction),
    }
}

/// Waits for all groups but the latest `left`, after committing what is open if it `commits`.
fn wait(left: usize, commits: bool) -> Decoded {
    lanes(Box::new(move |cx| {
        for lane in lanes_of(cx.active) {
            if commits {
                groups(&mut cx.asynchronous.copies, lane).commit();
            }
            while let Some(group) = groups(&mut cx.asynchronous.copies, lane).pop(left) {
                finish(cx, lane, group)?;
            }
        }
        Ok(())
    }))
}

fn start(
    cx: &mut WarpContext<'_>,
    target: &Address,
    source: &Address,
    bytes: u32,
    source_bytes: Source<u32>,
) -> Outcome {
    let (targets, sources, source_bytes) = (target.read(cx)?, source.read(cx)?, cx.value(source_bytes)?);
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
        let (target, source, bytes) = (targets[lane], sources[lane], bytes as usize);
        groups(&mut cx.asynchronous.copies, lane).open.push(PendingCopy {
            target,
            source,
            bytes,
            source_bytes,
        });
    }
    Ok(())
}

fn finish(cx: &mut WarpContext<'_>, lane: usize, copies: Vec<PendingCopy>) -> Outcome {
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
