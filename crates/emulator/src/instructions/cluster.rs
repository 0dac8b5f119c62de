//! Clusters of blocks, elected threads, registers that warps exchange, and launches that begin early (PTX
//! ISA, sections 9.7.9.23, 9.7.13.4, 9.7.13.13, 9.7.13.14 and 9.7.20.5).

use super::{Decoded, Decoder, lanes, unknown};
use crate::fault::FaultKind;
use crate::kernel::Action;
use crate::kernel::cluster::{Awaited, Event, SharedPlace};
use crate::kernel::context::Context;
use crate::ptx::{Instruction, Operand};
use crate::races::Races;
use crate::registers::LANES;

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    match (instruction.parts()[0], parts, &instruction.operands[..]) {
        ("mapa", &["shared::cluster", "u32"], [target, address, rank]) => {
            let target = d.target::<u32>(target)?;
            let (address, rank) = d.pair::<u32, u32>(address, rank)?;
            lanes(Box::new(move |cx| {
                let (addresses, ranks) = (cx.value(address)?, cx.value(rank)?);
                let blocks = cx.cluster.blocks.len() as u32;
                let mut result = [0; LANES];
                for lane in crate::registers::lanes_of(cx.active) {
                    if ranks[lane] >= blocks {
                        let problem = format!("maps to block {} of a cluster of {blocks}", ranks[lane]);
                        return cx.fault(FaultKind::Address, problem);
                    }
                    let SharedPlace { offset, .. } = SharedPlace::of(addresses[lane].into(), 0);
                    result[lane] = SharedPlace { rank: ranks[lane], offset }.address() as u32;
                }
                cx.write::<u32>(target, &result, 0);
                Ok(())
            }))
        }
        ("barrier", &["cluster", "arrive", ref modifiers @ ..], []) if are_known(modifiers) => {
            let releases = !modifiers.contains(&"relaxed");
            Ok(Action::Signal(Box::new(move |cx| {
                if cx.asynchronous.arrived & cx.active != 0 {
                    let problem = "arrives at the cluster's barrier a second time without waiting";
                    return cx.fault(FaultKind::Synchronisation, problem);
                }
                cx.observe(|races, lanes| races.arrive_at_cluster(lanes, releases));
                cx.asynchronous.arrived |= cx.active;
                cx.asynchronous.arrived_now |= cx.active;
                cx.cluster.arrived_threads += cx.active.count_ones();
                cx.cluster.settle_barrier();
                cx.changed = true;
                Ok(())
            })))
        }
        ("barrier", &["cluster", "wait", ref modifiers @ ..], []) if are_known(modifiers) => {
            let poll = |cx: &mut Context<'_>| {
                if cx.active & !cx.asynchronous.arrived != 0 {
                    let problem = "waits at the cluster's barrier without having arrived";
                    return cx.fault(FaultKind::Synchronisation, problem);
                }
                let is_open = cx.asynchronous.arrived_now & cx.active == 0;
                if is_open {
                    cx.asynchronous.arrived &= !cx.active;
                    cx.observe(Races::pass_cluster);
                }
                Ok((!is_open).then_some(Awaited::Cluster))
            };
            Ok(Action::Wait(Box::new(poll), None))
        }
        ("elect", &["sync"], [Operand::Pair(leader, is_leader), members]) => {
            let leader = match &**leader {
                Operand::Sink => None,
                leader => Some(d.target::<u32>(leader)?),
            };
            let is_leader = d.predicate_target(is_leader)?;
            Ok(Action::Together(
                d.source(members)?,
                Box::new(move |cx| {
                    let first = cx.active.trailing_zeros();
                    cx.write_predicate(is_leader, 1 << first, 0);
                    if let Some(leader) = leader {
                        cx.write(leader, &[first; LANES], 0);
                    }
                    Ok(())
                }),
            ))
        }
        ("griddepcontrol", &["launch_dependents"], []) => Ok(Action::Signal(Box::new(|cx| {
            cx.cluster.blocks[cx.position.rank as usize].has_launched_dependents = true;
            Ok(())
        }))),
        ("griddepcontrol", &["wait"], []) => {
            let poll = |cx: &mut Context<'_>| {
                if cx.launch.may_wait.get() {
                    return Ok(Some(Awaited::Launch));
                }
                cx.observe(Races::wait_for_launch);
                Ok(None)
            };
            Ok(Action::Wait(Box::new(poll), None))
        }
        (
            "setmaxnreg",
            &[direction @ ("dec" | "inc"), "sync", "aligned", "u32"],
            [Operand::Integer(count)],
        ) => {
            let is_valid = (24..=256).contains(count) && count % 8 == 0;
            let count = if is_valid { *count as i32 } else { return unknown(instruction) };
            let gives = direction == "dec";
            let poll = move |cx: &mut Context<'_>| {
                let before = cx.asynchronous.registers.unwrap_or(cx.launch.code.max_registers) as i32;
                if before != count && (before > count) != gives {
                    let does = if gives { "decreases" } else { "increases" };
                    let problem = format!("{does} the registers of a thread from {before} to {count}");
                    return cx.fault(FaultKind::Synchronisation, problem);
                }
                let rank = cx.position.rank;
                let free = &mut cx.cluster.blocks[rank as usize].free_registers;
                let Some(left) = free.checked_add_signed((before - count) * LANES as i32) else {
                    return Ok(Some(Awaited::Registers));
                };
                *free = left;
                cx.cluster.events.push(Event::Registers(rank));
                cx.asynchronous.registers = Some(count as u32);
                cx.changed = true;
                Ok(None)
            };
            Ok(Action::Wait(Box::new(poll), None))
        }
        _ => unknown(instruction),
    }
}

fn are_known(modifiers: &[&str]) -> bool {
    modifiers.iter().all(|part| ["aligned", "release", "acquire", "relaxed"].contains(part))
}
