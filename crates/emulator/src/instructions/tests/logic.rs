//! Bitwise operations, shifts and bit fields (sections 9.7.1, 9.7.8 and 9.7.9.7).

use super::form::{Form, Row, form};

macro_rules! bitwise {
    ($forms:ident; $($ty:ident $name:literal),*) => {$(
        $forms.push(form(concat!("and.", $name), |a: $ty, b: $ty| !(!a | !b)));
        $forms.push(form(concat!("or.", $name), |a: $ty, b: $ty| !(!a & !b)));
        $forms.push(form(concat!("xor.", $name), |a: $ty, b: $ty| (a | b) - (a & b)));
        $forms.push(form(concat!("not.", $name), |a: $ty| $ty::MAX - a));
    )*};
}

macro_rules! shifts {
    ($forms:ident; $($opcode:literal $ty:ident $left:literal),*) => {$(
        $forms.push(form($opcode, |a: $ty, by: u32| {
            // Amounts beyond the width count as the width.
            let by = by.min($ty::BITS);
            (if $left { i128::from(a) << by } else { i128::from(a) >> by }) as $ty
        // ptxas truncates immediate amounts of 16-bit shifts to 16 bits.
        }).at(amounts()).immediates(|row| $ty::BITS > 16 || row[1] < 1 << 16));
    )*};
}

pub(super) fn forms() -> Vec<Form> {
    let mut forms = vec![
        form("and.pred", |a: bool, b: bool| a && b),
        form("or.pred", |a: bool, b: bool| a || b),
        form("xor.pred", |a: bool, b: bool| a != b),
        form("not.pred", |a: bool| !a),
        form("prmt.b32", |a: u32, b: u32, selector: u32| permuted(a, b, selector)).at(selectors()),
        form("bfi.b32", |a: u32, b: u32, position: u32, length: u32| {
            // The loop of the ISA's definition.
            let (position, length) = (position & 0xFF, length & 0xFF);
            let mut result = b;
            for n in (0..length).take_while(|n| position + n <= 31) {
                let bit = if n < 32 { a >> n & 1 } else { 0 };
                result = result & !(1 << (position + n)) | bit << (position + n);
            }
            result
        })
        .at(fields())
        .immediates(|row| row[2] < 256 && row[3] < 256),
        form("bfe.u32", |a: u32, position: u32, length: u32| {
            let (position, length) = (position & 0xFF, length & 0xFF);
            let bit = |n: u32| if n < length && position + n <= 31 { a >> (position + n) & 1 } else { 0 };
            (0..32).map(|n| bit(n) << n).sum::<u32>()
        })
        .at(fields().into_iter().map(|[a, _, position, length]| [a, position, length, 0]))
        .immediates(|row| row[1] < 256 && row[2] < 256),
    ];
    bitwise!(forms; u16 "b16", u32 "b32", u64 "b64");
    shifts!(forms;
        "shl.b16" u16 true, "shl.b32" u32 true, "shl.b64" u64 true,
        "shr.u16" u16 false, "shr.u32" u32 false, "shr.u64" u64 false,
        "shr.s16" i16 false, "shr.s32" i32 false, "shr.s64" i64 false);
    forms
}

/// A selector has 4 bits for each byte of the result: 3 choose one of the bytes of `b` and `a`, and one
/// replicates its sign.
fn permuted(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = [a.to_le_bytes(), b.to_le_bytes()].concat();
    let mut result = [0; 4];
    for (n, byte) in result.iter_mut().enumerate() {
        let choice = (selector >> (4 * n)) as usize & 0xF;
        *byte = match (choice & 8, bytes[choice & 7]) {
            (0, chosen) => chosen,
            (_, 0..128) => 0,
            (_, 128..) => 0xFF,
        };
    }
    u32::from_le_bytes(result)
}

/// All selectors, with random higher bits, which are ignored.
fn selectors() -> Vec<Row> {
    let mut random = super::random("selectors");
    let row = |selector| [random.draw() as u32, random.draw() as u32, selector].map(u64::from);
    let mut rows: Vec<Row> = (0..1 << 16).map(row).map(|[a, b, selector]| [a, b, selector, 0]).collect();
    for row in rows.iter_mut().step_by(5) {
        row[2] |= random.draw() & 0xFFFF_0000;
    }
    rows
}

/// Amounts around the width.
fn amounts() -> Vec<Row> {
    let mut random = super::random("amounts");
    let values = [0, 1, 64, 127, 128, 255, 256, 1 << 31, u32::MAX.into()];
    let amounts = (0..80).chain(values);
    amounts.flat_map(|by| [1, u64::MAX, random.draw(), random.draw()].map(|a| [a, by, 0, 0])).collect()
}

/// Positions and lengths around the width, and beyond 8 bits.
fn fields() -> Vec<Row> {
    let mut random = super::random("fields");
    let edges: Vec<u64> = (0..35).chain([63, 64, 127, 128, 255, 256, 261, 0xFF00, u32::MAX.into()]).collect();
    let mut rows = Vec::new();
    for &position in &edges {
        for &length in &edges {
            let [a, b] = [random.draw() as u32, random.draw() as u32].map(u64::from);
            rows.extend([[a, b, position, length], [!a as u32 as u64, 0, position, length]]);
        }
    }
    rows
}
