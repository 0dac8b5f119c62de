//! Accesses and waits of instructions, as the detector of races sees them. Without a detector each method
//! does nothing.

use super::memory::located;
use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::cluster::{Completion, CopyPiece, SharedPlace, UNIT};
use crate::kernel::context::WarpContext;
use crate::memory::Memory;
use crate::ptx::Space;
use crate::races::{
    self, AccessKind, AccessPlace, By, COPY_READS, COPY_WRITES, Gathered, Mbarrier, Race, Races, Scope,
    ThreadView, WGMMA,
};
use crate::registers::{Lanes, lanes_of};
use std::collections::BTreeMap;

impl WarpContext<'_> {
    /// Notes the accesses of active lanes.
    #[cold]
    pub(super) fn note(
        &mut self,
        space: Space,
        addresses: &Lanes<u64>,
        bytes: u64,
        kind: AccessKind,
    ) -> Outcome {
        lanes_of(self.active).try_for_each(|lane| self.note_lane(lane, space, addresses[lane], bytes, kind))
    }

    /// Notes a lane's access.
    #[cold]
    pub(super) fn note_lane(
        &mut self,
        lane: usize,
        space: Space,
        address: u64,
        bytes: u64,
        kind: AccessKind,
    ) -> Outcome {
        let (space, offset) = located(space, address);
        let rank = self.position.rank;
        self.detect(|races| {
            let place = match space {
                Space::Shared | Space::Cluster => races.shared(SharedPlace::locate(offset, rank)),
                Space::Local | Space::Param => return Ok(()),
                _ => AccessPlace(offset),
            };
            races.access_by_lane(lane, (place, bytes), kind)
        })
    }

    /// Notes a lane's copies by `cp.async`, which begin or end.
    pub(super) fn note_copy(&mut self, lane: usize, target: u64, source: u64, bytes: [u64; 2]) -> Outcome {
        let place = SharedPlace { rank: self.position.rank, offset: target };
        self.detect(|races| {
            let [read, written] = bytes;
            if read > 0 {
                races.access_by_lane(
                    lane,
                    (AccessPlace(source), read),
                    AccessKind::new(By::Copy, true, false),
                )?;
            }
            races.access_by_lane(lane, (races.shared(place), written), AccessKind::new(By::Copy, false, true))
        })
    }

    /// Notes a copy that a lane issues: the accesses of the mbarrier's agent or of the lane's.
    pub(super) fn note_bulk(
        &mut self,
        lane: usize,
        rank: u32,
        pieces: &[CopyPiece],
        completion: Completion,
    ) -> Outcome {
        let at = match completion {
            Completion::Bytes(at) if self.races.is_some() => {
                Some((at, self.cluster.mbarrier(self.shared, at).map_or(0, |mbarrier| mbarrier.phase)))
            }
            _ => None,
        };
        self.detect(|races| {
            let view = races.now().lanes[lane].view.clone();
            let (id, time) = (u64::from(races.warp), races.now().groups[lane] + 1);
            let (mut readers, mut writers) = ((COPY_READS | id, time), (COPY_WRITES | id, time));
            let [read, write] =
                [AccessKind::new(By::Bulk, true, false), AccessKind::new(By::Bulk, false, true)];
            let update = AccessKind { scope: Some(Scope::Gpu), ..AccessKind::new(By::Bulk, true, true) };
            let access = |races: &mut Races, place: (AccessPlace, u64), kind, agent, needs_proxy| {
                races.access((lane, 1 << lane), &view, place, kind, Some(agent), needs_proxy)
            };
            if let Some((at, phase)) = at {
                let mbarrier = races.mbarriers.get(&(races.block_at(at.rank), at.offset));
                let (agent, is_fenced) = mbarrier.map_or((0, true), |of| (of.agent, of.is_fenced));
                (readers, writers) = ((agent, phase as u32 + 1), (agent, phase as u32 + 1));
                access(races, (races.shared(at), 8), update, writers, !is_fenced)?;
            }
            for &CopyPiece { global, shared, bytes } in pieces {
                let shared = Some(races.shared(SharedPlace { rank, offset: shared }));
                let (from, to, kind) = match completion {
                    Completion::Bytes(_) => (global.map(AccessPlace), shared, write),
                    Completion::Group(None) => (shared, global.map(AccessPlace), write),
                    Completion::Group(Some(_)) => (shared, global.map(AccessPlace), update),
                };
                from.map_or(Ok(()), |from| access(races, (from, bytes), read, readers, true))?;
                to.map_or(Ok(()), |to| access(races, (to, bytes), kind, writers, true))?;
            }
            Ok(())
        })
    }

    /// Notes a `wgmma` of the warp, which reads these units of shared memory.
    pub(super) fn note_wgmma(&mut self, units: &[u16]) -> Outcome {
        let rank = self.position.rank;
        self.detect(|races| {
            // The warp multiplies together, so what one of its lanes knows suffices.
            let mut gathered = Gathered::default();
            races.release(u32::MAX, &mut gathered);
            let agent = (WGMMA | u64::from(races.warp), races.now().wgmma + 1);
            let kind = AccessKind::new(By::Wgmma, true, false);
            for &unit in units {
                let place = races.shared(SharedPlace { rank, offset: u64::from(unit) * UNIT });
                races.access((0, u32::MAX), &gathered.view, (place, UNIT), kind, Some(agent), true)?;
            }
            Ok(())
        })
    }

    /// Notes that active lanes have initialised mbarriers.
    pub(super) fn note_init(&mut self, places: &Lanes<SharedPlace>) -> Outcome {
        for lane in lanes_of(self.active) {
            self.note_lane(lane, Space::Cluster, places[lane].address(), 8, AccessKind::WRITE)?;
            self.detect(|races| {
                let SharedPlace { rank, offset } = places[lane];
                let new = Mbarrier {
                    agent: races.next_mbarrier,
                    initialiser: (races.warp, lane),
                    is_fenced: false,
                    phases: BTreeMap::new(),
                };
                races.next_mbarrier += 1;
                races.mbarriers.insert((races.block_at(rank), offset), new);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Notes that a lane arrives at an mbarrier, or only uses it unless it releases.
    pub(super) fn note_arrival(
        &mut self,
        lane: usize,
        at: SharedPlace,
        phase: u64,
        releases: Option<Option<Scope>>,
    ) -> Outcome {
        let kind = AccessKind { scope: Some(Scope::Gpu), ..AccessKind::UPDATE };
        self.detect(|races| {
            let view = races.now().lanes[lane].view.clone();
            races.access((lane, 1 << lane), &view, (races.shared(at), 8), kind, None, true)?;
            let block = races.block_at(at.rank);
            let reaches =
                |scope: Option<Scope>| scope.is_none_or(|of| of >= races.distance(block, races.block));
            if !releases.is_some_and(reaches) {
                return Ok(());
            }
            let Some(mut mbarrier) = races.mbarriers.remove(&(block, at.offset)) else { return Ok(()) };
            mbarrier.phases.retain(|of, _| of + 2 > phase);
            races.release(1 << lane, mbarrier.phases.entry(phase).or_default());
            races.mbarriers.insert((block, at.offset), mbarrier);
            Ok(())
        })
    }

    /// Notes that active lanes have seen the end of all phases of an mbarrier before this one.
    pub(super) fn note_wait(&mut self, at: SharedPlace, phase: u64, acquires: bool) -> Outcome {
        let lanes = self.active;
        for lane in lanes_of(lanes) {
            self.note_arrival(lane, at, phase, None)?;
        }
        self.detect(|races| {
            let Some(ended) = phase.checked_sub(1).filter(|_| acquires) else { return Ok(()) };
            let key = (races.block_at(at.rank), at.offset);
            let Some(mbarrier) = races.mbarriers.remove(&key) else { return Ok(()) };
            let mut view = mbarrier.phases.get(&ended).map_or(ThreadView::default(), |of| of.view.clone());
            view.known.add(mbarrier.agent, u32::MAX, ended as u32 + 1);
            races.acquire(lanes, &view);
            races.mbarriers.insert(key, mbarrier);
            Ok(())
        })
    }

    /// Calls `note` with the detector, if there is one; reports the race that it finds.
    fn detect(&mut self, note: impl FnOnce(&mut Races) -> Result<(), Box<Race>>) -> Outcome {
        let Some(races) = self.races.as_deref_mut() else { return Ok(()) };
        let Err(race) = note(races) else { return Ok(()) };
        let problem = races.describe(self.launch.memory, &race);
        Err(ThreadFault::new(race.lane as u32, FaultKind::Synchronisation, problem))
    }
}

impl Races {
    fn shared(&self, at: SharedPlace) -> AccessPlace {
        AccessPlace::shared(self.block_at(at.rank), at.offset)
    }

    /// Lanes commit a group of bulk copies to global memory.
    pub(crate) fn commit_copies(&mut self, lanes: u32) {
        lanes_of(lanes).for_each(|lane| self.now().groups[lane] += 1);
    }

    /// Lanes have waited until `left` groups are under way, or until these alone are still read.
    pub(crate) fn wait_for_copies(&mut self, lanes: u32, left: usize, only_reads: bool) {
        for lane in lanes_of(lanes) {
            let ended = self.now().groups[lane].saturating_sub(left as u32);
            let agents = if only_reads { &[COPY_READS][..] } else { &[COPY_READS, COPY_WRITES] };
            for agent in agents {
                self.acquire_agent(1 << lane, agent | u64::from(self.warp), 1 << lane, ended);
            }
        }
    }

    pub(crate) fn commit_wgmma(&mut self) {
        self.now().wgmma += 1;
    }

    /// The warp has waited until `left` groups of `wgmma` are under way.
    pub(crate) fn wait_for_wgmma(&mut self, left: usize) {
        let ended = self.now().wgmma.saturating_sub(left as u32);
        self.acquire_agent(u32::MAX, WGMMA | u64::from(self.warp), 1, ended);
    }

    /// Both accesses, and what would order them.
    fn describe(&self, memory: &Memory, race: &Race) -> String {
        let Race { place, bytes, old, new, .. } = race;
        let (of_old, old_block, number, warp) = self.place_of(old.warp);
        let (of_new, block, ..) = self.place_of(new.warp);
        let is_other = !std::ptr::eq(of_old, of_new);
        let at = if place.is_shared() {
            let owner = ((place.0 & !AccessPlace::SHARED) >> 24) as u32;
            let whose = if owner == block { String::new() } else { " of another block".to_owned() };
            format!("byte {} of shared memory{whose}", place.0 & 0xFF_FFFF)
        } else {
            memory.describe(place.0, *bytes)
        };
        let at = if place.is_shared() { format!("{bytes} bytes at {at}") } else { at };
        let lane = old.lanes.trailing_zeros();
        let same_warp = old.warp == new.warp;
        let remedy = if is_other {
            "the later launch began early and needs `griddepcontrol.wait` before its access, as does each launch between"
                .to_owned()
        } else if race.lacks_proxy && old.kind.by == By::Thread {
            let own = if new.kind.writes && new.kind.reads { "`fence.mbarrier_init` or " } else { "" };
            format!(
                "{own}`fence.proxy.async` after the write is missing: in the thread that wrote, before the barrier"
            )
        } else if new.kind.is_constant || old.kind.is_constant {
            "`ld.global.nc` reads what no thread may write while the kernel runs".to_owned()
        } else {
            let by = match (old.kind.by, self.distance(old_block, block)) {
                (By::Wgmma, _) => "`wgmma.wait_group` after the first, and a barrier for other warps,",
                (By::Bulk, _) if old.who >= races::MBARRIERS => "a wait for the phase of the copy's mbarrier",
                (By::Bulk, _) => {
                    "`cp.async.bulk.wait_group` after the copy, and a barrier for other threads,"
                }
                (By::Copy, _) => "`cp.async.wait_group` after the copy, and a barrier for other threads,",
                (_, Scope::Block) if same_warp => "`__syncwarp()` (bar.warp.sync)",
                (_, Scope::Block) => "`__syncthreads()` (bar.sync) or an mbarrier",
                (_, Scope::Cluster) => "`barrier.cluster`, or a release and an acquire of scope .cluster,",
                _ => "a release and an acquire of scope .gpu (`__threadfence()` around an atomic)",
            };
            format!("{by} would order them")
        };
        let strong = [old, new].iter().all(|of| of.kind.scope.is_some());
        let narrow = if strong && !is_other { "; a scope does not contain both threads" } else { "" };
        format!(
            "race: {} of {at} is not ordered after the {} by {}block {number:?}, warp {warp}, lane {lane} at {}{narrow}; {remedy}",
            new.kind.describe(),
            old.kind.describe(),
            if is_other { format!("kernel {}, ", of_old.name) } else { String::new() },
            (of_old.describe)(old.location),
        )
    }
}
