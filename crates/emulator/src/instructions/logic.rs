//! Bitwise operations and shifts (PTX ISA, sections 9.7.1 and 9.7.8), which carry the marks of bytes that
//! were never written.

use super::{Decoded, Decoder, bits_of_bytes, bytes_of_bits, carry, lanes, unknown};
use crate::kernel::Execute;
use crate::kernel::context::{Source, WarpContext};
use crate::ptx::{Instruction, Operand};
use crate::registers::{LANES, Lane, Marks, RegisterSlot};
use std::ops::{BitAnd, BitOr, BitXor, Not};

trait Bits:
    Lane + BitAnd<Output = Self> + BitOr<Output = Self> + BitXor<Output = Self> + Not<Output = Self>
{
}
impl Bits for u16 {}
impl Bits for u32 {}
impl Bits for u64 {}

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let operands = &instruction.operands[..];
    let name = instruction.parts()[0];
    match (name, parts, operands) {
        (_, &["pred"], _) => predicates(d, instruction),
        ("and" | "or" | "xor" | "not", &["b16"], _) => bitwise::<u16>(d, name, operands, instruction),
        ("and" | "or" | "xor" | "not", &["b32"], _) => bitwise::<u32>(d, name, operands, instruction),
        ("and" | "or" | "xor" | "not", &["b64"], _) => bitwise::<u64>(d, name, operands, instruction),
        ("shl" | "shr", &[ty], [target, a, by]) => {
            // Shifts beyond the width shift everything out.
            macro_rules! shift {
                ($t:ty, $f:expr) => {{
                    let by = d.source::<u32>(by)?;
                    lanes(shift::<$t, _>(d.target::<$t>(target)?, d.source(a)?, by, $f))
                }};
            }
            match (name, ty) {
                ("shl", "b16") => shift!(u16, |a, by: u32| if by < 16 { a << by } else { 0 }),
                ("shl", "b32") => shift!(u32, |a, by: u32| if by < 32 { a << by } else { 0 }),
                ("shl", "b64") => shift!(u64, |a, by: u32| if by < 64 { a << by } else { 0 }),
                ("shr", "u16" | "b16") => shift!(u16, |a, by: u32| if by < 16 { a >> by } else { 0 }),
                ("shr", "u32" | "b32") => shift!(u32, |a, by: u32| if by < 32 { a >> by } else { 0 }),
                ("shr", "u64" | "b64") => shift!(u64, |a, by: u32| if by < 64 { a >> by } else { 0 }),
                ("shr", "s16") => shift!(i16, |a, by: u32| a >> by.min(15)),
                ("shr", "s32") => shift!(i32, |a, by: u32| a >> by.min(31)),
                ("shr", "s64") => shift!(i64, |a, by: u32| a >> by.min(63)),
                _ => unknown(instruction),
            }
        }
        ("prmt", &["b32"], [target, a, b, selector]) => lanes(three(
            d.target::<u32>(target)?,
            [d.source(a)?, d.source(b)?],
            [d.source(selector)?, Source::Constant(0)],
            |a, b, selector, _| permute(a, b, selector),
        )),
        ("bfi", &["b32"], [target, a, b, position, length]) => lanes(three(
            d.target::<u32>(target)?,
            [d.source(a)?, d.source(b)?],
            [d.source(position)?, d.source(length)?],
            insert,
        )),
        ("bfe", &["u32"], [target, a, position, length]) => lanes(three(
            d.target::<u32>(target)?,
            [d.source(a)?, Source::Constant(0)],
            [d.source(position)?, d.source(length)?],
            |a, _, position, length| {
                let (position, length) = (position & 0xFF, length & 0xFF);
                let shifted = if position < 32 { a >> position } else { 0 };
                if length < 32 { shifted & ((1 << length) - 1) } else { shifted }
            },
        )),
        _ => unknown(instruction),
    }
}

fn bitwise<T: Bits>(d: &Decoder<'_>, name: &str, operands: &[Operand], instruction: &Instruction) -> Decoded {
    // Values and marks: a bit counts as written if a written bit of the other operand decides it.
    lanes(match (name, operands) {
        ("not", [target, a]) => {
            let sources = (d.source::<T>(a)?, Source::Constant(T::default()));
            carry(d.target::<T>(target)?, sources, |a, _| !a, |[_, marks], _| marks)
        }
        ("and", [target, a, b]) => carry(
            d.target::<T>(target)?,
            d.pair::<T, T>(a, b)?,
            |a, b| a & b,
            |[a, m], [b, n]| m & n | m & b | a & n,
        ),
        ("or", [target, a, b]) => carry(
            d.target::<T>(target)?,
            d.pair::<T, T>(a, b)?,
            |a, b| a | b,
            |[a, m], [b, n]| m & n | m & !b | !a & n,
        ),
        ("xor", [target, a, b]) => {
            carry(d.target::<T>(target)?, d.pair::<T, T>(a, b)?, |a, b| a ^ b, |[_, m], [_, n]| m | n)
        }
        _ => return unknown(instruction),
    })
}

