//! The state that a step reads and writes: a warp's registers and the memory that its threads can access.

use crate::fault::{FaultKind, Outcome, ThreadFault};
use crate::kernel::cluster::Cluster;
use crate::kernel::{Code, Execute};
use crate::memory::{Bytes, Local, Memory};
use crate::races::Races;
use crate::random::Random;
use crate::registers::{LANES, Lane, Lanes, Marks, RegisterSlot, Registers, uninitialised};
use pulp::{Arch, WithSimd};
use std::cell::Cell;
use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The CPU's widest vector unit, detected on first use.
static ARCH: LazyLock<Arch> = LazyLock::new(Arch::new);

/// Runs `body`, compiled for the CPU's vector unit.
#[inline(always)]
pub(crate) fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    ARCH.dispatch(body)
}

/// Runs an operation on the CPU's widest vector unit.
pub(crate) fn dispatch(operation: impl WithSimd<Output = ()>) {
    ARCH.dispatch(operation);
}

/// A source operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source<T> {
    Slot(RegisterSlot),
    Constant(T),
    /// A predefined register: a function of the thread.
    Special(fn(&WarpContext<'_>, usize) -> u32),
}

/// A predicate operand.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Condition {
    Register { slot: RegisterSlot, is_negated: bool },
    Constant(bool),
}

/// A launch of a kernel.
pub(crate) struct Launch<'a> {
    pub(crate) code: &'a Arc<Code>,
    pub(crate) memory: &'a Memory,
    pub(crate) parameters: Local,
    pub(crate) grid: [u32; 3],
    /// Threads per block.
    pub(crate) block: [u32; 3],
    /// Blocks per cluster.
    pub(crate) cluster: [u32; 3],
    /// Static and dynamic shared memory of a block.
    pub(crate) shared_bytes: u64,
    /// True while the launch before it runs, if this one need not wait for its end.
    pub(crate) may_wait: Cell<bool>,
}

impl Launch<'_> {
    /// Notes the launch; false if it repeats another one of this process, as those do that measure a kernel's
    /// time.
    pub(crate) fn note_first(&self) -> bool {
        static SEEN: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());
        let Launch { code, parameters, grid, block, cluster, shared_bytes, .. } = self;
        let mut hash = DefaultHasher::new();
        (&code.name, Arc::as_ptr(code) as usize, code.instructions()).hash(&mut hash);
        (grid, block, cluster, shared_bytes).hash(&mut hash);
        let bytes = parameters.bytes(0, parameters.len() as u64).expect("all of them");
        (0..bytes.len()).for_each(|n| bytes.read::<1>(n).hash(&mut hash));
        SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(hash.finish())
    }

    /// The kernel and a source line of it, in words.
    pub(crate) fn place(&self, location: u32) -> String {
        format!("kernel {}, {}", self.code.name, self.code.describe(location))
    }

    /// The number of clusters.
    pub(crate) fn clusters(&self) -> u32 {
        self.grid.iter().zip(self.cluster).map(|(grid, cluster)| grid / cluster).product()
    }
}

/// Position of a warp in its launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    /// The block within the grid.
    pub(crate) block: [u32; 3],
    /// Index of its first thread within the block.
    pub(crate) first_thread: u32,
    /// Rank of the block in its cluster.
    pub(crate) rank: u32,
}

/// The state of a warp that steps change.
pub(crate) struct WarpContext<'a> {
    pub(crate) launch: &'a Launch<'a>,
    pub(crate) registers: &'a mut Registers,
    /// The lanes that execute the step.
    pub(crate) active: u32,
    pub(crate) position: Position,
    /// Shared memory of the blocks of the cluster, by rank.
    pub(crate) shared: &'a [Local],
    pub(crate) cluster: &'a mut Cluster,
    /// Local memory of all lanes, one after the other.
    pub(crate) local: &'a Local,
    pub(crate) asynchronous: &'a mut Asynchronous,
    pub(crate) random: &'a mut Random,
    /// The detector of races, if the settings ask for it.
    pub(crate) races: Option<&'a mut Races>,
    /// True if a step changed global or shared memory, which may end the loop of a spinning warp.
    pub(crate) changed: bool,
    /// True if a step changed local memory.
    pub(crate) changed_local: bool,
}

