//! Exchanges among the lanes of a warp, and their election (PTX ISA, sections 9.7.9.6, 9.7.13 and 9.7.13.14).
//! All lanes of the mask take part together.

use super::{Decoded, Decoder, unknown};
use crate::kernel::context::Source;
use crate::kernel::{Action, Execute};
use crate::ptx::{Instruction, Operand};
use crate::registers::{LANES, Lanes, Marks, lanes_of};
use crate::settings::SETTINGS;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let (execute, members): (Execute, &Operand) =
        match (instruction.parts()[0], parts, &instruction.operands[..]) {
            ("shfl", &["sync", mode, "b32"], [target, a, b, c, members]) => {
                (shuffle(d, instruction, mode, target, [a, b, c])?, members)
            }
            ("vote", &["sync", "ballot", "b32"], [target, predicate, members]) => {
                let (target, predicate) = (d.target::<u32>(target)?, d.predicate(predicate)?);
                let execute: Execute = Box::new(move |cx| {
                    let lanes = cx.decided(predicate)?;
                    cx.write(target, &[lanes; LANES], 0);
                    Ok(())
                });
                (execute, members)
            }
            ("vote", &["sync", kind @ ("any" | "all"), "pred"], [target, predicate, members]) => {
                let (target, predicate) = (d.predicate_target(target)?, d.predicate(predicate)?);
                let is_any = kind == "any";
                let execute: Execute = Box::new(move |cx| {
                    let lanes = cx.decided(predicate)?;
                    let holds = if is_any { lanes != 0 } else { lanes == cx.active };
                    cx.write_predicate(target, if holds { u32::MAX } else { 0 }, 0);
                    Ok(())
                });
                (execute, members)
            }
            ("match", &["any", "sync", "b32"], [target, a, members]) => {
                let (target, a) = (d.target::<u32>(target)?, d.source::<u32>(a)?);
                let execute: Execute = Box::new(move |cx| {
                    let values = cx.value(a)?;
                    let equal = |lane: usize| {
                        lanes_of(cx.active)
                            .filter(|&other| values[other] == values[lane])
                            .map(|n| 1 << n)
                            .sum()
                    };
                    let result = std::array::from_fn(equal);
                    cx.write::<u32>(target, &result, 0);
                    Ok(())
                });
                (execute, members)
            }
            ("redux", &["sync", operation, ty], [target, a, members]) => {
                let (target, a) = (d.target::<u32>(target)?, d.source::<u32>(a)?);
                let fold: fn(u32, u32) -> u32 = match (operation, ty) {
                    ("add", "u32" | "s32") => u32::wrapping_add,
                    ("min", "u32") => |a, b| a.min(b),
                    ("max", "u32") => |a, b| a.max(b),
                    ("min", "s32") => |a, b| (a as i32).min(b as i32) as u32,
                    ("max", "s32") => |a, b| (a as i32).max(b as i32) as u32,
                    ("and", "b32") => |a, b| a & b,
                    ("or", "b32") => |a, b| a | b,
                    ("xor", "b32") => |a, b| a ^ b,
                    _ => return unknown(instruction),
                };
                let execute: Execute = Box::new(move |cx| {
                    let values = cx.value(a)?;
                    let result = lanes_of(cx.active).map(|lane| values[lane]).reduce(fold).unwrap_or(0);
                    cx.write(target, &[result; LANES], 0);
                    Ok(())
                });
                (execute, members)
            }
            ("elect", &["sync"], [Operand::Pair(leader, is_leader), members]) => {
                let leader = match &**leader {
                    Operand::Sink => None,
                    leader => Some(d.target::<u32>(leader)?),
                };
                let is_leader = d.predicate_target(is_leader)?;
                let execute: Execute = Box::new(move |cx| {
                    // The same lane for the same mask; PTX does not say which one.
                    let seed = SETTINGS.as_ref().map_or(0, |settings| settings.seed as usize);
                    let nth = seed % cx.active.count_ones() as usize;
                    let elected = lanes_of(cx.active).nth(nth).unwrap_or(0);
                    cx.write_predicate(is_leader, 1 << elected, 0);
                    if let Some(leader) = leader {
                        cx.write(leader, &[elected as u32; LANES], 0);
                    }
                    Ok(())
                });
                (execute, members)
            }
            _ => return unknown(instruction),
        };
    Ok(Action::Together(d.source(members)?, execute))
}

