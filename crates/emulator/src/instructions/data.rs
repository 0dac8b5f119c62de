//! Moves, selections, predefined registers and conversions of addresses (PTX ISA, sections 9.7.9 and 10).

use super::memory::window;
use super::{AnySource, AnyTarget, Decoded, Decoder, carry, lanes, unknown};
use crate::kernel::Execute;
use crate::kernel::context::{Condition, Source, WarpContext, map1};
use crate::ptx::{Instruction, Operand, Space};
use crate::registers::{LANES, Lane, Marks};
use std::sync::LazyLock;
use std::time::Instant;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    match (instruction.parts()[0], parts, &instruction.operands[..]) {
        ("mov", &["pred"], [target, source]) => {
            let target = d.predicate_target(target)?;
            let source = d.predicate(source)?;
            lanes(Box::new(move |cx| {
                let (value, unset) = cx.lanes(source);
                cx.write_predicate(target, value, unset);
                Ok(())
            }))
        }
        ("mov", _, [Operand::Vector(targets), source]) => lanes(unpack(d, targets, source)?),
        ("mov", _, [target, Operand::Vector(sources)]) => lanes(pack(d, target, sources)?),
        ("mov", &[ty], [target, source]) => match ty {
            "b16" | "u16" | "s16" => copy::<u16>(d, target, source),
            "b32" | "u32" | "s32" | "f32" => copy::<u32>(d, target, source),
            "b64" | "u64" | "s64" | "f64" => copy::<u64>(d, target, source),
            _ => unknown(instruction),
        },
        ("selp", &[ty], [target, a, b, predicate]) => {
            let predicate = d.predicate(predicate)?;
            match ty {
                "b16" | "u16" | "s16" => select::<u16>(d, target, a, b, predicate),
                "b32" | "u32" | "s32" | "f32" => select::<u32>(d, target, a, b, predicate),
                "b64" | "u64" | "s64" | "f64" => select::<u64>(d, target, a, b, predicate),
                _ => unknown(instruction),
            }
        }
        ("cvta", &["to", space, "u64"], [target, source]) => {
            let offset = window(space_of(space, instruction)?);
            lanes(map1(d.target::<u64>(target)?, d.source(source)?, move |a: u64| a.wrapping_sub(offset)))
        }
        ("cvta", &[space, "u64"], [target, source]) => {
            let offset = window(space_of(space, instruction)?);
            lanes(map1(d.target::<u64>(target)?, d.source(source)?, move |a: u64| a.wrapping_add(offset)))
        }
        _ => unknown(instruction),
    }
}

fn space_of(name: &str, instruction: &Instruction) -> Decoded<Space> {
    match name {
        "global" => Ok(Space::Global),
        "shared" => Ok(Space::Shared),
        "local" => Ok(Space::Local),
        "param" => Ok(Space::Param),
        _ => unknown(instruction),
    }
}

fn copy<T: Lane>(d: &Decoder<'_>, target: &Operand, source: &Operand) -> Decoded {
    let (target, source) = (d.target::<T>(target)?, d.source::<T>(source)?);
    lanes(carry(target, (source, Source::Constant(0u32)), |a, _| a, |[_, marks], _| marks))
}

fn select<T: Lane>(
    d: &Decoder<'_>,
    target: &Operand,
    a: &Operand,
    b: &Operand,
    predicate: Condition,
) -> Decoded {
    let (target, (a, b)) = (d.target::<T>(target)?, d.pair::<T, T>(a, b)?);
    lanes(Box::new(move |cx| {
        let (chosen, undecided) = cx.lanes(predicate);
        let (x, y) = (cx.read(a), cx.read(b));
        let mut result = [T::default(); LANES];
        for lane in 0..LANES {
            result[lane] = if chosen >> lane & 1 != 0 { x[lane] } else { y[lane] };
        }
        if cx.is_marked(a) || cx.is_marked(b) {
            let (a, b) = (cx.marks(a), cx.marks(b));
            let of = |lane: usize| if chosen >> lane & 1 != 0 { &a } else { &b };
            let from_memory = chosen & a.from_memory | !chosen & b.from_memory;
            let strict = chosen & a.strict | !chosen & b.strict;
            let unwritten = std::array::from_fn(|lane| of(lane).unwritten[lane]);
            cx.write_marked(target, &result, &Marks { unwritten, from_memory, strict });
            cx.registers.unset::<T>(target, undecided & cx.active);
        } else {
            cx.write(target, &result, undecided);
        }
        Ok(())
    }))
}

