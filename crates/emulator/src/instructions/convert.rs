//! Conversions between number formats (PTX ISA, section 9.7.9.21).

use super::{AnySource, Decoded, Decoder, bits_of_bytes, bytes_of_bits, lanes, unknown};
use crate::kernel::Execute;
use crate::kernel::context::{map1, map2};
use crate::numbers::{E4M3, E5M2, Rounding, canonical, flush, from_f16, narrow, to_bf16, to_f16};
use crate::ptx::{Instruction, Operand};
use crate::registers::Marks;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let operands = &instruction.operands[..];
    lanes(match (parts, operands) {
        (&["rn", "bf16x2", "f32"], [target, high, low]) => {
            let pair = |high: f32, low: f32| u32::from(to_bf16(high)) << 16 | u32::from(to_bf16(low));
            map2(d.target::<u32>(target)?, d.pair(high, low)?, pair)
        }
        (&["rn", "bf16", "f32"], [target, a]) => {
            map1(d.target::<u16>(target)?, d.source(a)?, |a: f32| to_bf16(a))
        }
        (&["rn", "satfinite", "e4m3x2", "f32"], [target, high, low]) => {
            let pair = |high: f32, low: f32| u16::from(E4M3.encode(high)) << 8 | u16::from(E4M3.encode(low));
            map2(d.target::<u16>(target)?, d.pair(high, low)?, pair)
        }
        (&["rn", "satfinite", "e5m2x2", "f32"], [target, high, low]) => {
            let pair = |high: f32, low: f32| u16::from(E5M2.encode(high)) << 8 | u16::from(E5M2.encode(low));
            map2(d.target::<u16>(target)?, d.pair(high, low)?, pair)
        }
        (&["rn", "f16x2", format @ ("e4m3x2" | "e5m2x2")], [target, a]) => {
            let format = if format == "e4m3x2" { E4M3 } else { E5M2 };
            // Exact: binary16 holds all numbers of both formats.
            let half = move |bits: u16| match format.decode(bits as u8) {
                x if x.is_nan() => 0x7FFF,
                x => u32::from(to_f16(x)),
            };
            let pair = move |a: u16| half(a >> 8) << 16 | half(a);
            map1(d.target::<u32>(target)?, d.source(a)?, pair)
        }
        (&["f32", "f16"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: u16| canonical(from_f16(a)))
        }
        (&["rn", "f16", "f32"], [target, a]) => {
            map1(d.target::<u16>(target)?, d.source(a)?, |a: f32| to_f16(a))
        }
        (&["f64", "f32"], [target, a]) => map1(d.target::<f64>(target)?, d.source(a)?, |a: f32| f64::from(a)),
        (&[rounding @ ("rn" | "rz" | "rm" | "rp"), "f32", "f64"], [target, a]) => {
            let rounding = match rounding {
                "rn" => Rounding::Nearest,
                "rz" => Rounding::Zero,
                "rm" => Rounding::Down,
                _ => Rounding::Up,
            };
            map1(d.target::<f32>(target)?, d.source(a)?, move |a: f64| narrow(a, rounding))
        }
        // `.sat` turns NaN into zero.
        (&["sat", "f32", "f32"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: f32| if a > 0.0 { a.min(1.0) } else { 0.0 })
        }
        (&["ftz", "f32", "f32"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a| canonical(flush(a)))
        }
        (&[rounding @ ("rni" | "rzi" | "rmi" | "rpi"), "f32", "f32"], [target, a]) => {
            let (target, a) = (d.target::<f32>(target)?, d.source(a)?);
            match rounding {
                "rni" => map1(target, a, |a: f32| canonical(a.round_ties_even())),
                "rzi" => map1(target, a, |a: f32| canonical(a.trunc())),
                "rmi" => map1(target, a, |a: f32| canonical(a.floor())),
                _ => map1(target, a, |a: f32| canonical(a.ceil())),
            }
        }
        (&["rn", "f32", "s32"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: i32| a as f32)
        }
        (&["rn", "f32", "u32"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: u32| a as f32)
        }
        (&["rn", "f32", "s64"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: i64| a as f32)
        }
        (&["rn", "f32", "u64"], [target, a]) => {
            map1(d.target::<f32>(target)?, d.source(a)?, |a: u64| a as f32)
        }
        (&["rn", "f64", "s32"], [target, a]) => {
            map1(d.target::<f64>(target)?, d.source(a)?, |a: i32| f64::from(a))
        }
        (&["rn", "f64", "u32"], [target, a]) => {
            map1(d.target::<f64>(target)?, d.source(a)?, |a: u32| f64::from(a))
        }
        (&["rn", "f64", "s64"], [target, a]) => {
            map1(d.target::<f64>(target)?, d.source(a)?, |a: i64| a as f64)
        }
        (&["rn", "f64", "u64"], [target, a]) => {
            map1(d.target::<f64>(target)?, d.source(a)?, |a: u64| a as f64)
        }
        // Out of range: the nearest integer in range. A NaN of f32: zero. Rust's conversions do the same.
        (&["rzi", "s32", "f32"], [target, a]) => {
            map1(d.target::<i32>(target)?, d.source(a)?, |a: f32| a as i32)
        }
        (&["rzi", "u32", "f32"], [target, a]) => {
            map1(d.target::<u32>(target)?, d.source(a)?, |a: f32| a as u32)
        }
        (&["rni", "s32", "f32"], [target, a]) => {
            map1(d.target::<i32>(target)?, d.source(a)?, |a: f32| a.round_ties_even() as i32)
        }
        // A NaN of f64: the least integer.
        (&["rzi", "s32", "f64"], [target, a]) => {
            let whole = |a: f64| if a.is_nan() { i32::MIN } else { a as i32 };
            map1(d.target::<i32>(target)?, d.source(a)?, whole)
        }
        (&["rni", "s32", "f64"], [target, a]) => {
            let whole = |a: f64| if a.is_nan() { i32::MIN } else { a.round_ties_even() as i32 };
            map1(d.target::<i32>(target)?, d.source(a)?, whole)
        }
        (&[to, from], [target, a]) => match (width(to), width(from)) {
            (Some((bits, _)), Some((from_bits, is_signed))) => {
                integers(d, target, a, bits, from_bits, is_signed)?
            }
            _ => return unknown(instruction),
        },
        _ => return unknown(instruction),
    })
}

