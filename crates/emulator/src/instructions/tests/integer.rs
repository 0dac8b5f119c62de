//! Integer arithmetic (section 9.7.1).

use super::form::{Form, form};

/// Forms of all integer types.
macro_rules! of_types {
    ($forms:ident; $($ty:ident $name:literal),*) => {$(
        // The low bits of exact results.
        $forms.push(form(concat!("add.", $name), |a: $ty, b: $ty| (i128::from(a) + i128::from(b)) as $ty));
        $forms.push(form(concat!("sub.", $name), |a: $ty, b: $ty| (i128::from(a) - i128::from(b)) as $ty));
        $forms.push(form(concat!("mul.lo.", $name), |a: $ty, b: $ty| {
            i128::from(a).wrapping_mul(i128::from(b)) as $ty
        }));
        $forms.push(form(concat!("mad.lo.", $name), |a: $ty, b: $ty, c: $ty| {
            i128::from(a).wrapping_mul(i128::from(b)).wrapping_add(i128::from(c)) as $ty
        }));
        $forms.push(form(concat!("min.", $name), |a: $ty, b: $ty| if a < b { a } else { b }));
        $forms.push(form(concat!("max.", $name), |a: $ty, b: $ty| if a < b { b } else { a }));
        // Rounds towards zero; a division by zero is undefined.
        let divide = |a: $ty, b: $ty| (i128::from(a) / i128::from(b)) as $ty;
        $forms.push(form(concat!("div.", $name), divide).only(|row| row[1] != 0));
        let remainder = |a: $ty, b: $ty| (i128::from(a) % i128::from(b)) as $ty;
        $forms.push(form(concat!("rem.", $name), remainder).only(|row| row[1] != 0));
    )*};
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        form("mul.hi.u32", |a: u32, b: u32| ((u128::from(a) * u128::from(b)) >> 32) as u32),
        form("mul.hi.s32", |a: i32, b: i32| ((i128::from(a) * i128::from(b)) >> 32) as i32),
        form("mul.hi.u64", |a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64),
        form("mul.wide.u16", |a: u16, b: u16| (i128::from(a) * i128::from(b)) as u32),
        form("mul.wide.u32", |a: u32, b: u32| (i128::from(a) * i128::from(b)) as u64),
        form("mul.wide.s32", |a: i32, b: i32| (i128::from(a) * i128::from(b)) as i64),
        form("neg.s32", |a: i32| -i128::from(a) as i32),
        form("neg.s64", |a: i64| -i128::from(a) as i64),
        form("abs.s32", |a: i32| if a < 0 { -i128::from(a) as i32 } else { a }),
        form("max.s16x2", |a: u32, b: u32| halves(a, b, |a, b| if a < b { b } else { a }))
            .immediates(|_| false),
        form("min.s16x2", |a: u32, b: u32| halves(a, b, |a, b| if a < b { a } else { b }))
            .immediates(|_| false),
        form("popc.b32", |a: u32| (0..32).filter(|n| a >> n & 1 != 0).count() as u32),
        form("brev.b32", |a: u32| (0..32).fold(0, |sum, n| sum | (a >> n & 1) << (31 - n))),
        form("clz.b32", |a: u32| (0..32).rev().take_while(|n| a >> n & 1 == 0).count() as u32),
        // The distance of the highest set bit from bit 31.
        form("bfind.shiftamt.u32", |a: u32| {
            (0..32).rev().find(|n| a >> n & 1 != 0).map_or(u32::MAX, |n| 31 - n)
        }),
    ];
    of_types!(forms; u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64");
    forms
}

/// A function of each pair of 16-bit numbers.
fn halves(a: u32, b: u32, f: fn(i16, i16) -> i16) -> u32 {
    let [low, high] = [0, 16].map(|by| u32::from(f((a >> by) as i16, (b >> by) as i16) as u16));
    high << 16 | low
}
