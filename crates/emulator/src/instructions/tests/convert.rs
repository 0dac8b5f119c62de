//! Conversions (section 9.7.9.21).

use super::form::{Form, Row, form};
use super::types::{AnyNan, Halves, flushed};
use rustc_apfloat::ieee::{BFloat, Double, Float8E4M3FN, Float8E5M2, Half, IeeeFloat, Semantics, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

/// Integers of one register in another: the low bits of the source, extended as its type says.
macro_rules! integers {
    ($forms:ident; $($name:literal $from:ident as $source:ident to $target:ident;)*) => {$(
        $forms.push(form($name, |a: $from| a as $source as $target));
    )*};
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        form("cvt.rn.bf16x2.f32", |high: Single, low: Single| {
            packed([high, low].map(nearest_bf16), 16) as u32
        })
        .at(ties_of_16_bits()),
        form("cvt.rn.bf16.f32", |a: Single| nearest_bf16(a) as u16).at(ties_of_16_bits()),
        form("cvt.rn.satfinite.e4m3x2.f32", |high: Single, low: Single| {
            packed([high, low].map(saturated::<Float8E4M3FN>), 8) as u16
        })
        .at(ties_of_8_bits::<Float8E4M3FN>()),
        form("cvt.rn.satfinite.e5m2x2.f32", |high: Single, low: Single| {
            packed([high, low].map(saturated::<Float8E5M2>), 8) as u16
        })
        .at(ties_of_8_bits::<Float8E5M2>()),
        form("cvt.rn.f16x2.e4m3x2", |a: u16| Halves([a, a >> 8].map(half::<Float8E4M3FN>))),
        form("cvt.rn.f16x2.e5m2x2", |a: u16| Halves([a, a >> 8].map(half::<Float8E5M2>))),
        form("cvt.f32.f16", |a: u16| AnyNan(Half::from_bits(a.into()).convert(&mut false).value)),
        form("cvt.f64.f32", |a: Single| -> Double { a.convert(&mut false).value }),
        form("cvt.sat.f32.f32", |a: Single| {
            let one = Single::from_u128(1).value;
            match a.is_nan() || a.is_negative() {
                true => Single::ZERO,
                false => {
                    if a > one {
                        one
                    } else {
                        a
                    }
                }
            }
        }),
        form("cvt.ftz.f32.f32", |a: Single| AnyNan(flushed(a))),
        form("cvt.rn.f32.s32", |a: i32| Single::from_i128(a.into()).value),
        form("cvt.rn.f32.u32", |a: u32| Single::from_u128(a.into()).value),
        form("cvt.rn.f32.s64", |a: i64| Single::from_i128(a.into()).value),
        form("cvt.rn.f32.u64", |a: u64| Single::from_u128(a.into()).value),
        form("cvt.rn.f64.s32", |a: i32| Double::from_i128(a.into()).value),
        form("cvt.rn.f64.u32", |a: u32| Double::from_u128(a.into()).value),
        form("cvt.rn.f64.s64", |a: i64| Double::from_i128(a.into()).value),
        form("cvt.rn.f64.u64", |a: u64| Double::from_u128(a.into()).value),
        form("cvt.rzi.s32.f32", |a: Single| whole(a, true, 32, Round::TowardZero, 0) as i32),
        form("cvt.rzi.u32.f32", |a: Single| whole(a, false, 32, Round::TowardZero, 0) as u32),
        form("cvt.rni.s32.f32", |a: Single| whole(a, true, 32, Round::NearestTiesToEven, 0) as i32),
        // For NaNs from f64, the ISA defines the sign bit alone.
        form("cvt.rzi.s32.f64", |a: Double| whole(a, true, 32, Round::TowardZero, i32::MIN.into()) as i32),
        form("cvt.rni.s32.f64", |a: Double| {
            whole(a, true, 32, Round::NearestTiesToEven, i32::MIN.into()) as i32
        }),
    ];
    for (opcode, round) in [
        ("cvt.rn.f32.f64", Round::NearestTiesToEven),
        ("cvt.rz.f32.f64", Round::TowardZero),
        ("cvt.rm.f32.f64", Round::TowardNegative),
        ("cvt.rp.f32.f64", Round::TowardPositive),
    ] {
        let narrowed = move |a: Double| AnyNan(a.convert_r(round, &mut false).value);
        forms.push(form(opcode, narrowed).at(ties_of_f32()));
    }
    for (opcode, round) in [
        ("cvt.rni.f32.f32", Round::NearestTiesToEven),
        ("cvt.rzi.f32.f32", Round::TowardZero),
        ("cvt.rmi.f32.f32", Round::TowardNegative),
        ("cvt.rpi.f32.f32", Round::TowardPositive),
    ] {
        forms.push(form(opcode, move |a: Single| a.round_to_integral(round).value));
    }
    integers! { forms;
        "cvt.s64.s32" i32 as i32 to i64;
        "cvt.s64.s8" u64 as i8 to i64;
        "cvt.u16.u32" u32 as u32 to u16;
        "cvt.u16.u64" u64 as u64 to u16;
        "cvt.u32.u16" u16 as u16 to u32;
        "cvt.u32.u64" u64 as u64 to u32;
        "cvt.u64.u16" u16 as u16 to u64;
        "cvt.u64.u32" u32 as u32 to u64;
        "cvt.s32.s16" u16 as i16 to i32;
        "cvt.s32.s8" u32 as i8 to i32;
        "cvt.u32.u8" u32 as u8 to u32;
        "cvt.s64.s16" u16 as i16 to i64;
        "cvt.u16.u8" u16 as u8 to u16;
    }
    forms
}

