//! Data races of a launch by PTX's memory model (PTX ISA, chapter 8), with the setting `races=1`.
//!
//! Two accesses race if they overlap, one of them writes, neither comes before the other, and they are
//! not both strong with scopes that contain each other's threads. Which comes before which follows from
//! barriers, mbarriers, fences, releases and acquires, not from the order of execution, so a race is
//! found in whatever order its accesses happen. Each lane has a vector clock, which usually all lanes of
//! a block share; a warp's time advances with each release. An access is kept for each word until a
//! later one takes its place.
//!
//! Asynchronous work accesses memory as agents, each with times of its own: copies that an mbarrier
//! counts by the phase that ends with them, `wgmma` and bulk copies to global memory by the group that
//! is waited for. What a thread wrote must reach them through a `fence.proxy.async`.
//!
//! A launch is ordered after those before it in its stream, unless it began before their end: then its
//! threads know what `griddepcontrol.wait` has waited for. Launches of several streams are not compared.
//! `docs/kernels.md` lists what is not reported although the model does not allow it.

mod access;
mod clock;
mod shadow;

use crate::blocks::block_number;
use crate::registers::{LANES, lanes_of};
use crate::settings::SETTINGS;
pub(crate) use access::{AccessKind, AccessPlace, By, Fence, Scope};
use clock::Clock;
pub(crate) use clock::{Gathered, ThreadView};
use shadow::{Record, Shadow};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::rc::Rc;

/// Agents of a warp: reads and writes of its bulk copies to global memory, and its `wgmma`.
pub(crate) const COPY_READS: u64 = 1 << 32;
pub(crate) const COPY_WRITES: u64 = 2 << 32;
pub(crate) const WGMMA: u64 = 3 << 32;
/// Agents of mbarriers: the copies that each counts.
pub(crate) const MBARRIERS: u64 = 4 << 32;

/// log2 of the most warps of a block, and blocks of a cluster: a warp's number has those of its block and
/// cluster.
const WARP_BITS: u32 = 5;
const BLOCK_BITS: u32 = 4;

/// Bytes of what strong accesses synchronise by.
const WORD: u64 = 4;

/// A hash map whose keys are trusted integers.
pub(crate) type Map<K, V> = HashMap<K, V, BuildHasherDefault<IntegerHasher>>;

/// A fast hash of integers.
#[derive(Default)]
pub(crate) struct IntegerHasher(u64);

impl Hasher for IntegerHasher {
    fn finish(&self) -> u64 {
        self.0 ^ self.0 >> 32
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(byte.into()));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}

/// True if the settings ask for races.
pub(crate) fn wanted() -> bool {
    SETTINGS.as_ref().is_some_and(|settings| settings.races)
}

/// Two accesses that race.
pub(crate) struct Race {
    pub(crate) lane: usize,
    pub(crate) place: AccessPlace,
    pub(crate) bytes: u64,
    pub(crate) old: Record,
    pub(crate) new: Record,
    /// True if only a fence of the asynchronous proxy is missing.
    pub(crate) lacks_proxy: bool,
}

/// A lane's knowledge, and that of its fences.
#[derive(Clone, Default)]
pub(crate) struct LaneKnowledge {
    pub(crate) view: Rc<ThreadView>,
    /// Knowledge at its last fence of each scope, which later strong writes release.
    released: [Option<Rc<ThreadView>>; 3],
    /// Knowledge that its next fence acquires, by the narrowest scope that suffices.
    pending: [Option<Rc<ThreadView>>; 3],
}

pub(crate) struct Warp {
    pub(crate) lanes: Vec<LaneKnowledge>,
    time: u32,
    /// Committed groups of bulk copies of each lane, and of `wgmma`.
    pub(crate) groups: [u32; LANES],
    pub(crate) wgmma: u32,
    /// Arrivals of each lane at the cluster's barrier.
    arrivals: [u32; LANES],
}

/// Knowledge that strong writes have released at a place: by scope and block, or several blocks.
#[derive(Default)]
struct SyncWord {
    published: Vec<(Scope, Option<u32>, Gathered)>,
    fenced: Clock,
}

pub(crate) struct Mbarrier {
    pub(crate) agent: u64,
    /// The thread that has initialised it.
    pub(crate) initialiser: (u32, usize),
    /// True if copies may count at it.
    pub(crate) is_fenced: bool,
    /// Knowledge that arrivals release, by phase.
    pub(crate) phases: BTreeMap<u64, Gathered>,
}

