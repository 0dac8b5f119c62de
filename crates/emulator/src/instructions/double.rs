//! f64 arithmetic (PTX ISA, section 9.7.3).

use super::{Decoded, Decoder, lanes, unknown};
use crate::kernel::context::{map1, map2, map3};
use crate::ptx::Instruction;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let name = instruction.parts()[0];
    let [target, a, rest @ ..] = &instruction.operands[..] else { return unknown(instruction) };
    let (target, a) = (d.target::<f64>(target)?, d.source::<f64>(a)?);
    let rest = rest.iter().map(|operand| d.source::<f64>(operand)).collect::<Decoded<Vec<_>>>()?;
    lanes(match (name, &parts[..parts.len() - 1], &rest[..]) {
        ("add", [] | ["rn"], &[b]) => map2(target, (a, b), |a: f64, b: f64| a + b),
        ("sub", [] | ["rn"], &[b]) => map2(target, (a, b), |a: f64, b: f64| a - b),
        ("mul", [] | ["rn"], &[b]) => map2(target, (a, b), |a: f64, b: f64| a * b),
        ("div", ["rn"], &[b]) => map2(target, (a, b), |a: f64, b: f64| a / b),
        ("min", [], &[b]) => map2(target, (a, b), |a: f64, b: f64| minimum(a, b)),
        ("max", [], &[b]) => map2(target, (a, b), |a: f64, b: f64| -minimum(-a, -b)),
        ("fma", ["rn"], &[b, c]) => map3(target, (a, b, c), |a: f64, b: f64, c: f64| a.mul_add(b, c)),
        ("neg", [], []) => map1(target, a, |a: f64| -a),
        ("abs", [], []) => map1(target, a, |a: f64| a.abs()),
        ("rcp", ["rn"], []) => map1(target, a, |a: f64| 1.0 / a),
        ("sqrt", ["rn"], []) => map1(target, a, |a: f64| a.sqrt()),
        _ => return unknown(instruction),
    })
}

/// The minimum; if one operand is NaN, the other. -0 is smaller than +0.
#[inline(always)]
fn minimum(a: f64, b: f64) -> f64 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    let one = if b.is_nan() { a } else { smaller };
    if a.is_nan() { b } else { one }
}