fn shift<T: Lane, F>(target: RegisterSlot, a: Source<T>, by: Source<u32>, f: F) -> Execute
where
    F: Fn(T, u32) -> T + Copy + Send + Sync + 'static,
{
    if let Source::Constant(by) = by {
        let unused = Source::Constant(0u32);
        return carry(target, (a, unused), move |a, _| f(a, by), move |[_, marks], _| f(marks, by));
    }
    let execute = carry(target, (a, by), f, move |[_, marks], [by, _]| f(marks, by));
    Box::new(move |cx| {
        let unset = cx.unset_of(by)?;
        execute(cx)?;
        cx.registers.unset::<T>(target, unset);
        Ok(())
    })
}

/// An operation on the bits of two operands and on two numbers, which must be initialised.
fn three(
    target: RegisterSlot,
    [a, b]: [Source<u32>; 2],
    [x, y]: [Source<u32>; 2],
    f: impl Fn(u32, u32, u32, u32) -> u32 + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx: &mut WarpContext<'_>| {
        let unset = cx.unset_of(x)? | cx.unset_of(y)?;
        let (x, y) = (cx.read(x), cx.read(y));
        let (a_values, b_values) = (cx.read(a), cx.read(b));
        let mut result = [0; LANES];
        for lane in 0..LANES {
            result[lane] = f(a_values[lane], b_values[lane], x[lane], y[lane]);
        }
        if cx.is_marked(a) || cx.is_marked(b) {
            let (a, b) = (cx.marks(a), cx.marks(b));
            let unwritten = std::array::from_fn(|lane| {
                let [a, b] = [a.unwritten[lane], b.unwritten[lane]].map(|bytes| bits_of_bytes(bytes) as u32);
                bytes_of_bits(f(a, b, x[lane], y[lane]).into())
            });
            cx.write_marked(
                target,
                &result,
                &Marks { unwritten, from_memory: a.from_memory | b.from_memory, strict: a.strict | b.strict },
            );
            cx.registers.unset::<u32>(target, unset);
        } else {
            cx.write(target, &result, unset);
        }
        Ok(())
    })
}

/// `prmt` in its default mode: each byte of the result is one of eight bytes, or copies of its sign.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let all = u64::from(b) << 32 | u64::from(a);
    let byte = |n: u32| {
        let choice = selector >> (4 * n) & 0xF;
        let byte = (all >> (8 * (choice & 7))) as u8;
        let byte = if choice & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        u32::from(byte) << (8 * n)
    };
    byte(0) | byte(1) | byte(2) | byte(3)
}

/// `bfi`: inserts the low bits of `a` into `b`.
fn insert(a: u32, b: u32, position: u32, length: u32) -> u32 {
    let (position, length) = (position & 0xFF, (length & 0xFF).min(32));
    let ones = ((1u64 << length) - 1).checked_shl(position).unwrap_or(0) as u32;
    let shifted = u64::from(a).checked_shl(position).unwrap_or(0) as u32;
    b & !ones | shifted & ones
}

/// Operations on predicates, one bit per lane.
fn predicates(d: &Decoder<'_>, instruction: &Instruction) -> Decoded {
    let (target, sources) = instruction.operands.split_first().ok_or("no operands")?;
    let target = d.predicate_target(target)?;
    let sources = sources.iter().map(|source| d.predicate(source)).collect::<Decoded<Vec<_>>>()?;
    // Values and unset lanes. A lane is set if the other operand decides the result alone.
    type Lanes = (u32, u32);
    let f: fn(Lanes, Lanes) -> Lanes = match (instruction.parts()[0], sources.len()) {
        ("and", 2) => |(a, m), (b, n)| (a & b, m & n | m & b | a & n),
        ("or", 2) => |(a, m), (b, n)| (a | b, m & n | m & !b | !a & n),
        ("xor", 2) => |(a, m), (b, n)| (a ^ b, m | n),
        ("not", 1) => |(a, m), _| (!a, m),
        _ => return unknown(instruction),
    };
    lanes(Box::new(move |cx| {
        let (lanes, unset) = f(cx.lanes(sources[0]), cx.lanes(sources[sources.len() - 1]));
        cx.write_predicate(target, lanes, unset);
        Ok(())
    }))
}