/// Asynchronous work that a warp has not waited for.
#[derive(Default)]
pub(crate) struct Asynchronous {
    /// Copies to shared memory, by lane.
    pub(crate) copies: Vec<CommitGroups<PendingCopy>>,
    /// Bulk copies to global memory, by lane.
    pub(crate) bulk: Vec<CommitGroups<BulkStore>>,
    /// `wgmma`.
    pub(crate) wgmma: CommitGroups<Wgmma>,
    /// A hash of all `wgmma` that the warp has executed, and the source line of the last one.
    pub(crate) executed: (u64, u32),
    /// Lanes that have arrived at the cluster's barrier without waiting there, and those of them that have
    /// arrived in the current phase.
    pub(crate) arrived: u32,
    pub(crate) arrived_now: u32,
    /// Maximum registers of a thread, if `setmaxnreg` has set them.
    pub(crate) registers: Option<u32>,
}

/// Asynchronous work of one kind: committed groups, and work that is not committed yet.
pub(crate) struct CommitGroups<T> {
    pub(crate) committed: VecDeque<Vec<T>>,
    pub(crate) open: Vec<T>,
}

impl<T> Default for CommitGroups<T> {
    fn default() -> CommitGroups<T> {
        CommitGroups { committed: VecDeque::new(), open: Vec::new() }
    }
}

impl<T> CommitGroups<T> {
    pub(crate) fn commit(&mut self) {
        self.committed.push_back(std::mem::take(&mut self.open));
    }

    /// Takes the oldest group if there are more than `left`.
    pub(crate) fn pop(&mut self, left: usize) -> Option<Vec<T>> {
        if self.committed.len() > left { self.committed.pop_front() } else { None }
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        self.committed.iter().flatten().chain(&self.open)
    }
}

/// A lane's groups, of which there are none before the first use.
pub(crate) fn groups<T>(groups: &mut Vec<CommitGroups<T>>, lane: usize) -> &mut CommitGroups<T> {
    groups.resize_with(LANES, CommitGroups::default);
    &mut groups[lane]
}

/// A warp's part of a `wgmma`.
pub(crate) struct Wgmma {
    pub(crate) compute: Arc<dyn Fn(&mut WarpContext<'_>, &Wgmma) -> Outcome + Send + Sync>,
    pub(crate) accumulators: Arc<[RegisterSlot]>,
    /// The registers of A, if it is not in shared memory, and their values.
    pub(crate) a_registers: Vec<(RegisterSlot, Lanes<u32>)>,
    /// True if it adds to the accumulators.
    pub(crate) scale_d: bool,
    /// log2 of the chunks that the descriptors of A and B permute.
    pub(crate) swizzle_bits: [u32; 2],
    /// Units of shared memory that it reads.
    pub(crate) units: Vec<u16>,
    pub(crate) has_run: bool,
    pub(crate) location: u32,
}

/// A bulk copy to global memory that a lane has issued.
#[derive(Clone, Copy)]
pub(crate) struct BulkStore {
    pub(crate) number: u64,
    /// True if the lane has waited until its source was read.
    pub(crate) is_read: bool,
    pub(crate) location: u32,
}

/// An asynchronous copy to shared memory.
#[derive(Clone, Debug)]
pub(crate) struct PendingCopy {
    pub(crate) target: u64,
    pub(crate) source: u64,
    pub(crate) bytes: usize,
    /// Bytes to copy; the rest is zero-filled.
    pub(crate) source_bytes: usize,
}

impl WarpContext<'_> {
    #[inline(always)]
    pub(crate) fn read<T: Lane>(&self, source: Source<T>) -> Lanes<T> {
        match source {
            Source::Slot(slot) => self.registers.read(slot),
            Source::Constant(value) => [value; LANES],
            Source::Special(of) => std::array::from_fn(|lane| T::from_u64(of(self, lane).into())),
        }
    }

