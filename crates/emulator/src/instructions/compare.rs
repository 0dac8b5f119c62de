//! Comparisons (PTX ISA, section 9.7.6).

use super::{Decoded, Decoder, lanes, unknown};
use crate::kernel::context::test2;
use crate::ptx::Instruction;

#[allow(
    clippy::double_comparisons,
    clippy::neg_cmp_op_on_partial_ord,
    reason = "of integers and of numbers that may be NaN alike"
)]
pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let (&[comparison, ty], [target, a, b]) = (parts, &instruction.operands[..]) else {
        return unknown(instruction);
    };
    let target = d.predicate_target(target)?;
    // Comparisons without `u` are false if an operand is NaN, those with it true.
    macro_rules! compare {
        ($t:ty) => {{
            let ab = d.pair::<$t, $t>(a, b)?;
            lanes(match comparison {
                "eq" => test2(target, ab, |a: $t, b: $t| a == b),
                "ne" => test2(target, ab, |a: $t, b: $t| a < b || a > b),
                "lt" | "lo" => test2(target, ab, |a: $t, b: $t| a < b),
                "le" | "ls" => test2(target, ab, |a: $t, b: $t| a <= b),
                "gt" | "hi" => test2(target, ab, |a: $t, b: $t| a > b),
                "ge" | "hs" => test2(target, ab, |a: $t, b: $t| a >= b),
                "equ" => test2(target, ab, |a: $t, b: $t| !(a < b || a > b)),
                "neu" => test2(target, ab, |a: $t, b: $t| a != b),
                "ltu" => test2(target, ab, |a: $t, b: $t| !(a >= b)),
                "leu" => test2(target, ab, |a: $t, b: $t| !(a > b)),
                "gtu" => test2(target, ab, |a: $t, b: $t| !(a <= b)),
                "geu" => test2(target, ab, |a: $t, b: $t| !(a < b)),
                "num" => test2(target, ab, |a: $t, b: $t| a.partial_cmp(&b).is_some()),
                "nan" => test2(target, ab, |a: $t, b: $t| a.partial_cmp(&b).is_none()),
                _ => return unknown(instruction),
            })
        }};
    }
    match ty {
        "u16" | "b16" => compare!(u16),
        "s16" => compare!(i16),
        "u32" | "b32" => compare!(u32),
        "s32" => compare!(i32),
        "u64" | "b64" => compare!(u64),
        "s64" => compare!(i64),
        "f32" => compare!(f32),
        "f64" => compare!(f64),
        _ => unknown(instruction),
    }
}
