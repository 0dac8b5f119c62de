//! Integer arithmetic (PTX ISA, section 9.7.1).

use super::{Action, Decoded, Decoder, lanes, unknown};
use crate::kernel::Execute;
use crate::kernel::context::{map1, map2, map3};
use crate::ptx::{Instruction, Operand};
use crate::registers::{LANES, Lane, lanes_of};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let name = instruction.parts()[0];
    let operands = &instruction.operands[..];
    macro_rules! by_type {
        ($ty:expr, $body:ident) => {
            match $ty {
                "u16" | "b16" => $body!(u16),
                "s16" => $body!(i16),
                "u32" | "b32" => $body!(u32),
                "s32" => $body!(i32),
                "u64" | "b64" => $body!(u64),
                "s64" => $body!(i64),
                _ => return unknown(instruction),
            }
        };
    }
    let [target, a, rest @ ..] = operands else { return unknown(instruction) };
    match (name, parts, rest) {
        ("add" | "sub" | "min" | "max", &["s16x2" | "u16x2"], _) => halves(d, instruction, parts[0]),
        ("add" | "sub" | "min" | "max", &[ty], [b]) => {
            macro_rules! body {
                ($t:ty) => {{
                    let (target, ab) = (d.target::<$t>(target)?, d.pair::<$t, $t>(a, b)?);
                    // One closure per operation, so that each loop is vectorised.
                    lanes(match name {
                        "add" => map2(target, ab, |a: $t, b: $t| a.wrapping_add(b)),
                        "sub" => map2(target, ab, |a: $t, b: $t| a.wrapping_sub(b)),
                        "min" => map2(target, ab, |a: $t, b: $t| a.min(b)),
                        _ => map2(target, ab, |a: $t, b: $t| a.max(b)),
                    })
                }};
            }
            by_type!(ty, body)
        }
        ("mul", &["lo", ty], [b]) => {
            macro_rules! body {
                ($t:ty) => {
                    lanes(map2(d.target::<$t>(target)?, d.pair(a, b)?, |a: $t, b: $t| a.wrapping_mul(b)))
                };
            }
            by_type!(ty, body)
        }
        ("mad", &["lo", ty], [b, c]) => {
            macro_rules! body {
                ($t:ty) => {{
                    let abc = (d.source(a)?, d.source(b)?, d.source(c)?);
                    lanes(map3(d.target::<$t>(target)?, abc, |a: $t, b: $t, c: $t| {
                        a.wrapping_mul(b).wrapping_add(c)
                    }))
                }};
            }
            by_type!(ty, body)
        }
        ("mul", &["hi", "u32"], [b]) => {
            let high = |a: u32, b: u32| ((u64::from(a) * u64::from(b)) >> 32) as u32;
            lanes(map2(d.target::<u32>(target)?, d.pair(a, b)?, high))
        }
        ("mul", &["hi", "s32"], [b]) => {
            let high = |a: i32, b: i32| ((i64::from(a) * i64::from(b)) >> 32) as i32;
            lanes(map2(d.target::<i32>(target)?, d.pair(a, b)?, high))
        }
        ("mul", &["hi", "u64"], [b]) => {
            let high = |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64;
            lanes(map2(d.target::<u64>(target)?, d.pair(a, b)?, high))
        }
        ("mul", &["wide", "u16"], [b]) => {
            lanes(map2(d.target::<u32>(target)?, d.pair(a, b)?, |a: u16, b: u16| u32::from(a) * u32::from(b)))
        }
        ("mul", &["wide", "u32"], [b]) => {
            lanes(map2(d.target::<u64>(target)?, d.pair(a, b)?, |a: u32, b: u32| u64::from(a) * u64::from(b)))
        }
        ("mul", &["wide", "s32"], [b]) => {
            lanes(map2(d.target::<i64>(target)?, d.pair(a, b)?, |a: i32, b: i32| i64::from(a) * i64::from(b)))
        }
        ("div" | "rem", &[ty], [b]) => {
            let is_division = name == "div";
            macro_rules! body {
                ($t:ty) => {
                    lanes(divide::<$t>(d, target, a, b, move |a: $t, b: $t| {
                        if is_division { a.wrapping_div(b) } else { a.wrapping_rem(b) }
                    })?)
                };
            }
            by_type!(ty, body)
        }
        ("neg", &["s32"], []) => {
            lanes(map1(d.target::<i32>(target)?, d.source(a)?, |a: i32| a.wrapping_neg()))
        }
        ("neg", &["s64"], []) => {
            lanes(map1(d.target::<i64>(target)?, d.source(a)?, |a: i64| a.wrapping_neg()))
        }
        ("abs", &["s32"], []) => {
            lanes(map1(d.target::<i32>(target)?, d.source(a)?, |a: i32| a.wrapping_abs()))
        }
        ("popc", &["b32"], []) => {
            lanes(map1(d.target::<u32>(target)?, d.source(a)?, |a: u32| a.count_ones()))
        }
        ("brev", &["b32"], []) => {
            lanes(map1(d.target::<u32>(target)?, d.source(a)?, |a: u32| a.reverse_bits()))
        }
        ("clz", &["b32"], []) => {
            lanes(map1(d.target::<u32>(target)?, d.source(a)?, |a: u32| a.leading_zeros()))
        }
        // Shift that moves the highest set bit to the left end; all ones for zero.
        ("bfind", &["shiftamt", "u32"], []) => {
            let shift = |a: u32| if a == 0 { u32::MAX } else { a.leading_zeros() };
            lanes(map1(d.target::<u32>(target)?, d.source(a)?, shift))
        }
        _ => unknown(instruction),
    }
}

/// Division. A quotient by zero is undefined in the ISA, and unset here.
fn divide<T: Lane>(
    d: &Decoder<'_>,
    target: &Operand,
    a: &Operand,
    b: &Operand,
    f: impl Fn(T, T) -> T + Send + Sync + 'static,
) -> Decoded<Execute> {
    let (target, a, b) = (d.target::<T>(target)?, d.source::<T>(a)?, d.source::<T>(b)?);
    Ok(Box::new(move |cx| {
        let mut unset = cx.unset_of(a)? | cx.unset_of(b)?;
        let (x, y, mut result) = (cx.read(a), cx.read(b), [T::default(); LANES]);
        for lane in lanes_of(cx.active) {
            if y[lane] == T::default() {
                unset |= 1 << lane;
            } else {
                result[lane] = f(x[lane], y[lane]);
            }
        }
        cx.write(target, &result, unset);
        Ok(())
    }))
}

/// Operations on the two 16-bit numbers of each operand.
fn halves(d: &Decoder<'_>, instruction: &Instruction, ty: &str) -> Decoded<Action> {
    let [target, a, b] = &instruction.operands[..] else { return unknown(instruction) };
    let (target, ab) = (d.target::<u32>(target)?, d.pair::<u32, u32>(a, b)?);
    let each = |f: fn(i16, i16) -> i16| {
        move |a: u32, b: u32| {
            let half = |shift: u32| u32::from(f((a >> shift) as i16, (b >> shift) as i16) as u16) << shift;
            half(0) | half(16)
        }
    };
    match (instruction.parts()[0], ty) {
        ("max", "s16x2") => lanes(map2(target, ab, each(|a, b| a.max(b)))),
        ("min", "s16x2") => lanes(map2(target, ab, each(|a, b| a.min(b)))),
        _ => unknown(instruction),
    }
}
