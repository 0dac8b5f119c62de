//! PTX instructions, one file for each family.
//!
//! Results are those that the PTX ISA (NVIDIA, version 9.0, section 9.7) defines, to the bit. Approximate
//! instructions (`approx`) give the exact result, rounded to nearest. `tensor_core` describes the sums of
//! `mma`. Nothing is contracted: `mul` and `add` without `.rn`, which ptxas may fuse, round twice here.
//!
//! Computing with memory that was never written is a fault. Moves, loads, stores, shifts, bitwise operations
//! and integer conversions carry the marks of such bytes along instead. The result of an unset register is
//! unset; it is a fault to use it as an address, branch on it or store it.

mod architecture;
mod async_copy;
mod atomic;
mod barrier;
mod bulk;
mod cluster;
mod compare;
mod convert;
mod data;
mod double;
mod fence;
mod integer;
mod logic;
mod matrix;
mod mbarrier;
mod memory;
mod races;
mod single;
mod tensor_core;
#[cfg(test)]
mod tests;
mod warp;
mod wgmma;

pub(crate) use wgmma::advance as advance_wgmma;

use crate::fault::{FaultKind, Outcome};
use crate::kernel::context::{Condition, Source, WarpContext, vectorized};
use crate::kernel::{Action, Execute, Symbols};
use crate::ptx::{Class, Instruction, Kernel, Operand, Register};
use crate::registers::{LANES, Lane, Lanes, Marks, RegisterSlot};
use std::collections::HashSet;

/// Finds the operands of a kernel's instructions.
pub(crate) struct Decoder<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) slots: &'a [RegisterSlot],
    pub(crate) symbols: &'a Symbols,
    /// The architecture of the module, e.g. 89.
    pub(crate) target: u32,
    /// `wgmma` that lack a fence.
    pub(crate) unfenced: &'a HashSet<*const Instruction>,
}

/// A decoded instruction, or an error that names the opcode.
type Decoded<T = Action> = Result<T, String>;

/// Decodes an instruction. `None` for prefetches, `nanosleep` and `fence.proxy.alias`, which have no effect.
pub(crate) fn decode(decoder: &Decoder<'_>, instruction: &Instruction) -> Decoded<Option<Action>> {
    let parts = instruction.parts();
    let (oldest, target) = (architecture::oldest(&parts), decoder.target);
    if target < oldest {
        return Err(format!("`{}` needs sm_{oldest}, and the module is for sm_{target}", instruction.opcode));
    }
    let family = match parts[0] {
        "ld" | "st" => memory::decode,
        "atom" | "red" => atomic::decode,
        "mov" | "cvta" | "selp" => data::decode,
        "setp" => compare::decode,
        "cvt" => convert::decode,
        "and" | "or" | "xor" | "not" | "shl" | "shr" | "prmt" | "bfi" | "bfe" => logic::decode,
        "shfl" | "vote" | "match" | "redux" | "elect" => warp::decode,
        "bar" => barrier::decode,
        "cp" if parts.contains(&"bulk") => bulk::decode,
        "cp" => async_copy::decode,
        "mbarrier" => mbarrier::decode,
        "mapa" | "barrier" | "setmaxnreg" | "griddepcontrol" => cluster::decode,
        "wgmma" => wgmma::decode,
        "ldmatrix" | "stmatrix" | "mma" => matrix::decode,
        "membar" | "fence" => return fence::decode(instruction, &parts),
        "prefetch" | "nanosleep" => return Ok(None),
        _ => match parts.last() {
            Some(&"f32") => single::decode,
            Some(&"f64") => double::decode,
            _ => integer::decode,
        },
    };
    family(decoder, instruction, &parts[1..]).map(Some)
}