/// `shfl.sync`: each lane reads another lane's value, or its own if the source is out of range. A value from
/// an inactive lane is unset.
fn shuffle(
    d: &Decoder<'_>,
    instruction: &Instruction,
    mode: &str,
    target: &Operand,
    [a, b, c]: [&Operand; 3],
) -> Decoded<Execute> {
    let (target, in_range) = match target {
        Operand::Pair(target, in_range) => (&**target, Some(d.predicate_target(in_range)?)),
        target => (target, None),
    };
    let (target, a) = (d.target::<u32>(target)?, d.source::<u32>(a)?);
    let (b, c) = d.pair::<u32, u32>(b, c)?;
    let from: From = match mode {
        "up" => |lane, b, _, most| (lane.wrapping_sub(b), lane as i32 - b as i32 >= most as i32),
        "down" => |lane, b, _, most| (lane + b, lane + b <= most),
        "bfly" => |lane, b, _, most| (lane ^ b, lane ^ b <= most),
        // Only the bits of the lane index outside of the segment count.
        "idx" => |_, b, least, most| (least | b, least | b <= most),
        _ => return unknown(instruction),
    };
    let is_index = mode == "idx";
    let sources = move |b: &Lanes<u32>, c: &Lanes<u32>| sources(from, is_index, b, c);
    // Usually constant, so computed when the kernel is loaded.
    let fixed = match (b, c) {
        (Source::Constant(b), Source::Constant(c)) => Some(sources(&[b; LANES], &[c; LANES])),
        _ => None,
    };
    Ok(Box::new(move |cx| {
        let (sources, ranges) = match fixed {
            Some(fixed) => fixed,
            None => sources(&cx.value(b)?, &cx.value(c)?),
        };
        let values = cx.read(a);
        let result = sources.map(|source| values[usize::from(source)]);
        if cx.active == u32::MAX && !cx.is_marked(a) {
            cx.write(target, &result, 0);
        } else {
            let (marks, mut shuffled) = (cx.marks(a), Marks::NONE);
            for lane in lanes_of(cx.active) {
                let source = usize::from(sources[lane]);
                if cx.active >> source & 1 != 0 {
                    shuffled.unwritten[lane] = marks.unwritten[source];
                    shuffled.from_memory |= (marks.from_memory >> source & 1) << lane;
                    shuffled.strict |= (marks.strict >> source & 1) << lane;
                } else {
                    shuffled.unwritten[lane] = 0xF;
                }
            }
            cx.write_marked(target, &result, &shuffled);
        }
        if let Some(in_range) = in_range {
            cx.write_predicate(in_range, ranges, 0);
        }
        Ok(())
    }))
}

/// Maps (lane, b, first, last lane of the segment) to the source lane and the in-range predicate.
type From = fn(u32, u32, u32, u32) -> (u32, bool);

/// The source lane of each lane (itself if the source is out of range), and a mask of the lanes whose source
/// is in range.
fn sources(from: From, is_index: bool, b: &Lanes<u32>, c: &Lanes<u32>) -> (Lanes<u8>, u32) {
    let (mut sources, mut ranges) = ([0; LANES], 0);
    for lane in 0..LANES {
        let (number, segment, clamp) = (lane as u32, c[lane] >> 8 & 31, c[lane] & 31);
        let (least, most) = (number & segment, number & segment | clamp & !segment);
        let by = if is_index { b[lane] & 31 & !segment } else { b[lane] & 31 };
        let (source, is_in_range) = from(number, by, least, most);
        sources[lane] = if is_in_range { source as u8 % LANES as u8 } else { lane as u8 };
        ranges |= u32::from(is_in_range) << lane;
    }
    (sources, ranges)
}
