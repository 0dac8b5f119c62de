//! Floating-point arithmetic (section 9.7.3). Approximate instructions give the exact result, rounded to
//! nearest.

use super::form::{Form, Row, form};
use super::types::{AnyNan, Nearest, ReciprocalRoot, Root, flushed, to_f64};
use rustc_apfloat::ieee::{Double, IeeeFloat, Semantics, Single};
use rustc_apfloat::{Float, Round};

pub(super) fn forms() -> Vec<Form> {
    let one = || Single::from_u128(1).value;
    let mut forms = vec![
        form("neg.f32", |a: Single| AnyNan(-a)).any_nan(),
        form("abs.f32", |a: Single| AnyNan(a.abs())).any_nan(),
        form("min.f32", |a: Single, b: Single| least(a, b)),
        form("max.f32", |a: Single, b: Single| -least(-a, -b)),
        form("rcp.rn.f32", move |a: Single| (one() / a).value),
        form("rcp.approx.f32", move |a: Single| (one() / a).value).within(1),
        form("rcp.approx.ftz.f32", move |a: Single| flushed((one() / flushed(a)).value)).within(1),
        form("div.rn.f32", |a: Single, b: Single| (a / b).value),
        // For divisors above 2^126 the ISA defines a zero, and NaN for an infinite dividend.
        form("div.approx.f32", |a: Single, b: Single| (a / reachable(b)).value).within(2),
        form("div.full.f32", |a: Single, b: Single| (a / b).value).within(2),
        form("sqrt.rn.f32", |a: Single| Root(a)),
        form("sqrt.approx.f32", |a: Single| Root(a)).within(1),
        form("rsqrt.approx.f32", |a: Single| ReciprocalRoot(a)).within(2),
        form("ex2.approx.f32", |a: Single| Nearest { exact: power_of_two(to_f64(a)), flushes: false })
            .at(exponents())
            .within(2),
        form("ex2.approx.ftz.f32", |a: Single| Nearest {
            exact: power_of_two(to_f64(flushed(a))),
            flushes: true,
        })
        .at(exponents())
        .within(2),
        form("lg2.approx.f32", |a: Single| Nearest { exact: logarithm(to_f64(a)), flushes: false })
            .within(2)
            // Between 0.5 and 2 the ISA bounds the absolute error.
            .at_most(2f64.powi(-22)),
        form("neg.f64", |a: Double| -a),
        form("abs.f64", |a: Double| a.abs()),
        form("min.f64", |a: Double, b: Double| least(a, b)),
        form("max.f64", |a: Double, b: Double| -least(-a, -b)),
        form("div.rn.f64", |a: Double, b: Double| (a / b).value),
        form("rcp.rn.f64", |a: Double| (Double::from_u128(1).value / a).value),
        form("sqrt.rn.f64", |a: Double| Root(a)),
    ];
    for opcode in ["add.f32", "add.rn.f32"] {
        forms.push(form(opcode, |a: Single, b: Single| (a + b).value).at(cancelling(false, 32)));
    }
    for opcode in ["sub.f32", "sub.rn.f32"] {
        forms.push(form(opcode, |a: Single, b: Single| (a - b).value).at(cancelling(false, 32)));
    }
    for opcode in ["mul.f32", "mul.rn.f32"] {
        forms.push(form(opcode, |a: Single, b: Single| (a * b).value));
    }
    for opcode in ["add.f64", "add.rn.f64"] {
        forms.push(form(opcode, |a: Double, b: Double| (a + b).value).at(cancelling(false, 64)));
    }
    for opcode in ["sub.f64", "sub.rn.f64"] {
        forms.push(form(opcode, |a: Double, b: Double| (a - b).value).at(cancelling(false, 64)));
    }
    for opcode in ["mul.f64", "mul.rn.f64"] {
        forms.push(form(opcode, |a: Double, b: Double| (a * b).value));
    }
    for (opcode, round) in [
        ("fma.rn.f32", Round::NearestTiesToEven),
        ("fma.rm.f32", Round::TowardNegative),
        ("fma.rp.f32", Round::TowardPositive),
        ("fma.rz.f32", Round::TowardZero),
    ] {
        let fused = move |a: Single, b: Single, c: Single| a.mul_add_r(b, c, round).value;
        forms.push(form(opcode, fused).at(cancelling(true, 32)));
    }
    let fused = |a: Double, b: Double, c: Double| a.mul_add(b, c).value;
    forms.push(form("fma.rn.f64", fused).at(cancelling(true, 64)));
    // ptxas replaces products with 1.
    let is_open = |form: &Form| form.opcode.ends_with("f64") || form.opcode == "mul.f32";
    forms.into_iter().map(|form| if is_open(&form) { form.any_nan() } else { form }).collect()
}