/// The bits of an integer type, and true if it is signed.
fn width(ty: &str) -> Option<(u32, bool)> {
    Some(match ty {
        "u8" => (8, false),
        "s8" => (8, true),
        "u16" => (16, false),
        "s16" => (16, true),
        "u32" => (32, false),
        "s32" => (32, true),
        "u64" => (64, false),
        "s64" => (64, true),
        _ => return None,
    })
}

/// Extends or truncates an integer, with its marks.
fn integers(
    d: &Decoder<'_>,
    target: &Operand,
    source: &Operand,
    bits: u32,
    from_bits: u32,
    is_signed: bool,
) -> Decoded<Execute> {
    let (target, source): (_, AnySource) = (d.any_target(target)?, d.any(source)?);
    // A value narrower than its register is extended by its type, so only the source's sign matters for
    // widening.
    let convert = move |value: u64| {
        let shift = 64 - from_bits;
        let wide =
            if is_signed { ((value << shift) as i64 >> shift) as u64 } else { value << shift >> shift };
        if bits < from_bits { wide & (u64::MAX >> (64 - bits)) } else { wide }
    };
    Ok(Box::new(move |cx| {
        let mut values = source.read(cx);
        for value in &mut values {
            *value = convert(*value);
        }
        if source.is_marked(cx) {
            let marks = source.marks(cx);
            let unwritten = marks.unwritten.map(|bytes| bytes_of_bits(convert(bits_of_bytes(bytes))));
            target.write_marked(cx, &values, &Marks { unwritten, ..marks });
        } else {
            target.write(cx, &values, 0);
        }
        Ok(())
    }))
}
