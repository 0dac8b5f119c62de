//! The blocks of a cluster as asynchronous work sees them: mbarriers, bulk copies under way, and the bytes of
//! shared memory that such work still reads.
//!
//! A copy's target counts as never written until the copy has run. The 16 bytes around what a copy or a
//! `wgmma` reads have a reader until the kernel has waited for it; writing them before is a fault.

pub(crate) use super::mbarrier::Mbarrier;
use crate::memory::{Bytes, Local, Memory};
use std::collections::BTreeMap;

/// Position of the block's rank, plus one, in an address of a cluster's shared memory.
const RANK_SHIFT: u32 = 24;
/// The content of an mbarrier in memory, which counts as never written.
const MBARRIER: [u8; 8] = *b"mbarrier";
fn is_mbarrier(bytes: Bytes<'_>) -> bool {
    bytes.read::<8>(0) == MBARRIER && bytes.marks::<8>(0) == [0; 8]
}

/// Unit of shared memory that has readers.
pub(crate) const UNIT: u64 = 16;

/// A place in the shared memory of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SharedPlace {
    pub(crate) rank: u32,
    pub(crate) offset: u64,
}

impl SharedPlace {
    /// The place of an address that a block uses. An address without a rank is in the block's own memory.
    pub(crate) fn locate(address: u64, own_rank: u32) -> SharedPlace {
        let (rank, offset) = ((address >> RANK_SHIFT) as u32, address & ((1 << RANK_SHIFT) - 1));
        SharedPlace { rank: rank.checked_sub(1).unwrap_or(own_rank), offset }
    }

    /// The address by which all blocks of the cluster reach the place.
    pub(crate) fn address(self) -> u64 {
        (u64::from(self.rank) + 1) << RANK_SHIFT | self.offset
    }
}

/// Reason why lanes wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Awaited {
    /// The end of a phase.
    Mbarrier(SharedPlace, u64),
    /// All threads of the cluster.
    Cluster,
    /// Registers that other warps of the block give back.
    Registers,
    /// The end of the launch before this one.
    Launch,
}

/// Something that lanes may wait for and that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClusterEvent {
    Mbarrier(SharedPlace),
    Cluster,
    /// Registers of the block of this rank.
    Registers(u32),
    Launch,
}

/// Reads under way of a unit of shared memory: their number, and the source line of one.
#[derive(Clone, Copy, Default)]
struct Readers {
    count: u16,
    location: u32,
}

/// A unit of shared memory as a tensor copy wrote it.
#[derive(Clone, Copy)]
struct Swizzled {
    bits: u32,
    content: [u8; UNIT as usize],
    location: u32,
}

/// A block's state.
#[derive(Default)]
pub(crate) struct BlockState {
    mbarriers: BTreeMap<u64, Mbarrier>,
    readers: Vec<Readers>,
    swizzled: Vec<Option<Swizzled>>,
    /// Registers that warps have given back.
    pub(crate) free_registers: u32,
    pub(crate) has_exited: bool,
    /// True if the block no longer keeps the next launch from beginning.
    pub(crate) has_launched_dependents: bool,
}

/// Bytes that a copy moves at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyPiece {
    /// An address in global memory, or none if zeros are written.
    pub(crate) global: Option<u64>,
    /// An offset in the block's shared memory.
    pub(crate) shared: u64,
    pub(crate) bytes: u64,
}

/// Effect of the end of a copy, which also gives its direction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Completion {
    /// A copy to shared memory: an mbarrier of the same block receives its bytes.
    Bytes(SharedPlace),
    /// A copy to global memory, or a reduction.
    Group(Reduction),
}

/// How elements of a copy to global memory change those that are there; `None` replaces them.
pub(crate) type Reduction = Option<fn(Bytes<'_>, Bytes<'_>) -> Result<(), String>>;

/// A copy that was issued and has not run.
pub(crate) struct BulkCopy {
    pub(crate) number: u64,
    /// Rank of the block whose shared memory it moves.
    pub(crate) rank: u32,
    pub(crate) pieces: Vec<CopyPiece>,
    /// log2 of the chunks that a tensor copy permutes.
    pub(crate) swizzle_bits: Option<u32>,
    /// The range of shared memory that the pieces fill.
    pub(crate) span: (u64, u64),
    pub(crate) completion: Completion,
    /// The source's content, once the copy has read it without writing it.
    pub(crate) taken: Option<Vec<Local>>,
    pub(crate) location: u32,
    /// The thread that issued it: rank of the block, and index in the block.
    pub(crate) thread: (u32, u32),
}

/// The state of a cluster.
pub(crate) struct Cluster {
    pub(crate) blocks: Vec<BlockState>,
    /// Copies under way.
    pub(crate) copies: Vec<BulkCopy>,
    next_copy: u64,
    /// Events since the scheduler last looked.
    pub(crate) events: Vec<ClusterEvent>,
    /// Units with readers, in all blocks.
    read_units: u64,
    /// Threads that have not exited, and those of them that have arrived at the cluster's barrier.
    pub(crate) live_threads: u32,
    pub(crate) arrived_threads: u32,
}