/// One of the launches that may run at the same time.
pub(crate) struct Running {
    /// The kernel's name.
    pub(crate) name: String,
    /// File and line of a location.
    pub(crate) describe: Box<dyn Fn(u32) -> String>,
    grid: [u32; 3],
    cluster: [u32; 3],
    /// The number of its first cluster.
    first_cluster: u32,
    /// Launches that its threads have waited for, a bit each.
    known: u64,
}

impl Running {
    /// A launch of the kernel `name`, with its grid and the blocks of a cluster.
    pub(crate) fn new(
        name: String,
        [grid, cluster]: [[u32; 3]; 2],
        describe: impl Fn(u32) -> String + 'static,
    ) -> Running {
        Running { name, describe: Box::new(describe), grid, cluster, first_cluster: 0, known: 0 }
    }
}

/// The races of launches.
pub(crate) struct Races {
    launches: Vec<Running>,
    /// True if accesses of one launch are not compared.
    only_between: bool,
    /// The running warp, its block, and the source line of its step.
    pub(crate) warp: u32,
    pub(crate) block: u32,
    pub(crate) location: u32,
    warps: Map<u32, Warp>,
    memory: Shadow,
    sync_words: Map<u64, SyncWord>,
    /// By block and number.
    barriers: Map<(u32, usize), Gathered>,
    /// The cluster's barrier, by cluster and phase.
    clusters: Map<(u32, u32), Gathered>,
    /// By block and offset.
    pub(crate) mbarriers: Map<(u32, u64), Mbarrier>,
    pub(crate) next_mbarrier: u64,
}

/// The words of some bytes.
fn words(AccessPlace(place): AccessPlace, bytes: u64) -> impl Iterator<Item = u64> {
    place / WORD..(place + bytes).div_ceil(WORD)
}

impl Races {
    pub(crate) fn new(mut launches: Vec<Running>, only_between: bool) -> Races {
        let mut clusters = 0;
        for launch in &mut launches {
            launch.first_cluster = clusters;
            clusters += launch.grid.iter().zip(launch.cluster).map(|(grid, n)| grid / n).product::<u32>();
        }
        Races {
            launches,
            only_between,
            warp: 0,
            block: 0,
            location: 0,
            warps: Map::default(),
            memory: Shadow::default(),
            sync_words: Map::default(),
            barriers: Map::default(),
            clusters: Map::default(),
            mbarriers: Map::default(),
            next_mbarrier: MBARRIERS,
        }
    }

    /// A cluster begins. Clusters are numbered in the order of launches.
    pub(crate) fn start(&mut self, cluster: u32, blocks: u32, threads: u32) {
        for block in (cluster << BLOCK_BITS..).take(blocks as usize) {
            for warp in (block << WARP_BITS..).take(threads.div_ceil(LANES as u32) as usize) {
                let lanes = vec![LaneKnowledge::default(); LANES];
                let new = Warp { lanes, time: 1, groups: [0; LANES], wgmma: 0, arrivals: [0; LANES] };
                self.warps.insert(warp, new);
            }
        }
    }

    /// A cluster has ended, and its shared memory is gone.
    pub(crate) fn end(&mut self, cluster: u32, shared_bytes: u64) {
        let of_cluster = |block: u32| block >> BLOCK_BITS == cluster;
        let launch = self.launch_of(cluster << BLOCK_BITS << WARP_BITS);
        let gone = self.warps.extract_if(|warp, _| of_cluster(warp >> WARP_BITS));
        let known = gone.flat_map(|(_, warp)| warp.lanes).fold(0, |known, lane| known | lane.view.launches);
        self.launches[launch].known |= known;
        self.barriers.retain(|(block, _), _| !of_cluster(*block));
        self.mbarriers.retain(|(block, _), _| !of_cluster(*block));
        self.clusters.retain(|(of, _), _| *of != cluster);
        let is_left = |word: &u64| {
            let place = word * WORD;
            place & AccessPlace::SHARED == 0 || !of_cluster(((place & !AccessPlace::SHARED) >> 24) as u32)
        };
        self.sync_words.retain(|word, _| is_left(word));
        for rank in 0..1 << BLOCK_BITS {
            let AccessPlace(start) = AccessPlace::shared((cluster << BLOCK_BITS) + rank, 0);
            self.memory.forget(start, shared_bytes);
        }
    }