impl Decoder<'_> {
    pub(crate) fn slot(&self, Register(register): Register) -> RegisterSlot {
        self.slots[register as usize]
    }

    fn class(&self, Register(register): Register) -> Class {
        self.kernel.registers[register as usize]
    }

    /// An operand of type `T`.
    fn source<T: Lane>(&self, operand: &Operand) -> Decoded<Source<T>> {
        Ok(match operand {
            Operand::Register(register) if self.class(*register) == T::CLASS => {
                Source::Slot(self.slot(*register))
            }
            Operand::Integer(value) => Source::Constant(T::from_u64(*value as u64)),
            Operand::Single(bits) => Source::Constant(T::from_u64((*bits).into())),
            Operand::Double(bits) => Source::Constant(T::from_u64(*bits)),
            Operand::Symbol(name) => Source::Constant(T::from_u64(self.symbol(name)?)),
            Operand::Special(name) => Source::Special(data::special(name)?),
            other => return Err(format!("the operand {other:?} is not of the instruction's type")),
        })
    }

    fn pair<A: Lane, B: Lane>(&self, a: &Operand, b: &Operand) -> Decoded<(Source<A>, Source<B>)> {
        Ok((self.source(a)?, self.source(b)?))
    }

    /// The address of a variable.
    fn symbol(&self, name: &str) -> Decoded<u64> {
        let known = self.symbols.get(name).map(|(_, address)| *address);
        known.ok_or_else(|| format!("the variable {name} is not declared"))
    }

    /// The slot of a destination register of type `T`.
    fn target<T: Lane>(&self, operand: &Operand) -> Decoded<RegisterSlot> {
        match operand {
            Operand::Register(register) if self.class(*register) == T::CLASS => Ok(self.slot(*register)),
            other => Err(format!("the result {other:?} is not of the instruction's type")),
        }
    }

    /// A predicate operand.
    fn predicate(&self, operand: &Operand) -> Decoded<Condition> {
        match operand {
            Operand::Register(register) if self.class(*register) == Class::Predicate => {
                Ok(self.condition(*register, false))
            }
            Operand::Not(register) => Ok(self.condition(*register, true)),
            Operand::Integer(value) => Ok(Condition::Constant(*value != 0)),
            other => Err(format!("{other:?} is not a predicate")),
        }
    }

    /// A predicate register as a condition.
    pub(crate) fn condition(&self, register: Register, is_negated: bool) -> Condition {
        Condition::Register { slot: self.slot(register), is_negated }
    }

    /// The slot of a destination predicate.
    fn predicate_target(&self, operand: &Operand) -> Decoded<RegisterSlot> {
        match self.predicate(operand)? {
            Condition::Register { slot, is_negated: false } => Ok(slot),
            _ => Err("the result is not a predicate register".into()),
        }
    }

    /// An operand of any class, for instructions whose registers may be wider than their type.
    fn any(&self, operand: &Operand) -> Decoded<AnySource> {
        Ok(match operand {
            Operand::Register(register) => match self.class(*register) {
                Class::B16 => AnySource::B16(self.source(operand)?),
                Class::B32 => AnySource::B32(self.source(operand)?),
                Class::B64 => AnySource::B64(self.source(operand)?),
                Class::Predicate => return Err("a predicate where a number is needed".into()),
            },
            _ => AnySource::B64(self.source(operand)?),
        })
    }

    /// A destination of any class.
    fn any_target(&self, operand: &Operand) -> Decoded<AnyTarget> {
        let Operand::Register(register) = operand else {
            return Err(format!("the result {operand:?} is not a register"));
        };
        match self.class(*register) {
            Class::Predicate => Err("a predicate where a number is needed".into()),
            class => Ok(AnyTarget { class, slot: self.slot(*register) }),
        }
    }

    /// The parts of a vector, or the operand alone.
    fn elements<'o>(&self, operand: &'o Operand) -> &'o [Operand] {
        match operand {
            Operand::Vector(parts) => parts,
            one => std::slice::from_ref(one),
        }
    }
}

/// An operand of any class, read as bits.
#[derive(Clone, Copy)]
enum AnySource {
    B16(Source<u16>),
    B32(Source<u32>),
    B64(Source<u64>),
}

impl AnySource {
    /// Reads an operand that must be initialised.
    fn value(self, cx: &WarpContext<'_>) -> Outcome<Lanes<u64>> {
        Ok(match self {
            AnySource::B16(source) => widened(&cx.value(source)?),
            AnySource::B32(source) => widened(&cx.value(source)?),
            AnySource::B64(source) => cx.value(source)?,
        })
    }

    #[inline(always)]
    fn read(self, cx: &WarpContext<'_>) -> Lanes<u64> {
        match self {
            AnySource::B16(source) => widened(&cx.read(source)),
            AnySource::B32(source) => widened(&cx.read(source)),
            AnySource::B64(source) => cx.read(source),
        }
    }

    fn is_marked(self, cx: &WarpContext<'_>) -> bool {
        match self {
            AnySource::B16(source) => cx.is_marked(source),
            AnySource::B32(source) => cx.is_marked(source),
            AnySource::B64(source) => cx.is_marked(source),
        }
    }

    fn marks(self, cx: &WarpContext<'_>) -> Marks {
        match self {
            AnySource::B16(source) => cx.marks(source),
            AnySource::B32(source) => cx.marks(source),
            AnySource::B64(source) => cx.marks(source),
        }
    }
}

/// Zero-extends the values of all lanes. A loop, because the compiler does not inline the closure of a mapped
/// array.
#[inline(always)]
fn widened<T: Copy + Into<u64>>(values: &Lanes<T>) -> Lanes<u64> {
    let mut wide = [0; LANES];
    for lane in 0..LANES {
        wide[lane] = values[lane].into();
    }
    wide
}