impl Cluster {
    pub(crate) fn new(blocks: usize, threads: u32) -> Cluster {
        Cluster {
            blocks: (0..blocks).map(|_| BlockState::default()).collect(),
            copies: Vec::new(),
            next_copy: 0,
            events: Vec::new(),
            read_units: 0,
            live_threads: threads,
            arrived_threads: 0,
        }
    }

    /// Makes the bytes at a place an mbarrier.
    pub(crate) fn init(&mut self, at: SharedPlace, bytes: Bytes<'_>, arrivals: u32) -> Result<(), String> {
        let old = self.blocks[at.rank as usize].mbarriers.insert(at.offset, Mbarrier::new(arrivals)?);
        if old.is_some() && is_mbarrier(bytes) {
            return Err(format!(
                "initialises the mbarrier at byte {} of shared memory a second time",
                at.offset
            ));
        }
        bytes.write_marked(0, MBARRIER, [0; 8]);
        Ok(())
    }

    pub(crate) fn invalidate(&mut self, at: SharedPlace) {
        self.blocks[at.rank as usize].mbarriers.remove(&at.offset);
    }

    /// The mbarrier at a place.
    pub(crate) fn mbarrier(&mut self, shared: &[Local], at: SharedPlace) -> Result<&mut Mbarrier, String> {
        let SharedPlace { rank, offset } = at;
        let cluster = self.blocks.len();
        let Some(block) = self.blocks.get_mut(rank as usize) else {
            return Err(format!("uses an mbarrier of block {rank} of a cluster of {cluster}"));
        };
        if block.has_exited {
            return Err(format!("uses an mbarrier of block {rank} of its cluster, which has exited"));
        }
        let is_whole = shared[rank as usize].bytes(offset, 8).is_some_and(is_mbarrier);
        match block.mbarriers.get_mut(&offset) {
            Some(_) if !is_whole => {
                Err(format!("uses the mbarrier at byte {offset} of shared memory, which was overwritten"))
            }
            Some(mbarrier) => Ok(mbarrier),
            None => Err(format!(
                "uses byte {offset} of shared memory as an mbarrier, which it was not initialised as"
            )),
        }
    }

    /// Changes an mbarrier; `change` returns true if it ends the phase.
    pub(crate) fn change(
        &mut self,
        shared: &[Local],
        at: SharedPlace,
        change: impl FnOnce(&mut Mbarrier) -> Result<bool, String>,
    ) -> Result<(), String> {
        if change(self.mbarrier(shared, at)?)? {
            self.events.push(ClusterEvent::Mbarrier(at));
        }
        Ok(())
    }

    /// Describes an mbarrier's missing arrivals and bytes.
    pub(crate) fn lacks(&self, at: SharedPlace) -> String {
        let found = self.blocks[at.rank as usize].mbarriers.get(&at.offset);
        found.map_or("it is no longer there".into(), Mbarrier::lacks)
    }

    /// Adds a reader to units of a block's shared memory.
    pub(crate) fn add_readers(&mut self, rank: u32, units: &[u16], location: u32) {
        let readers = &mut self.blocks[rank as usize].readers;
        for &unit in units {
            let unit = usize::from(unit);
            if unit >= readers.len() {
                readers.resize(unit + 256, Readers::default());
            }
            readers[unit].count += 1;
            readers[unit].location = location;
        }
        self.read_units += units.len() as u64;
    }

    pub(crate) fn remove_readers(&mut self, rank: u32, units: &[u16]) {
        for &unit in units {
            self.blocks[rank as usize].readers[usize::from(unit)].count -= 1;
        }
        self.read_units -= units.len() as u64;
    }

    /// True if no asynchronous work reads shared memory.
    #[inline(always)]
    pub(crate) fn has_no_readers(&self) -> bool {
        self.read_units == 0
    }

    /// The source line of asynchronous work that reads some of these bytes.
    pub(crate) fn reader(&self, at: SharedPlace, bytes: u64) -> Option<u32> {
        let units = (at.offset / UNIT) as usize..(at.offset + bytes).div_ceil(UNIT) as usize;
        let readers = self.blocks[at.rank as usize].readers.iter();
        let mut of_bytes = readers.take(units.end).skip(units.start);
        of_bytes.find(|readers| readers.count > 0).map(|readers| readers.location)
    }

    /// The source line of a copy under way that writes some of these bytes of shared memory.
    pub(crate) fn writer(&self, at: SharedPlace, bytes: u64) -> Option<u32> {
        let writes = |copy: &&BulkCopy| {
            let (start, end) = copy.span;
            let overlaps = start < at.offset + bytes && at.offset < end;
            copy.rank == at.rank && overlaps && !matches!(copy.completion, Completion::Group(_))
        };
        self.copies.iter().find(writes).map(|copy| copy.location)
    }