    /// A warp of a cluster runs.
    pub(crate) fn run(&mut self, cluster: u32, rank: u32, first_thread: u32) {
        self.block = (cluster << BLOCK_BITS) + rank;
        self.warp = (self.block << WARP_BITS) + first_thread / LANES as u32;
    }

    pub(crate) fn now(&mut self) -> &mut Warp {
        self.warps.get_mut(&self.warp).expect("the running warp")
    }

    pub(crate) fn block_at(&self, rank: u32) -> u32 {
        (self.block >> BLOCK_BITS << BLOCK_BITS) + rank
    }

    /// The launch of a warp.
    fn launch_of(&self, warp: u32) -> usize {
        let cluster = warp >> WARP_BITS >> BLOCK_BITS;
        self.launches.partition_point(|launch| launch.first_cluster <= cluster) - 1
    }

    /// A warp's launch, block, place of the block in its grid, and place of the warp in its block.
    pub(crate) fn place_of(&self, warp: u32) -> (&Running, u32, [u32; 3], u32) {
        let (launch, block) = (&self.launches[self.launch_of(warp)], warp >> WARP_BITS);
        let (cluster, rank) = (block >> BLOCK_BITS, block % (1 << BLOCK_BITS));
        let number = block_number([launch.grid, launch.cluster], cluster - launch.first_cluster, rank);
        (launch, block, number, warp % (1 << WARP_BITS))
    }

    /// The narrowest scope that contains threads of both blocks.
    pub(crate) fn distance(&self, a: u32, b: u32) -> Scope {
        match (a == b, a >> BLOCK_BITS == b >> BLOCK_BITS) {
            (true, _) => Scope::Block,
            (_, true) => Scope::Cluster,
            _ => Scope::Gpu,
        }
    }

    /// Lanes have waited for the end of the launch before theirs.
    pub(crate) fn wait_for_launch(&mut self, lanes: u32) {
        if let Some(before) = self.launch_of(self.warp).checked_sub(1) {
            let launches = 1 << before | self.launches[before].known;
            self.acquire(lanes, &ThreadView { launches, ..ThreadView::default() });
        }
    }

    /// Checks and notes an access for `lane`: by its warp, or by an agent at a time. `view` is what comes
    /// before it besides what the lanes `own` did; without `needs_proxy` also for the asynchronous proxy.
    pub(crate) fn access(
        &mut self,
        (lane, own): (usize, u32),
        view: &ThreadView,
        (place, bytes): (AccessPlace, u64),
        kind: AccessKind,
        agent: Option<(u64, u32)>,
        needs_proxy: bool,
    ) -> Result<(), Box<Race>> {
        if self.only_between && place.is_shared() {
            return Ok(());
        }
        let (warp, launch) = (self.warp, self.launch_of(self.warp));
        let (who, time) = agent.unwrap_or((warp.into(), self.now().time));
        let new = Record { who, warp, lanes: 1 << lane, time, bytes: 0, kind, location: self.location };
        let mut memory = std::mem::take(&mut self.memory);
        let proxied = &view.proxied[usize::from(!place.is_shared())];
        let crosses =
            |old: &Record| needs_proxy && kind.is_async() && !old.kind.is_async() && old.kind.writes;
        let is_ordered = |old: &Record| {
            let of_old = self.launch_of(old.warp);
            if of_old != launch {
                return view.launches >> of_old & 1 == 1;
            }
            if self.only_between {
                return true;
            }
            if kind.is_constant && old.kind.writes || old.kind.is_constant && kind.writes {
                return false;
            }
            if crosses(old) { old.is_in(proxied, None) } else { old.is_in(&view.known, Some((warp, own))) }
        };
        let is_strong = |old: &Record| {
            let need = self.distance(old.warp >> WARP_BITS, self.block);
            kind.scope.is_some_and(|scope| scope >= need) && old.kind.scope.is_some_and(|scope| scope >= need)
        };
        let result = memory.access((place.0, bytes), new, is_ordered, is_strong);
        self.memory = memory;
        result.map_err(|old| {
            let lacks_proxy = crosses(&old) && old.is_in(&view.known, Some((warp, own)));
            Box::new(Race { lane, place, bytes, old, new, lacks_proxy })
        })?;
        if kind.writes && kind.scope.is_none() && !self.sync_words.is_empty() {
            words(place, bytes).for_each(|word| drop(self.sync_words.remove(&word)));
        }
        Ok(())
    }

