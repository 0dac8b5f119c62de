//! mbarriers (PTX ISA, section 9.7.13.15).

use super::memory::{Address, located};
use super::{AnySource, Decoded, Decoder, lanes, unknown};
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::cluster::{Awaited, Mbarrier, SharedPlace};
use crate::kernel::context::{Source, WarpContext};
use crate::kernel::{Action, Poll};
use crate::ptx::{Instruction, Operand, Space};
use crate::races::{AccessKind, Scope};
use crate::registers::{LANES, Lanes, RegisterSlot, lanes_of};

pub(super) fn decode(d: &Decoder<'_>, instruction: &Instruction, parts: &[&str]) -> Decoded {
    let Some((&kind, modifiers)) = parts.split_first() else { return unknown(instruction) };
    let (mut space, mut flags) = (Space::Generic, Vec::new());
    let (mut is_relaxed, mut scope) = (false, None);
    for part in modifiers {
        match *part {
            // Order and scope matter for races only: accesses execute one after the other.
            "relaxed" => is_relaxed = true,
            "cta" => scope = Some(Scope::Block),
            "cluster" => scope = Some(Scope::Cluster),
            "release" | "acquire" | "b64" => {}
            "shared" | "shared::cta" => space = Space::Shared,
            "shared::cluster" => space = Space::Cluster,
            flag @ ("expect_tx" | "parity") => flags.push(flag),
            _ => return unknown(instruction),
        }
    }
    // What an arrival releases: to all threads of the cluster, if it names no scope.
    let releases = (!is_relaxed).then_some(scope);
    let at = |operand| Ok::<_, String>(Barrier { space, address: Address::decode(d, operand)? });
    let one = Operand::Integer(1);
    match (kind, &flags[..], &instruction.operands[..]) {
        ("init", [], [address, arrivals]) => {
            let (barrier, arrivals) = (at(address)?, d.source::<u32>(arrivals)?);
            lanes(Box::new(move |cx| {
                let (places, arrivals) = (barrier.places(cx)?, cx.value(arrivals)?);
                cx.note_init(&places)?;
                for lane in lanes_of(cx.active) {
                    let at = places[lane];
                    cx.check_unused(lane, Space::Cluster, at.address(), 8)?;
                    let bytes =
                        cx.shared[at.rank as usize].bytes(at.offset, 8).expect("a place in shared memory");
                    of_lane(lane, cx.cluster.init(at, bytes, arrivals[lane]))?;
                }
                cx.changed = true;
                Ok(())
            }))
        }
        ("inval", [], [address]) => {
            let barrier = at(address)?;
            lanes(Box::new(move |cx| {
                let places = barrier.places(cx)?;
                for lane in lanes_of(cx.active) {
                    of_lane(lane, cx.cluster.mbarrier(cx.shared, places[lane]).map(|_| ()))?;
                    cx.note_lane(lane, Space::Cluster, places[lane].address(), 8, AccessKind::WRITE)?;
                    cx.cluster.invalidate(places[lane]);
                }
                Ok(())
            }))
        }
        ("expect_tx", [], [address, bytes]) => {
            let (barrier, bytes) = (at(address)?, d.source::<u32>(bytes)?);
            signal(barrier, bytes, None, None, |barrier, bytes| barrier.expect(bytes.into()).map(|()| false))
        }
        ("arrive", [], [state, address, rest @ ..]) if rest.len() < 2 => {
            let (barrier, count) = (at(address)?, d.source::<u32>(rest.first().unwrap_or(&one))?);
            signal(barrier, count, target(d, state)?, releases, Mbarrier::arrive)
        }
        ("arrive", ["expect_tx"], [state, address, bytes]) => {
            let (barrier, bytes) = (at(address)?, d.source::<u32>(bytes)?);
            signal(barrier, bytes, target(d, state)?, releases, |barrier, bytes| {
                barrier.expect(bytes.into())?;
                barrier.arrive(1)
            })
        }
        ("try_wait" | "test_wait", [] | ["parity"], [done, address, phase, ..]) => {
            let (done, barrier, phase) = (d.predicate_target(done)?, at(address)?, d.any(phase)?);
            Ok(Action::Wait(wait(barrier, done, !is_relaxed, phase, !flags.is_empty()), Some(done)))
        }
        _ => unknown(instruction),
    }
}

