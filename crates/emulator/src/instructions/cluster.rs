//! Clusters of blocks, registers that warps exchange, and launches that begin early (PTX ISA, sections
//! 9.7.9.23, 9.7.13.4, 9.7.13.13 and 9.7.20.5).

use super::memory::{located, window};
use super::{Decoded, Decoder, lanes, unknown};
use crate::fault::FaultKind;
use crate::kernel::Action;
use crate::kernel::cluster::{Awaited, ClusterEvent, SharedPlace};
use crate::kernel::context::WarpContext;
use crate::ptx::{Instruction, Operand, Space};
use crate::races::Races;
use crate::registers::{LANES, lanes_of};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    match (instruction.parts()[0], parts, &instruction.operands[..]) {
        ("mapa", &[ref space @ .., "u32" | "u64"], [target, address, rank])
            if matches!(space, [] | ["shared::cluster"]) =>
        {
            let space = if space.is_empty() { Space::Generic } else { Space::Cluster };
            let (target, address, rank) = (d.any_target(target)?, d.any(address)?, d.source::<u32>(rank)?);
            lanes(Box::new(move |cx| {
                let (addresses, ranks) = (address.value(cx)?, cx.value(rank)?);
                let blocks = cx.cluster.blocks.len() as u32;
                let mut result = [0; LANES];
                for lane in lanes_of(cx.active) {
                    if ranks[lane] >= blocks {
                        let problem = format!("maps to block {} of a cluster of {blocks}", ranks[lane]);
                        return cx.fault(FaultKind::Address, problem);
                    }
                    let (found, address) = located(space, addresses[lane]);
                    if found != Space::Cluster {
                        return cx.fault(FaultKind::Address, "maps an address outside of shared memory");
                    }
                    let SharedPlace { offset, .. } = SharedPlace::locate(address, 0);
                    let begin = if space == Space::Generic { window(Space::Shared) } else { 0 };
                    result[lane] = begin + SharedPlace { rank: ranks[lane], offset }.address();
                }
                target.write(cx, &result, 0);
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
            let poll = |cx: &mut WarpContext<'_>| {
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
        ("griddepcontrol", &["launch_dependents"], []) => Ok(Action::Signal(Box::new(|cx| {
            cx.cluster.blocks[cx.position.rank as usize].has_launched_dependents = true;
            Ok(())
        }))),
        ("griddepcontrol", &["wait"], []) => {
            let poll = |cx: &mut WarpContext<'_>| {
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
            if !(24..=256).contains(count) || count % 8 != 0 {
                return Err(format!(
                    "`setmaxnreg` to {count} registers: 24 to 256, a multiple of 8, are possible"
                ));
            }
            let count = *count as i32;
            let gives = direction == "dec";
            let poll = move |cx: &mut WarpContext<'_>| {
                if cx.active != u32::MAX {
                    return cx.fault(FaultKind::Synchronisation, "`setmaxnreg` by a part of a warp");
                }
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
                cx.cluster.events.push(ClusterEvent::Registers(rank));
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
