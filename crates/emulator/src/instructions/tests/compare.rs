//! Comparisons (section 9.7.6).

use super::form::{Form, form};
use rustc_apfloat::ieee::{Double, Single};
use std::cmp::Ordering::{self, Equal, Greater, Less};

/// The orderings for which a comparison holds, and true if it holds for NaNs.
type Comparison = (&'static [Ordering], bool);

/// Comparisons by name.
const COMPARISONS: [(&str, Comparison); 14] = [
    ("eq", (&[Equal], false)),
    ("ne", (&[Less, Greater], false)),
    ("lt", (&[Less], false)),
    ("le", (&[Less, Equal], false)),
    ("gt", (&[Greater], false)),
    ("ge", (&[Greater, Equal], false)),
    ("equ", (&[Equal], true)),
    ("neu", (&[Less, Greater], true)),
    ("ltu", (&[Less], true)),
    ("leu", (&[Less, Equal], true)),
    ("gtu", (&[Greater], true)),
    ("geu", (&[Greater, Equal], true)),
    ("num", (&[Less, Equal, Greater], false)),
    ("nan", (&[], true)),
];

macro_rules! of_types {
    ($forms:ident, $name:ident, $holds:ident; $($ty:ident $suffix:literal),*) => {$(
        $forms.push(form(
            opcode($name, $suffix),
            move |a: $ty, b: $ty| a.partial_cmp(&b).map_or($holds.1, |order| $holds.0.contains(&order)),
        ));
    )*};
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = Vec::new();
    for (name, holds) in COMPARISONS {
        of_types!(forms, name, holds; Single "f32", Double "f64");
    }
    for (name, holds) in &COMPARISONS[..6] {
        of_types!(forms, name, holds; u16 "u16", i16 "s16", u32 "u32", i32 "s32", u64 "u64", i64 "s64");
    }
    for (name, holds) in &COMPARISONS[..2] {
        of_types!(forms, name, holds; u16 "b16", u32 "b32", u64 "b64");
    }
    forms
}

fn opcode(name: &str, ty: &str) -> &'static str {
    format!("setp.{name}.{ty}").leak()
}