    /// An access of a lane, in the order of its program.
    pub(crate) fn access_by_lane(
        &mut self,
        lane: usize,
        place: (AccessPlace, u64),
        kind: AccessKind,
    ) -> Result<(), Box<Race>> {
        let view = self.now().lanes[lane].view.clone();
        self.access((lane, 1 << lane), &view, place, kind, None, true)?;
        if let Some(scope) = kind.scope {
            self.synchronise(lane, place.0, kind, scope);
        }
        Ok(())
    }

    /// Acquires and releases by a strong access.
    fn synchronise(&mut self, lane: usize, place: AccessPlace, kind: AccessKind, scope: Scope) {
        let key = place.0 / WORD;
        let mut sync_word = self.sync_words.remove(&key).unwrap_or_default();
        let (block, warp) = (self.block, self.warp);
        let needs: Vec<Scope> = (sync_word.published.iter())
            .map(|(_, of, _)| of.map_or(Scope::Gpu, |of| self.distance(of, block)))
            .collect();
        let now = self.now();
        let time = now.time;
        let this = &mut now.lanes[lane];
        if kind.reads {
            let reaching = sync_word.published.iter().zip(needs);
            for ((_, _, gathered), need) in reaching.filter(|((of, ..), need)| of.min(&scope) >= need) {
                if kind.acquires {
                    Rc::make_mut(&mut this.view).join(&gathered.view);
                } else {
                    Rc::make_mut(this.pending[need as usize].get_or_insert_default()).join(&gathered.view);
                }
            }
            Rc::make_mut(&mut this.view).fenced.join(&sync_word.fenced);
        }
        if kind.writes {
            if !kind.reads {
                sync_word = SyncWord::default();
            }
            let mut publish = |of: Scope, view: &Rc<ThreadView>| {
                let entry = sync_word
                    .published
                    .iter_mut()
                    .find(|(scope, from, _)| *scope == of && (of == Scope::Gpu || *from == Some(block)));
                match entry {
                    Some((_, from, gathered)) => {
                        *from = from.filter(|&from| from == block);
                        gathered.join(view);
                    }
                    None => {
                        let mut gathered = Gathered::default();
                        gathered.join(view);
                        sync_word.published.push((of, Some(block), gathered));
                    }
                }
            };
            if kind.releases {
                let mut view = ThreadView::clone(&this.view);
                view.known.add(warp.into(), 1 << lane, time);
                publish(scope, &Rc::new(view));
            }
            for of in [Scope::Block, Scope::Cluster, Scope::Gpu].into_iter().filter(|of| *of <= scope) {
                if let Some(view) = &this.released[of as usize] {
                    publish(of, view);
                }
            }
            sync_word.fenced.join(&this.view.fenced);
            now.time += 1;
        }
        self.sync_words.insert(key, sync_word);
    }

    /// Adds what lanes know, and their accesses until now.
    pub(crate) fn release(&mut self, lanes: u32, into: &mut Gathered) {
        let who = self.warp.into();
        let now = self.now();
        lanes_of(lanes).for_each(|lane| into.join(&now.lanes[lane].view));
        into.view.known.add(who, lanes, now.time);
        now.time += 1;
    }

    /// Makes what others have released known to lanes.
    pub(crate) fn acquire(&mut self, lanes: u32, view: &ThreadView) {
        let mut made: Vec<[Rc<ThreadView>; 2]> = Vec::new();
        for lane in lanes_of(lanes) {
            let this = &mut self.now().lanes[lane].view;
            let known = made.iter().find(|[old, _]| Rc::ptr_eq(old, this)).map(|[_, new]| new.clone());
            *this = known.unwrap_or_else(|| {
                let old = this.clone();
                let mut new = ThreadView::clone(&old);
                new.join(view);
                let new = Rc::new(new);
                made.push([old, new.clone()]);
                new
            });
        }
    }

    /// Makes accesses of an agent until a time known to lanes.
    pub(crate) fn acquire_agent(&mut self, lanes: u32, agent: u64, of_lanes: u32, time: u32) {
        let mut view = ThreadView::default();
        view.known.add(agent, of_lanes, time);
        self.acquire(lanes, &view);
    }

