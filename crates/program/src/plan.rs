//! The memory planner: it gives every value an offset before anything is allocated.
//!
//! Memory has four regions: `State` (across steps: masters, moments, gradients, caches, constants), `Io`
//! (inputs and outputs of the host), `Scratch` (within a phase) and, for a stage of a pipeline, `Slots` (from
//! the forward of a micro-batch to its backward). Two scratch values may share bytes only if every use of one
//! completes before the first use of the other starts ([`Order`]), in any lanes.
//!
//! Placement is greedy by size (Pisarchyk & Lee, "Efficient Memory Management for Deep Neural Net Inference",
//! arXiv 2001.03288, section 5.2): largest buffer first, each at the lowest offset without a conflict.

use crate::buffer::{Buffer, Clock, Holds, WorkspaceOf, round_up, scratch};
use crate::order::Order;
use crate::{MemoryTable, Program, Storage, ValueId};
use xtrain_tensor::TensorType;

/// The memory of a program: an offset for every value.
pub struct Plan {
    /// The location of each value, by id. `None` for a transient value that no instance uses.
    pub locations: Vec<Option<Location>>,
    /// The workspace of each instance's kernel.
    pub workspaces: Vec<Vec<(TensorType, Location)>>,
    /// Bytes of each region, in the order of [`Region`].
    pub region_bytes: [usize; Region::COUNT],
    /// Bytes of a slot of each chunk: [`Region::Slots`] has those of a chunk one after the other, and places
    /// in it are those in the first.
    pub slot_bytes: Vec<usize>,
    /// Bytes of the inputs, which precede the outputs in [`Region::Io`] and are copied as one.
    pub input_bytes: usize,
    /// The memory by purpose.
    pub memory: MemoryTable,
}

/// A span of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The region.
    pub region: Region,
    /// The first byte within the region; a multiple of [`ALIGN_BYTES`](xtrain_tensor::host::ALIGN_BYTES).
    pub offset: usize,
    /// The length in bytes.
    pub bytes: usize,
}

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// Keeps its contents across steps; programs share it.
    State,
    /// The host writes and reads it; each program has its own.
    Io,
    /// Reused within a step; programs share it.
    Scratch,
    /// Keeps what the backward of each micro-batch reads of its forward; each program has its own.
    Slots,
}

impl Region {
    /// The number of regions.
    pub const COUNT: usize = 4;
}

impl Plan {
    /// Plans `program` for a device whose kernels need `workspace`.
    ///
    /// # Panics
    /// If a transient value is read before it is written, or lives across phases: both are bugs of the code
    /// that built the program.
    pub fn new(program: &Program, workspace: &WorkspaceOf<'_>) -> Self {
        let order = Order::new(program);
        let mut locations = vec![None; program.values.len()];
        let mut region_bytes = [0usize; Region::COUNT];
        // Returns the end of the region.
        let mut place_all = |region: Region, is_in_region: fn(&Storage) -> bool| {
            let end = &mut region_bytes[region as usize];
            for id in program.ids().filter(|&id| is_in_region(&program.value(id).storage)) {
                let bytes = program.ty(id).bytes();
                locations[id.0 as usize] = Some(Location { region, offset: *end, bytes });
                *end += round_up(bytes);
            }
            *end
        };
        place_all(Region::State, |s| matches!(s, Storage::State { .. } | Storage::Constant { .. }));
        let input_bytes = place_all(Region::Io, |s| matches!(s, Storage::Input { .. }));
        place_all(Region::Io, |s| matches!(s, Storage::Output { .. }));
        let mut buffers = scratch(program, &order, workspace);
        let within = buffers.iter_mut().filter(|b| b.in_slots_of.is_none()).collect();
        region_bytes[Region::Scratch as usize] = assign(within, &order);
        let mut slot_bytes = vec![0; program.slots.len()];
        let mut begin = 0;
        for (chunk, (slots, bytes)) in program.slots.iter().zip(&mut slot_bytes).enumerate() {
            for buffer in buffers.iter_mut().filter(|b| b.in_slots_of == Some(chunk)) {
                buffer.offset = begin + *bytes;
                *bytes += buffer.bytes;
            }
            begin += slots * *bytes;
        }
        region_bytes[Region::Slots as usize] = begin;
        let mut workspaces = vec![Vec::new(); program.instances.len()];
        for b in &buffers {
            let region = if b.in_slots_of.is_some() { Region::Slots } else { Region::Scratch };
            let location = |bytes| Location { region, offset: b.offset, bytes };
            match &b.holds {
                Holds::Values(values) => {
                    values.iter().for_each(|v| {
                        locations[v.0 as usize] = Some(location(program.ty(*v).bytes()));
                    });
                }
                Holds::Workspace(ty) => workspaces[b.first].push((*ty, location(ty.bytes()))),
            }
        }
        let memory = MemoryTable::new(program, &buffers, &region_bytes);
        Plan { locations, workspaces, region_bytes, slot_bytes, input_bytes, memory }
    }

    /// The location of `value`.
    ///
    /// # Panics
    /// If it is transient and no instance uses it.
    pub fn location(&self, value: ValueId) -> Location {
        self.locations[value.0 as usize].unwrap_or_else(|| panic!("{value:?} is used by no instance"))
    }

    /// Bytes of all regions together.
    pub fn total_bytes(&self) -> usize {
        self.region_bytes.iter().sum()
    }
}

/// The buffers at one offset, in the order in which they are used: they share bytes, so one is used after the
/// other.
struct Slot {
    offset: usize,
    occupants: Vec<Occupant>,
}

/// A placed buffer: the time of its use, and its end in bytes.
struct Occupant {
    /// The clock of its first user.
    clock: Clock,
    /// The positions after its last users.
    done: Clock,
    end: usize,
}

/// Gives every buffer an offset; returns the bytes of the region.
fn assign(mut buffers: Vec<&mut Buffer>, order: &Order) -> usize {
    // Empty buffers need no place.
    let mut by_size: Vec<usize> = (0..buffers.len()).filter(|&b| buffers[b].bytes > 0).collect();
    by_size.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].bytes), buffers[b].first));
    // True if an instance with the clock `clock` starts after all instances before `done`.
    let precedes = |done: &Clock, clock: &Clock| done.iter().zip(clock).all(|(done, seen)| done <= seen);
    // By offset.
    let mut slots: Vec<Slot> = Vec::new();
    let mut total = 0;
    for b in by_size {
        let Buffer { bytes, first, done, .. } = *buffers[b];
        let clock = order.clock(first);
        let earlier = |occupants: &[Occupant]| occupants.partition_point(|o| precedes(&o.done, &clock));
        let mut offset = 0;
        for slot in &slots {
            if slot.offset >= offset + bytes {
                break;
            }
            let not_earlier = slot.occupants[earlier(&slot.occupants)..].iter();
            for conflicting in not_earlier.take_while(|o| !precedes(&done, &o.clock)) {
                offset = offset.max(conflicting.end);
            }
        }
        let index = slots.partition_point(|slot| slot.offset < offset);
        if slots.get(index).is_none_or(|slot| slot.offset > offset) {
            slots.insert(index, Slot { offset, occupants: Vec::new() });
        }
        let occupants = &mut slots[index].occupants;
        occupants.insert(earlier(occupants), Occupant { clock, done, end: offset + bytes });
        buffers[b].offset = offset;
        total = total.max(offset + bytes);
    }
    total
}
