//! Atomic operations (PTX ISA, sections 9.7.13.5 and 9.7.13.6), executed one lane after the other.

use super::memory::{Access, Address, located};
use super::{AnySource, Decoded, Decoder, lanes, unknown};
use crate::fault::Outcome;
use crate::numbers::{canonical, flush};
use crate::ptx::{Instruction, Space};
use crate::races::{AccessKind, Scope};
use crate::registers::{LANES, lanes_of, uninitialised};

/// Computes the new value from the old value and the operand.
type Update = fn(u64, u64) -> u64;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let (&ty, parts) = parts.split_last().ok_or("no type")?;
    // The operation is one of the modifiers; the others are order, scope, space and vector length.
    let is_operation =
        |part: &&&str| ["add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas"].contains(*part);
    let operation = *parts.iter().find(is_operation).ok_or("no operation")?;
    let mut modifiers: Vec<&str> = parts.iter().copied().filter(|part| *part != operation).collect();
    modifiers.push(ty);
    let access = Access::decode(instruction, &modifiers)?;
    let update: Update = match (operation, ty) {
        ("add", "u32" | "s32") => |old, x| u64::from((old as u32).wrapping_add(x as u32)),
        ("add", "u64" | "s64") => |old, x| old.wrapping_add(x),
        ("add", "f32") => {
            |old, x| canonical(f32::from_bits(old as u32) + f32::from_bits(x as u32)).to_bits().into()
        }
        ("add", "f64") => |old, x| (f64::from_bits(old) + f64::from_bits(x)).to_bits(),
        ("min", "u32" | "u64") => |old, x| old.min(x),
        ("max", "u32" | "u64") => |old, x| old.max(x),
        ("min", "s32") => |old, x| (old as i32).min(x as i32) as u32 as u64,
        ("max", "s32") => |old, x| (old as i32).max(x as i32) as u32 as u64,
        ("inc", "u32") => |old, limit| if old >= limit { 0 } else { old + 1 },
        ("dec", "u32") => |old, limit| if old == 0 || old > limit { limit } else { old - 1 },
        ("and", "b32" | "b64") => |old, x| old & x,
        ("or", "b32" | "b64") => |old, x| old | x,
        ("xor", "b32" | "b64") => |old, x| old ^ x,
        ("exch" | "cas", "b32" | "b64") => |_, x| x,
        _ => return unknown(instruction),
    };
    // Sums of f32 flush subnormal numbers in global memory but not in shared memory (PTX ISA, `atom`).
    let update_global: Update = match (operation, ty) {
        ("add", "f32") => |old, x| {
            let [old, x] = [old, x].map(|bits| flush(f32::from_bits(bits as u32)));
            flush(canonical(old + x)).to_bits().into()
        },
        _ => update,
    };
    let (target, operands) = match (instruction.parts()[0], &instruction.operands[..]) {
        ("atom", [target, operands @ ..]) => (Some(d.any_target(target)?), operands),
        (_, operands) => (None, operands),
    };
    let (address, first, second) = match (operation, operands) {
        ("cas", [address, expected, new]) => (address, new, Some(d.any(expected)?)),
        (_, [address, value]) if operation != "cas" => (address, value, None),
        _ => return unknown(instruction),
    };
    let address = Address::decode(d, address)?;
    let mut kind = access.kind.with(AccessKind::UPDATE);
    kind.scope.get_or_insert(Scope::Gpu);
    let values = d.elements(first).iter().map(|value| d.any(value)).collect::<Decoded<Vec<AnySource>>>()?;
    if values.len() != access.count || (target.is_some() && access.count > 1) {
        return unknown(instruction);
    }
    lanes(Box::new(move |cx| {
        let addresses = address.read(cx)?;
        let values = values.iter().map(|value| value.value(cx)).collect::<Outcome<Vec<_>>>()?;
        let expected = second.map(|second| second.value(cx)).transpose()?;
        let (mut results, mut changed) = ([0; LANES], false);
        // Immediate operands are 64 bits wide.
        let mask = u64::MAX >> (64 - 8 * access.bytes);
        for lane in lanes_of(cx.active) {
            let bytes = (access.bytes * access.count) as u64;
            cx.check_unused(lane, access.space, addresses[lane], bytes)?;
            if cx.races.is_some() {
                cx.note_lane(lane, access.space, addresses[lane], bytes, kind)?;
            }
            let place = cx.reach(lane, access.space, addresses[lane], bytes, "updates")?;
            let is_global = located(access.space, addresses[lane]).0 == Space::Global;
            let update = if is_global { update_global } else { update };
            for (n, value) in values.iter().enumerate() {
                let at = n * access.bytes;
                let (old, marks) = match access.bytes {
                    4 => (
                        u32::from_le_bytes(place.read(at)).into(),
                        u64::from(u32::from_le_bytes(place.marks(at))) | !0 << 32,
                    ),
                    _ => (u64::from_le_bytes(place.read(at)), u64::from_le_bytes(place.marks(at))),
                };
                if marks | !0x0101_0101_0101_0101 != u64::MAX {
                    uninitialised(1 << lane)?;
                }
                // A failed comparison changes nothing.
                let is_due = expected.is_none_or(|expected| expected[lane] & mask == old);
                let new = if is_due { update(old, value[lane] & mask) & mask } else { old };
                changed |= new != old;
                match access.bytes {
                    4 => place.write(at, (new as u32).to_le_bytes()),
                    _ => place.write(at, new.to_le_bytes()),
                }
                results[lane] = old;
            }
        }
        cx.changed |= changed;
        if let Some(target) = target {
            target.write(cx, &results, 0);
        }
        Ok(())
    }))
}