/// `mov {a, b}, c`: splits a register into equal parts, the low bits first.
fn unpack(d: &Decoder<'_>, targets: &[Operand], source: &Operand) -> Decoded<Execute> {
    let targets = targets.iter().map(|target| d.any_target(target)).collect::<Decoded<Vec<AnyTarget>>>()?;
    let source = d.any(source)?;
    Ok(Box::new(move |cx| {
        let (values, marks) = (source.read(cx), source.marks(cx));
        for (n, target) in targets.iter().enumerate() {
            let (shift, bytes) = (target.bits() as usize * n, target.bits() as usize / 8 * n);
            let limit = ((1u32 << (target.bits() / 8)) - 1) as u8;
            let unwritten = marks.unwritten.map(|marks| marks >> bytes & limit);
            target.write_marked(cx, &values.map(|value| value >> shift), &Marks { unwritten, ..marks });
        }
        Ok(())
    }))
}

/// `mov a, {b, c}`: joins equal parts, the low bits first.
fn pack(d: &Decoder<'_>, target: &Operand, sources: &[Operand]) -> Decoded<Execute> {
    let target = d.any_target(target)?;
    let bits = target.bits() as usize / sources.len();
    let sources = sources.iter().map(|source| d.any(source)).collect::<Decoded<Vec<AnySource>>>()?;
    Ok(Box::new(move |cx| {
        let (mut values, mut all) = ([0u64; LANES], Marks::NONE);
        let limit = u64::MAX >> (64 - bits);
        for (n, source) in sources.iter().enumerate() {
            let (part, marks) = (source.read(cx), source.marks(cx));
            for lane in 0..LANES {
                values[lane] |= (part[lane] & limit) << (bits * n);
                all.unwritten[lane] |= marks.unwritten[lane] << (bits / 8 * n);
            }
            all.from_memory |= marks.from_memory;
            all.strict |= marks.strict;
        }
        target.write_marked(cx, &values, &all);
        Ok(())
    }))
}

/// The time at which the clock of GPUs begins.
static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// A predefined register as a function of the lane.
pub(super) fn special(name: &str) -> Decoded<fn(&WarpContext<'_>, usize) -> u32> {
    Ok(match name {
        "%tid.x" => |cx, lane| cx.thread(lane)[0],
        "%tid.y" => |cx, lane| cx.thread(lane)[1],
        "%tid.z" => |cx, lane| cx.thread(lane)[2],
        "%ntid.x" => |cx, _| cx.launch.block[0],
        "%ntid.y" => |cx, _| cx.launch.block[1],
        "%ntid.z" => |cx, _| cx.launch.block[2],
        "%ctaid.x" => |cx, _| cx.position.block[0],
        "%ctaid.y" => |cx, _| cx.position.block[1],
        "%ctaid.z" => |cx, _| cx.position.block[2],
        "%nctaid.x" => |cx, _| cx.launch.grid[0],
        "%nctaid.y" => |cx, _| cx.launch.grid[1],
        "%nctaid.z" => |cx, _| cx.launch.grid[2],
        "%clusterid.x" => |cx, _| cx.position.block[0] / cx.launch.cluster[0],
        "%clusterid.y" => |cx, _| cx.position.block[1] / cx.launch.cluster[1],
        "%clusterid.z" => |cx, _| cx.position.block[2] / cx.launch.cluster[2],
        "%nclusterid.x" => |cx, _| cx.launch.grid[0] / cx.launch.cluster[0],
        "%nclusterid.y" => |cx, _| cx.launch.grid[1] / cx.launch.cluster[1],
        "%nclusterid.z" => |cx, _| cx.launch.grid[2] / cx.launch.cluster[2],
        "%cluster_ctaid.x" => |cx, _| cx.position.block[0] % cx.launch.cluster[0],
        "%cluster_ctaid.y" => |cx, _| cx.position.block[1] % cx.launch.cluster[1],
        "%cluster_ctaid.z" => |cx, _| cx.position.block[2] % cx.launch.cluster[2],
        "%cluster_nctaid.x" => |cx, _| cx.launch.cluster[0],
        "%cluster_nctaid.y" => |cx, _| cx.launch.cluster[1],
        "%cluster_nctaid.z" => |cx, _| cx.launch.cluster[2],
        "%cluster_ctarank" => |cx, _| cx.position.rank,
        "%cluster_nctarank" => |cx, _| cx.launch.cluster.iter().product(),
        "%laneid" => |_, lane| lane as u32,
        "%globaltimer_lo" => |_, _| STARTED.elapsed().as_nanos() as u32,
        _ => return Err(format!("the register {name} is not emulated")),
    })
}
