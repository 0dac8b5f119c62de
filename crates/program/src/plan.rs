//! The arena planner: every value's place, before anything is allocated.
//!
//! Three regions: `State` (across steps: masters, moments, gradients, caches, constants), `Io` (what the host writes and reads) and
//! `Scratch` (within a phase). Two scratch values may share bytes only if every use of one happens before the first of the other
//! ([`Order`]), whatever lanes they run on.
//! Placement is greedy by size (Pisarchyk & Lee, "Efficient Memory Management for Deep Neural Net Inference", arXiv
//! 2001.03288, section 5.2): the largest buffer first, each at the lowest offset free of conflicts.

use crate::order::Order;
use crate::{Lane, MemoryTable, Program, Storage, ValueId};
use xtrain_tensor::host::ALIGN_BYTES;

/// Where every value of a program lives.
pub struct Plan {
    /// By value id. Nothing for a transient value that no instance uses.
    pub locations: Vec<Option<Location>>,
    /// Bytes of each region, in the order of [`Region`].
    pub region_bytes: [usize; 3],
    /// What the memory is for.
    pub memory: MemoryTable,
}

/// A span of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The region.
    pub region: Region,
    /// The first byte within the region; a multiple of 64.
    pub offset: usize,
    /// The length in bytes.
    pub bytes: usize,
}

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// Kept across steps and shared by programs.
    State,
    /// Written and read by the host, kept for the program.
    Io,
    /// Reused within a step, shared by programs.
    Scratch,
}

/// A span of scratch that holds one value, or several that took its place one after the other.
pub(crate) struct Buffer {
    pub(crate) bytes: usize,
    pub(crate) values: Vec<ValueId>,
    /// The first instance that writes it.
    pub(crate) first: usize,
    /// All instances that use it.
    pub(crate) users: Vec<usize>,
    pub(crate) offset: usize,
    /// By lane: the position after the last user, 0 without users.
    done: [u32; Lane::COUNT],
}

impl Plan {
    /// Plans `program`.
    ///
    /// # Panics
    /// If a transient value is read before it is written, or lives across phases: both are bugs of whoever built the program.
    pub fn of(program: &Program) -> Self {
        let order = Order::of(program);
        let mut locations = vec![None; program.values.len()];
        let mut region_bytes = [0usize; 3];
        let mut place = |region: Region, bytes: usize| {
            let total = &mut region_bytes[region as usize];
            let location = Location { region, offset: *total, bytes };
            *total += round_up(bytes);
            location
        };
        for id in program.ids() {
            let bytes = program.ty(id).bytes();
            locations[id.0 as usize] = match program.value(id).storage {
                Storage::State { .. } | Storage::Constant { .. } => Some(place(Region::State, bytes)),
                Storage::Input { .. } | Storage::Output { .. } => Some(place(Region::Io, bytes)),
                Storage::Transient => None,
            };
        }
        let mut buffers = buffers(program, &order);
        let scratch = assign(&mut buffers, &order);
        region_bytes[Region::Scratch as usize] = scratch;
        for b in &buffers {
            for v in &b.values {
                let location =
                    Location { region: Region::Scratch, offset: b.offset, bytes: program.ty(*v).bytes() };
                locations[v.0 as usize] = Some(location);
            }
        }
        let memory = MemoryTable::of(program, &buffers, region_bytes);
        Plan { locations, region_bytes, memory }
    }

    /// Where `value` lives.
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

pub(crate) fn round_up(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN_BYTES)
}

/// The scratch buffers: one a transient value, those joined that an op computes in place of a dying input.
fn buffers(program: &Program, order: &Order) -> Vec<Buffer> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); program.values.len()];
    for (i, instance) in program.instances.iter().enumerate() {
        let outputs = instance.outputs.iter().map(|o| o.value);
        for v in instance.inputs.iter().copied().chain(outputs).chain(instance.workspace.iter().copied()) {
            if users[v.0 as usize].last() != Some(&i) {
                users[v.0 as usize].push(i);
            }
        }
    }
    let transient = |v: ValueId| matches!(program.value(v).storage, Storage::Transient);
    let mut owner: Vec<Option<usize>> = vec![None; program.values.len()];
    let mut buffers: Vec<Buffer> = Vec::new();
    for (i, instance) in program.instances.iter().enumerate() {
        for v in instance.inputs.iter().filter(|&&v| transient(v)) {
            assert!(
                owner[v.0 as usize].is_some(),
                "{} at {} reads {v:?} before it is written",
                instance.code.op().name(),
                instance.origin
            );
        }
        let written = instance.outputs.iter().map(|o| o.value).chain(instance.workspace.iter().copied());
        for (k, v) in written.enumerate().filter(|&(_, v)| transient(v)) {
            if owner[v.0 as usize].is_some() {
                continue;
            }
            let source =
                instance.code.op().in_place().iter().find(|(o, _)| *o == k).map(|&(_, n)| instance.inputs[n]);
            let joined = source.and_then(|source| {
                let b = owner[source.0 as usize]?;
                let buffer = &buffers[b];
                let dies = buffer
                    .values
                    .iter()
                    .all(|w| users[w.0 as usize].iter().all(|&u| u == i || order.before(u, i)));
                let once = instance.inputs.iter().filter(|&&w| w == source).count() == 1;
                let fits = program.ty(source).bytes() == program.ty(v).bytes();
                (dies && once && fits).then_some(b)
            });
            let b = joined.unwrap_or_else(|| {
                let bytes = round_up(program.ty(v).bytes());
                buffers.push(Buffer {
                    bytes,
                    values: Vec::new(),
                    first: i,
                    users: Vec::new(),
                    offset: 0,
                    done: [0; Lane::COUNT],
                });
                buffers.len() - 1
            });
            owner[v.0 as usize] = Some(b);
            buffers[b].values.push(v);
            for &u in &users[v.0 as usize] {
                assert!(
                    program.instances[u].phase == instance.phase,
                    "{v:?} lives across phases; it must be state"
                );
                buffers[b].users.push(u);
                let done = &mut buffers[b].done[order.lane(u)];
                *done = (*done).max(order.position(u) + 1);
            }
        }
    }
    buffers
}

/// Gives every buffer an offset; returns the bytes of the region.
fn assign(buffers: &mut [Buffer], order: &Order) -> usize {
    let mut by_size: Vec<usize> = (0..buffers.len()).collect();
    by_size.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].bytes), buffers[b].first));
    let clocks: Vec<_> = buffers.iter().map(|b| order.clock(b.first)).collect();
    let precedes =
        |a: &Buffer, clock: &[u32; Lane::COUNT]| a.done.iter().zip(clock).all(|(done, seen)| done <= seen);
    // Placed buffers in the order of their offsets.
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for b in by_size {
        let mut offset = 0;
        for &other in &placed {
            let (this, that) = (&buffers[b], &buffers[other]);
            if that.offset >= offset + this.bytes {
                break;
            }
            if that.offset + that.bytes > offset
                && !precedes(that, &clocks[b])
                && !precedes(this, &clocks[other])
            {
                offset = that.offset + that.bytes;
            }
        }
        buffers[b].offset = offset;
        total = total.max(offset + buffers[b].bytes);
        let at = placed.partition_point(|&p| buffers[p].offset <= offset);
        placed.insert(at, b);
    }
    total
}