    /// Lanes of a warp meet.
    pub(crate) fn meet(&mut self, lanes: u32) {
        let mut gathered = Gathered::default();
        self.release(lanes, &mut gathered);
        let view = Rc::new(gathered.view);
        lanes_of(lanes).for_each(|lane| self.now().lanes[lane].view = view.clone());
    }

    /// Lanes arrive at a barrier of their block.
    pub(crate) fn arrive(&mut self, lanes: u32, barrier: usize) {
        let mut gathered = self.barriers.remove(&(self.block, barrier)).unwrap_or_default();
        self.release(lanes, &mut gathered);
        self.barriers.insert((self.block, barrier), gathered);
    }

    /// The threads that wait at a barrier of the running block go on: the first thread of each warp, and
    /// lanes. They have arrived, so the barrier's view contains theirs.
    pub(crate) fn open(&mut self, barrier: usize, waiting: impl Iterator<Item = (u32, u32)>) {
        let gathered = self.barriers.remove(&(self.block, barrier)).unwrap_or_default();
        let view = Rc::new(gathered.view);
        for (first_thread, lanes) in waiting {
            let warp = (self.block << WARP_BITS) + first_thread / LANES as u32;
            let lanes_of_warp = &mut self.warps.get_mut(&warp).expect("a warp of the block").lanes;
            lanes_of(lanes).for_each(|lane| lanes_of_warp[lane].view = view.clone());
        }
    }

    /// Lanes arrive at the cluster's barrier.
    pub(crate) fn arrive_at_cluster(&mut self, lanes: u32, releases: bool) {
        let cluster = self.block >> BLOCK_BITS;
        let phase = self.now().arrivals[lanes.trailing_zeros() as usize];
        lanes_of(lanes).for_each(|lane| self.now().arrivals[lane] += 1);
        if releases {
            let mut gathered = self.clusters.remove(&(cluster, phase)).unwrap_or_default();
            self.release(lanes, &mut gathered);
            self.clusters.insert((cluster, phase), gathered);
        }
        // All threads have passed the phase before the last one.
        if let Some(passed) = phase.checked_sub(2) {
            self.clusters.remove(&(cluster, passed));
        }
    }

    /// Lanes have waited at the cluster's barrier.
    pub(crate) fn pass_cluster(&mut self, lanes: u32) {
        let cluster = self.block >> BLOCK_BITS;
        let phase = self.now().arrivals[lanes.trailing_zeros() as usize].saturating_sub(1);
        if let Some(gathered) = self.clusters.remove(&(cluster, phase)) {
            self.acquire(lanes, &gathered.view);
            self.clusters.insert((cluster, phase), gathered);
        }
    }

    pub(crate) fn fence(&mut self, lanes: u32, fence: Fence) {
        let warp = self.warp;
        let now = self.warps.get_mut(&warp).expect("the running warp");
        for lane in lanes_of(lanes) {
            let this = &mut now.lanes[lane];
            match fence {
                Fence::Thread { scope, acquires, releases, is_sc } => {
                    let view = Rc::make_mut(&mut this.view);
                    if acquires {
                        let pending = this.pending[..=scope as usize].iter_mut().filter_map(Option::take);
                        pending.for_each(|pending| view.join(&pending));
                    }
                    if is_sc && scope == Scope::Gpu {
                        view.fenced.join(&view.known);
                        view.fenced.add(warp.into(), 1 << lane, now.time);
                        view.known.join(&view.fenced);
                    }
                    if releases {
                        let mut view = view.clone();
                        view.known.add(warp.into(), 1 << lane, now.time);
                        let view = Rc::new(view);
                        this.released[..=scope as usize].fill(Some(view));
                    }
                }
                Fence::Proxy(spaces) => {
                    let ThreadView { known, proxied, .. } = Rc::make_mut(&mut this.view);
                    for (proxied, _) in proxied.iter_mut().zip(spaces).filter(|(_, is_meant)| *is_meant) {
                        proxied.join(known);
                        proxied.add(warp.into(), 1 << lane, now.time);
                    }
                }
                Fence::Mbarriers => {
                    let own = self.mbarriers.values_mut().filter(|of| of.initialiser == (warp, lane));
                    own.for_each(|mbarrier| mbarrier.is_fenced = true);
                }
            }
        }
        now.time += 1;
    }
}