/// The divisor of `div.approx`: above 2^126 its reciprocal is zero.
fn reachable(b: Single) -> Single {
    if to_f64(b).abs() > 2f64.powi(126) { Single::INFINITY.copy_sign(b) } else { b }
}

/// The minimum; if one operand is NaN, the other. -0 is smaller than +0.
fn least<S: Semantics>(a: IeeeFloat<S>, b: IeeeFloat<S>) -> IeeeFloat<S> {
    match (a.is_nan(), b.is_nan()) {
        (true, _) => b,
        (_, true) => a,
        _ if a.is_zero() && b.is_zero() => {
            if a.is_negative() {
                a
            } else {
                b
            }
        }
        _ => {
            if a < b {
                a
            } else {
                b
            }
        }
    }
}

/// Rows whose sum, or product and sum, is much smaller than its operands, on either side of a tie, or exactly
/// zero.
fn cancelling(is_fused: bool, bits: u32) -> Vec<Row> {
    let mut random = super::random("cancelling");
    // f64 differs in the length of the exponent only: the same rows of bits, shifted.
    let (mantissa, exponent) = if bits == 32 { (23, 8) } else { (52, 11) };
    let bias = (1u64 << (exponent - 1)) - 1;
    let sign = 1u64 << (bits - 1);
    let product = |a: u64, b: u64| match bits {
        32 => (f32::from_bits(a as u32) * f32::from_bits(b as u32)).to_bits().into(),
        _ => (f64::from_bits(a) * f64::from_bits(b)).to_bits(),
    };
    let mut rows = Vec::new();
    for _ in 0..8192 {
        let mut number = |spread: usize| {
            let exponent = bias - spread as u64 / 2 + random.below(spread) as u64;
            let digits = random.draw() >> (64 - mantissa);
            // Few digits make exact products and ties likely.
            let digits =
                if random.below(2) == 0 { digits >> (mantissa / 2) << (mantissa / 2) } else { digits };
            exponent << mantissa | digits | if random.below(2) == 0 { sign } else { 0 }
        };
        let (a, b) = (number(40), number(8));
        let near = if is_fused { product(a, b) } else { a };
        let away = [0, 0, 1, 2, u64::MAX, u64::MAX - 1, 1 << (mantissa - 1), 1 << mantissa];
        let opposite = (near ^ sign).wrapping_add(away[random.below(away.len())]) & (u64::MAX >> (64 - bits));
        rows.push(if is_fused { [a, b, opposite, 0] } else { [a, opposite, 0, 0] });
        if is_fused {
            // An addend far below the product decides a tie or the direction of rounding.
            let far = (near >> mantissa & ((1 << exponent) - 1)).saturating_sub(20 + random.below(60) as u64);
            let addend = far << mantissa | if random.below(2) == 0 { sign } else { 0 };
            rows.push([a, b, addend, 0]);
        }
    }
    rows
}

/// Exponents over the whole range of f32.
fn exponents() -> Vec<Row> {
    let mut random = super::random("exponents");
    let number = |_| (random.draw() as u32 as f32 / (1u64 << 32) as f32 - 0.5) * 310.0;
    (0..1 << 16).map(number).map(|x: f32| [x.to_bits().into(), 0, 0, 0]).collect()
}

/// 2 to the power of x, from the series of exp(x ln 2) without the whole part of x.
fn power_of_two(x: f64) -> f64 {
    if x.is_nan() {
        return f64::NAN;
    }
    if x.abs() > 1000.0 {
        return if x > 0.0 { f64::INFINITY } else { 0.0 };
    }
    let whole = x.round();
    let y = (x - whole) * std::f64::consts::LN_2;
    let series = (1..30).rev().fold(1.0, |sum, n| 1.0 + sum * y / f64::from(n));
    // Exact: both factors are f64 numbers, and so is the product.
    let scale = |n: f64| f64::from_bits(((1023 + n as i64) as u64) << 52);
    series * scale(whole)
}

/// The logarithm to the base 2: the series of the inverse hyperbolic tangent.
fn logarithm(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 || x.is_infinite() {
        return if x == 0.0 { f64::NEG_INFINITY } else { x };
    }
    // x = m 2^n with m around 1, so that neither part cancels the other.
    let bits = x.to_bits();
    let (mut n, mut m) = ((bits >> 52) as i64 - 1023, f64::from_bits(bits & (u64::MAX >> 12) | 1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        (n, m) = (n + 1, m / 2.0);
    }
    let y = (m - 1.0) / (m + 1.0);
    let series = (0..40).rev().fold(0.0, |sum, k| sum * y * y + 1.0 / f64::from(2 * k + 1));
    n as f64 + 2.0 * y * series * std::f64::consts::LOG2_E
}