/// Two results in one register, the second in the low bits.
fn packed([high, low]: [u64; 2], bits: u32) -> u64 {
    high << bits | low
}

/// The nearest bf16; of a NaN, the canonical one.
fn nearest_bf16(a: Single) -> u64 {
    let nearest: BFloat = a.convert(&mut false).value;
    if a.is_nan() { 0x7FFF } else { nearest.to_bits() as u64 }
}

/// The nearest number of an 8-bit format, clamped to its largest (`.satfinite`).
fn saturated<F: FloatConvert<Single>>(a: Single) -> u64
where
    Single: FloatConvert<F>,
{
    let most: Single = F::largest().convert(&mut false).value;
    let bounded = if a.abs() > most { most.copy_sign(a) } else { a };
    let nearest: F = bounded.convert(&mut false).value;
    if a.is_nan() { 0x7F } else { nearest.to_bits() as u64 }
}

/// The binary16 of the low 8 bits.
fn half<F: FloatConvert<Half>>(bits: u16) -> Half {
    F::from_bits(u128::from(bits & 0xFF)).convert(&mut false).value
}

/// The integer, clamped to its type's range.
fn whole<S: Semantics>(a: IeeeFloat<S>, is_signed: bool, width: usize, round: Round, of_nan: i128) -> i128 {
    match (a.is_nan(), is_signed) {
        (true, _) => of_nan,
        (_, true) => a.to_i128_r(width, round, &mut false).value,
        (_, false) => a.to_u128_r(width, round, &mut false).value as i128,
    }
}

/// All bf16, extended in f32 by zero, by a half of the last place, and by its neighbours.
fn ties_of_16_bits() -> Vec<Row> {
    let mut random = super::random("ties of 16 bits");
    let mut rows = Vec::new();
    for high in 0..1u64 << 16 {
        let mut number = |high: u64| {
            high << 16 | [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, random.draw() & 0xFFFF][random.below(7)]
        };
        rows.push([number(high), number(high.wrapping_mul(40_503) & 0xFFFF), 0, 0]);
        rows.push([high << 16 | 0x8000, high << 16 | 0x7FFF, 0, 0]);
    }
    rows
}

/// All numbers of an 8-bit format, the midpoints between them, and the neighbours of all of these in f32.
fn ties_of_8_bits<F: FloatConvert<Single>>() -> Vec<Row> {
    let number = |bits: u128| -> Single { F::from_bits(bits).convert(&mut false).value };
    let mut all = Vec::new();
    for bits in 0..0x80 {
        let (x, next) = (number(bits), number(bits + 1));
        let middle = ((x + next).value / Single::from_u128(2).value).value;
        for x in [x, middle] {
            all.extend([x, x.next_up().value, x.next_down().value].map(|x| x.to_bits() as u64));
        }
    }
    let signed: Vec<u64> = all.iter().flat_map(|x| [*x, x ^ 1 << 31]).collect();
    signed.iter().enumerate().map(|(n, &x)| [x, signed[(n * 37 + 11) % signed.len()], 0, 0]).collect()
}

/// f64 on, between and next to numbers of f32 and the midpoints between them.
fn ties_of_f32() -> Vec<Row> {
    let mut random = super::random("ties of f32");
    let mut rows = Vec::new();
    for _ in 0..1 << 14 {
        let x = f32::from_bits(random.draw() as u32);
        let (x, next) = (f64::from(x), f64::from(x.next_up()));
        let one = [x, (x + next) / 2.0][random.below(2)];
        let one = [one, one.next_up(), one.next_down()][random.below(3)];
        rows.push([one.to_bits(), 0, 0, 0]);
    }
    // Numbers beyond the largest and below the smallest one.
    for x in [f64::from(f32::MAX), f64::from(f32::from_bits(1))] {
        for part in [0.25, 0.5, 0.75, 1.0, 1.0 + 2f64.powi(-25), 1.5, 2.0] {
            let x = x * part;
            rows.extend([x, x.next_up(), x.next_down(), -x, -x.next_up()].map(|x| [x.to_bits(), 0, 0, 0]));
        }
    }
    rows
}