    /// The lanes in which an operand of arithmetic is unset. A fault if an active lane has uninitialised
    /// bytes from global memory or asynchronous work.
    #[inline(always)]
    pub(crate) fn unset_of<T: Lane>(&self, source: Source<T>) -> Outcome<u32> {
        let Source::Slot(slot) = source else { return Ok(0) };
        let marked = self.registers.marked::<T>(slot) & self.active;
        if marked != 0 {
            let strict = self.registers.marks::<T>(slot).strict & marked;
            if strict != 0 {
                uninitialised(strict)?;
            }
        }
        Ok(marked)
    }

    /// Reads an operand that must be initialised, such as an address or a value for other lanes.
    #[inline(always)]
    pub(crate) fn value<T: Lane>(&self, source: Source<T>) -> Outcome<Lanes<T>> {
        if let Source::Slot(slot) = source {
            let marked = self.registers.marked::<T>(slot) & self.active;
            if marked != 0 {
                uninitialised(marked)?;
            }
        }
        Ok(self.read(source))
    }

    /// True if an active lane of an operand that is only moved has marks.
    #[inline(always)]
    pub(crate) fn is_marked<T: Lane>(&self, source: Source<T>) -> bool {
        matches!(source, Source::Slot(slot) if self.registers.marked::<T>(slot) & self.active != 0)
    }

    /// The marks of an operand that is only moved.
    pub(crate) fn marks<T: Lane>(&self, source: Source<T>) -> Marks {
        if let Source::Slot(slot) = source { self.registers.marks::<T>(slot) } else { Marks::NONE }
    }

    /// Writes a result; the lanes in `unset` become unset.
    #[inline(always)]
    pub(crate) fn write<T: Lane>(&mut self, slot: RegisterSlot, values: &Lanes<T>, unset: u32) {
        self.registers.write(slot, values, self.active);
        if unset != 0 {
            self.registers.unset::<T>(slot, unset & self.active);
        }
    }

    /// Writes a result with marks.
    pub(crate) fn write_marked<T: Lane>(&mut self, slot: RegisterSlot, values: &Lanes<T>, marks: &Marks) {
        self.registers.write(slot, values, self.active);
        if marks.unwritten != Marks::NONE.unwritten {
            self.registers.mark::<T>(slot, marks, self.active);
        }
    }

    /// The lanes in which a condition holds, and the lanes in which it is unset, as bit masks.
    #[inline(always)]
    pub(crate) fn lanes(&self, condition: Condition) -> (u32, u32) {
        match condition {
            Condition::Constant(holds) => (if holds { u32::MAX } else { 0 }, 0),
            Condition::Register { slot, is_negated } => {
                let (lanes, unset) = self.registers.predicate(slot);
                (if is_negated { !lanes } else { lanes }, unset)
            }
        }
    }

    /// The active lanes in which a branch condition holds. A fault if it is unset in an active lane.
    #[inline(always)]
    pub(crate) fn decided(&self, condition: Condition) -> Outcome<u32> {
        let (lanes, unset) = self.lanes(condition);
        if unset & self.active != 0 {
            uninitialised(unset & self.active)?;
        }
        Ok(lanes & self.active)
    }

    #[inline(always)]
    pub(crate) fn write_predicate(&mut self, slot: RegisterSlot, lanes: u32, unset: u32) {
        self.registers.write_predicate(slot, lanes, unset, self.active);
    }

    /// The block's own shared memory.
    #[inline(always)]
    pub(crate) fn own_shared(&self) -> &Local {
        &self.shared[self.position.rank as usize]
    }