    /// Issues a copy; returns its number.
    pub(crate) fn issue(&mut self, copy: BulkCopy) -> u64 {
        self.next_copy += 1;
        if let Completion::Group(_) = copy.completion {
            self.add_readers(copy.rank, &copy.units(), copy.location);
        }
        self.copies.push(BulkCopy { number: self.next_copy, ..copy });
        self.next_copy
    }

    /// Runs a copy under way. `place` says in words where a source line is.
    pub(crate) fn run_copy(
        &mut self,
        memory: &Memory,
        shared: &[Local],
        index: usize,
        place: &dyn Fn(u32) -> String,
    ) -> Result<(), String> {
        let mut copy = self.copies.swap_remove(index);
        let own = &shared[copy.rank as usize];
        match copy.completion {
            Completion::Group(reduction) => {
                if copy.taken.is_none() {
                    self.take(&mut copy, shared);
                }
                for (piece, from) in copy.pieces.iter().zip(copy.taken.iter().flatten()) {
                    let Some(address) = piece.global else { continue };
                    let to = memory.bytes(address, piece.bytes).ok_or("a copy's target was freed")?;
                    let from = from.bytes(0, piece.bytes).expect("the piece's bytes");
                    match reduction {
                        Some(reduce) => reduce(to, from)?,
                        None => {
                            if !from.is_written() {
                                memory.note_unwritten(address, piece.bytes, || {
                                    format!("a bulk copy: {}, thread {}", place(copy.location), copy.thread.1)
                                });
                            }
                            to.copy_from(from);
                        }
                    }
                }
                Ok(())
            }
            Completion::Bytes(at) => {
                let mut total = 0;
                for piece in &copy.pieces {
                    let to = own.bytes(piece.shared, piece.bytes).expect("checked when it was issued");
                    match piece.global {
                        None => to.fill(0),
                        Some(address) => {
                            to.copy_from(
                                memory.bytes(address, piece.bytes).ok_or("a copy's source was freed")?,
                            );
                        }
                    }
                    total += piece.bytes;
                }
                self.note_swizzle(&copy, own);
                self.change(shared, at, |barrier| barrier.receive(total as i64))
            }
        }
    }

    /// Notes by which swizzle a tensor copy has written shared memory.
    fn note_swizzle(&mut self, copy: &BulkCopy, shared: &Local) {
        let Some(bits) = copy.swizzle_bits else { return };
        let swizzled = &mut self.blocks[copy.rank as usize].swizzled;
        for unit in (copy.span.0 / UNIT) as usize..(copy.span.1 / UNIT) as usize {
            if unit >= swizzled.len() {
                swizzled.resize(unit + 256, None);
            }
            let content = shared.bytes(unit as u64 * UNIT, UNIT).expect("a unit of the copy").read(0);
            swizzled[unit] = Some(Swizzled { bits, content, location: copy.location });
        }
    }

    /// The swizzle and the source line of the tensor copy that wrote a unit with this content, if that
    /// swizzle is another one.
    pub(crate) fn other_swizzle(
        &self,
        rank: u32,
        unit: u16,
        bits: u32,
        content: [u8; 16],
    ) -> Option<(u32, u32)> {
        let written = (*self.blocks[rank as usize].swizzled.get(usize::from(unit))?)?;
        let is_other = written.bits != bits && written.content == content;
        is_other.then_some((written.bits, written.location))
    }

    /// Reads the source of a copy to global memory, which the kernel may overwrite from then on.
    pub(crate) fn take(&mut self, copy: &mut BulkCopy, shared: &[Local]) {
        let own = &shared[copy.rank as usize];
        let taken = copy.pieces.iter().map(|piece| {
            let bytes = Local::new(piece.bytes as usize);
            let from = own.bytes(piece.shared, piece.bytes).expect("checked when it was issued");
            bytes.bytes(0, piece.bytes).expect("as many bytes").copy_from(from);
            bytes
        });
        copy.taken = Some(taken.collect());
        self.remove_readers(copy.rank, &copy.units());
    }

    /// Counts threads that arrive at the cluster's barrier or exit; the barrier opens once all have.
    pub(crate) fn settle_barrier(&mut self) {
        if self.arrived_threads > 0 && self.arrived_threads == self.live_threads {
            self.arrived_threads = 0;
            self.events.push(ClusterEvent::Cluster);
        }
    }
}

impl BulkCopy {
    /// The units of shared memory that it moves.
    fn units(&self) -> Vec<u16> {
        let units = self.pieces.iter().flat_map(|p| p.shared / UNIT..(p.shared + p.bytes).div_ceil(UNIT));
        units.map(|unit| unit as u16).collect()
    }
}