/// The register of an arrival's state: the phase in which it arrives.
fn target(d: &Decoder<'_>, state: &Operand) -> Decoded<Option<RegisterSlot>> {
    if *state == Operand::Sink { Ok(None) } else { d.target::<u64>(state).map(Some) }
}

/// An mbarrier operand.
pub(super) struct Barrier {
    pub(super) space: Space,
    pub(super) address: Address,
}

impl Barrier {
    /// The place of each lane's mbarrier.
    pub(super) fn places(&self, cx: &WarpContext<'_>) -> Outcome<Lanes<SharedPlace>> {
        let addresses = self.address.read(cx)?;
        let mut places = [SharedPlace { rank: 0, offset: 0 }; LANES];
        for lane in lanes_of(cx.active) {
            let (space, offset) = located(self.space, addresses[lane]);
            if !matches!(space, Space::Shared | Space::Cluster) {
                return Err(ThreadFault::new(
                    lane as u32,
                    FaultKind::Address,
                    "uses an mbarrier outside of shared memory",
                ));
            }
            cx.reach(lane, self.space, addresses[lane], 8, "uses an mbarrier in")?;
            places[lane] = SharedPlace::locate(offset, cx.position.rank);
        }
        Ok(places)
    }
}

/// A problem as a lane's fault.
pub(super) fn of_lane<T>(lane: usize, result: Result<T, String>) -> Outcome<T> {
    result.map_err(|problem| ThreadFault::new(lane as u32, FaultKind::Synchronisation, problem))
}

/// Changes the mbarrier once for each active lane.
fn signal(
    barrier: Barrier,
    number: Source<u32>,
    state: Option<RegisterSlot>,
    releases: Option<Option<Scope>>,
    change: fn(&mut Mbarrier, u32) -> Result<bool, String>,
) -> Decoded {
    Ok(Action::Signal(Box::new(move |cx| {
        let (places, numbers, mut phases) = (barrier.places(cx)?, cx.value(number)?, [0; LANES]);
        for lane in lanes_of(cx.active) {
            let of_barrier = |barrier: &mut Mbarrier| {
                phases[lane] = barrier.phase;
                change(barrier, numbers[lane])
            };
            of_lane(lane, cx.cluster.change(cx.shared, places[lane], of_barrier))?;
            cx.note_arrival(lane, places[lane], phases[lane], releases)?;
        }
        if let Some(state) = state {
            cx.write(state, &phases, 0);
        }
        cx.changed = true;
        Ok(())
    })))
}

/// Waits for the end of a phase: that of an arrival's state, or the current or last one by its parity.
fn wait(barrier: Barrier, done: RegisterSlot, acquires: bool, operand: AnySource, by_parity: bool) -> Poll {
    Box::new(move |cx| {
        let (places, operands) = (barrier.places(cx)?, operand.value(cx)?);
        let first = cx.active.trailing_zeros() as usize;
        if places[first].rank != cx.position.rank {
            return of_lane(first, Err("waits for an mbarrier of another block".into()));
        }
        let is_same = |lane: &usize| places[*lane] == places[first] && operands[*lane] == operands[first];
        cx.active = lanes_of(cx.active).filter(is_same).map(|lane| 1 << lane).sum();
        let phase = of_lane(first, cx.cluster.mbarrier(cx.shared, places[first]))?.phase;
        let awaited = operands[first];
        let (what, possible, has_ended) = match by_parity {
            true => ("the parity", 0..=1, phase % 2 != awaited),
            false => ("phase", phase.saturating_sub(1)..=phase, phase > awaited),
        };
        if !possible.contains(&awaited) {
            let problem = format!("waits for {what} {awaited} of an mbarrier, which is in phase {phase}");
            return of_lane(first, Err(problem));
        }
        if has_ended {
            cx.note_wait(places[first], phase, acquires)?;
            cx.write_predicate(done, u32::MAX, 0);
            return Ok(None);
        }
        Ok(Some(Awaited::Mbarrier(places[first], phase)))
    })
}