    /// Shows the detector of races, if any, what the active lanes do.
    #[inline(always)]
    pub(crate) fn observe(&mut self, see: impl FnOnce(&mut Races, u32)) {
        if let Some(races) = &mut self.races {
            see(races, self.active);
        }
    }

    /// The fault of the first active lane.
    pub(crate) fn fault<T>(&self, kind: FaultKind, problem: impl Into<String>) -> Outcome<T> {
        Err(ThreadFault::new(self.active.trailing_zeros() % LANES as u32, kind, problem))
    }

    /// Thread `lane` of the warp along x, y, z.
    pub(crate) fn thread(&self, lane: usize) -> [u32; 3] {
        let [x, y, _] = self.launch.block;
        let number = self.position.first_thread + lane as u32;
        [number % x, number / x % y, number / x / y]
    }

    /// The bytes of a lane's local memory.
    pub(crate) fn local_bytes(&self, lane: usize, offset: u64, bytes: u64) -> Option<Bytes<'_>> {
        let of_lane = self.launch.code.local_bytes;
        let is_within = offset <= of_lane && bytes <= of_lane - offset;
        if is_within { self.local.bytes(lane as u64 * of_lane + offset, bytes) } else { None }
    }
}

/// A step that computes a result of one operand, lane by lane.
pub(crate) fn map1<A: Lane, R: Lane>(
    target: RegisterSlot,
    a: Source<A>,
    f: impl Fn(A) -> R + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx| {
        let unset = cx.unset_of(a)?;
        vectorized(
            #[inline(always)]
            || {
                let (a, mut result) = (cx.read(a), [R::default(); LANES]);
                for lane in 0..LANES {
                    result[lane] = f(a[lane]);
                }
                cx.write(target, &result, unset);
            },
        );
        Ok(())
    })
}

/// As [`map1`], for two operands.
pub(crate) fn map2<A: Lane, B: Lane, R: Lane>(
    target: RegisterSlot,
    (a, b): (Source<A>, Source<B>),
    f: impl Fn(A, B) -> R + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx| {
        let unset = cx.unset_of(a)? | cx.unset_of(b)?;
        vectorized(
            #[inline(always)]
            || {
                let (a, b, mut result) = (cx.read(a), cx.read(b), [R::default(); LANES]);
                for lane in 0..LANES {
                    result[lane] = f(a[lane], b[lane]);
                }
                cx.write(target, &result, unset);
            },
        );
        Ok(())
    })
}

/// As [`map1`], for three operands.
pub(crate) fn map3<A: Lane, B: Lane, C: Lane, R: Lane>(
    target: RegisterSlot,
    (a, b, c): (Source<A>, Source<B>, Source<C>),
    f: impl Fn(A, B, C) -> R + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx| {
        let unset = cx.unset_of(a)? | cx.unset_of(b)? | cx.unset_of(c)?;
        vectorized(
            #[inline(always)]
            || {
                let (a, b, c, mut result) = (cx.read(a), cx.read(b), cx.read(c), [R::default(); LANES]);
                for lane in 0..LANES {
                    result[lane] = f(a[lane], b[lane], c[lane]);
                }
                cx.write(target, &result, unset);
            },
        );
        Ok(())
    })
}

/// A step that computes a predicate of two operands, lane by lane.
pub(crate) fn test2<A: Lane>(
    target: RegisterSlot,
    (a, b): (Source<A>, Source<A>),
    f: impl Fn(A, A) -> bool + Send + Sync + 'static,
) -> Execute {
    Box::new(move |cx| {
        let unset = cx.unset_of(a)? | cx.unset_of(b)?;
        vectorized(
            #[inline(always)]
            || {
                let (a, b, mut lanes) = (cx.read(a), cx.read(b), 0u32);
                for lane in 0..LANES {
                    lanes |= u32::from(f(a[lane], b[lane])) << lane;
                }
                cx.write_predicate(target, lanes, unset);
            },
        );
        Ok(())
    })
}