/// The low bits of the values of all lanes.
#[inline(always)]
fn narrowed<T: Lane>(values: &Lanes<u64>) -> Lanes<T> {
    let mut narrow = [T::default(); LANES];
    for lane in 0..LANES {
        narrow[lane] = T::from_u64(values[lane]);
    }
    narrow
}

/// A destination of any class.
#[derive(Clone, Copy)]
struct AnyTarget {
    class: Class,
    slot: RegisterSlot,
}

impl AnyTarget {
    fn bits(self) -> u32 {
        match self.class {
            Class::B16 => 16,
            Class::B32 => 32,
            _ => 64,
        }
    }

    /// Writes the low bits.
    #[inline(always)]
    fn write(self, cx: &mut WarpContext<'_>, values: &Lanes<u64>, unset: u32) {
        match self.class {
            Class::B16 => cx.write::<u16>(self.slot, &narrowed(values), unset),
            Class::B32 => cx.write::<u32>(self.slot, &narrowed(values), unset),
            _ => cx.write(self.slot, values, unset),
        }
    }

    /// As [`AnyTarget::write`], with marks.
    fn write_marked(self, cx: &mut WarpContext<'_>, values: &Lanes<u64>, marks: &Marks) {
        match self.class {
            Class::B16 => cx.write_marked::<u16>(self.slot, &narrowed(values), marks),
            Class::B32 => cx.write_marked::<u32>(self.slot, &narrowed(values), marks),
            _ => cx.write_marked(self.slot, values, marks),
        }
    }
}

/// Eight bits for each bit of a byte mask.
fn bits_of_bytes(bytes: u8) -> u64 {
    (0..8).filter(|n| bytes >> n & 1 != 0).map(|n| 0xFF << (8 * n)).sum()
}

/// A bit for each byte that has a bit set.
fn bytes_of_bits(bits: u64) -> u8 {
    (0..8).map(|n| u8::from(bits >> (8 * n) & 0xFF != 0) << n).sum()
}

/// A step that moves bits: `f` computes the value, and `marks` moves the marks of uninitialised bits
/// accordingly.
fn carry<A: Lane, B: Lane, R: Lane>(
    target: RegisterSlot,
    (a, b): (Source<A>, Source<B>),
    f: impl Fn(A, B) -> R + Send + Sync + 'static,
    marks: impl Fn([A; 2], [B; 2]) -> R + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx| {
        vectorized(
            #[inline(always)]
            || {
                let (x, y) = (cx.read(a), cx.read(b));
                let mut result = [R::default(); LANES];
                for lane in 0..LANES {
                    result[lane] = f(x[lane], y[lane]);
                }
                let carried =
                    if cx.is_marked(a) || cx.is_marked(b) { Some(carried(cx, (a, b), &marks)) } else { None };
                cx.write(target, &result, 0);
                if let Some(carried) = carried {
                    cx.registers.mark::<R>(target, &carried, cx.active);
                }
            },
        );
        Ok(())
    })
}

/// The marks of a result of [`carry`].
#[inline(never)]
fn carried<A: Lane, B: Lane, R: Lane>(
    cx: &WarpContext<'_>,
    (a, b): (Source<A>, Source<B>),
    marks: &impl Fn([A; 2], [B; 2]) -> R,
) -> Marks {
    let (x, y) = (cx.read(a), cx.read(b));
    let (m, n) = (cx.marks(a), cx.marks(b));
    let unwritten = std::array::from_fn(|lane| {
        let a = A::from_u64(bits_of_bytes(m.unwritten[lane]));
        let b = B::from_u64(bits_of_bytes(n.unwritten[lane]));
        bytes_of_bits(marks([x[lane], a], [y[lane], b]).into_u64())
    });
    Marks { unwritten, from_memory: m.from_memory | n.from_memory, strict: m.strict | n.strict }
}

/// The error of an instruction that is not emulated.
fn unknown<T>(instruction: &Instruction) -> Decoded<T> {
    Err(format!("`{}` is not emulated", instruction.opcode))
}

/// A step that all lanes of a warp must execute together.
fn whole_warp(
    instruction: &Instruction,
    execute: impl Fn(&mut WarpContext<'_>) -> Outcome + Send + Sync + 'static,
) -> Decoded {
    let name = instruction.parts()[0].to_owned();
    let checked = move |cx: &mut WarpContext<'_>| {
        if cx.active != u32::MAX {
            return cx.fault(FaultKind::Synchronisation, format!("`{name}` by a part of a warp"));
        }
        execute(cx)
    };
    Ok(Action::Together(Source::Constant(u32::MAX), Box::new(checked)))
}

/// A step that each lane executes independently.
fn lanes(execute: Execute) -> Decoded {
    Ok(Action::Lanes(execute))
}
