//! f32 arithmetic (PTX ISA, section 9.7.3). NaN results are the canonical NaN.

use super::{Decoded, Decoder, lanes, unknown};
use crate::kernel::context::{Source, map1, map2, map3};
use crate::numbers::{Rounding, canonical, flush, fma};
use crate::ptx::Instruction;

/// `f` in f64, rounded to f32.
#[inline(always)]
fn by_double(x: f32, f: impl Fn(f64) -> f64) -> f32 {
    canonical(f(x.into()) as f32)
}

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let name = instruction.parts()[0];
    // Modifiers between the name and the type.
    let modifiers = &parts[..parts.len() - 1];
    let [target, operands @ ..] = &instruction.operands[..] else { return unknown(instruction) };
    let target = d.target::<f32>(target)?;
    let sources =
        operands.iter().map(|operand| d.source::<f32>(operand)).collect::<Decoded<Vec<Source<f32>>>>()?;
    let flushes = modifiers.contains(&"ftz");
    let kind: Vec<&str> = modifiers.iter().copied().filter(|part| *part != "ftz").collect();
    macro_rules! one {
        ($f:expr) => {
            if flushes {
                map1(target, sources[0], |a: f32| flush($f(flush(a))))
            } else {
                map1(target, sources[0], $f)
            }
        };
    }
    macro_rules! two {
        ($f:expr) => {
            if flushes {
                map2(target, (sources[0], sources[1]), |a: f32, b: f32| flush($f(flush(a), flush(b))))
            } else {
                map2(target, (sources[0], sources[1]), $f)
            }
        };
    }
    lanes(match (name, &kind[..], sources.len()) {
        ("add", [] | ["rn"], 2) => two!(|a: f32, b: f32| canonical(a + b)),
        ("sub", [] | ["rn"], 2) => two!(|a: f32, b: f32| canonical(a - b)),
        ("mul", [] | ["rn"], 2) => two!(|a: f32, b: f32| canonical(a * b)),
        ("div", ["rn"] | ["full"], 2) => two!(|a: f32, b: f32| canonical(a / b)),
        ("div", ["approx"], 2) => two!(|a: f32, b: f32| canonical(a / divisor(b))),
        ("min", [], 2) => two!(|a: f32, b: f32| minimum(a, b)),
        ("max", [], 2) => two!(|a: f32, b: f32| canonical(-minimum(-a, -b))),
        ("fma", [rounding], 3) if !flushes => {
            let abc = (sources[0], sources[1], sources[2]);
            match *rounding {
                "rn" => map3(target, abc, |a: f32, b: f32, c: f32| canonical(a.mul_add(b, c))),
                "rm" => map3(target, abc, |a, b, c| canonical(fma(a, b, c, Rounding::Down))),
                "rp" => map3(target, abc, |a, b, c| canonical(fma(a, b, c, Rounding::Up))),
                "rz" => map3(target, abc, |a, b, c| canonical(fma(a, b, c, Rounding::Zero))),
                _ => return unknown(instruction),
            }
        }
        ("neg", [], 1) => one!(|a: f32| canonical(-a)),
        ("abs", [], 1) => one!(|a: f32| canonical(a.abs())),
        ("rcp", ["rn"] | ["approx"], 1) => one!(|a: f32| canonical(1.0 / a)),
        ("sqrt", ["rn"] | ["approx"], 1) => one!(|a: f32| canonical(a.sqrt())),
        ("rsqrt", ["approx"], 1) => one!(|a: f32| by_double(a, |a| 1.0 / a.sqrt())),
        ("ex2", ["approx"], 1) => one!(|a: f32| by_double(a, f64::exp2)),
        ("lg2", ["approx"], 1) => one!(|a: f32| by_double(a, f64::log2)),
        ("sin", ["approx"], 1) => one!(|a: f32| by_double(a, f64::sin)),
        ("cos", ["approx"], 1) => one!(|a: f32| by_double(a, f64::cos)),
        ("tanh", ["approx"], 1) => one!(|a: f32| by_double(a, f64::tanh)),
        _ => return unknown(instruction),
    })
}

/// The divisor of `div.approx`, which multiplies by a reciprocal: above 2^126 that is zero.
#[inline(always)]
fn divisor(b: f32) -> f32 {
    if b.abs() > 2f32.powi(126) { f32::INFINITY.copysign(b) } else { b }
}

/// The minimum; if one operand is NaN, the other. -0 is smaller than +0.
#[inline(always)]
fn minimum(a: f32, b: f32) -> f32 {
    let smaller = if a < b || (a == b && a.is_sign_negative()) { a } else { b };
    let one = if b.is_nan() { a } else { smaller };
    canonical(if a.is_nan() { b } else { one })
}
