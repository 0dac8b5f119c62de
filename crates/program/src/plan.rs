//! The arena planner: the place of every value, before anything is allocated.
//!
//! Three regions: `State` (across steps: masters, moments, gradients, caches, constants), `Io` (inputs and
//! outputs of the host) and `Scratch` (within a phase). Two scratch values may share bytes only if every use
//! of one happens before the first of the other ([`Order`]), whatever lanes they run on.
//!
//! Placement is greedy by size (Pisarchyk & Lee, "Efficient Memory Management for Deep Neural Net Inference",
//! arXiv
//! 2001.03288, section 5.2): the largest buffer first, each at the lowest offset free of conflicts.

use crate::order::Order;
use crate::{Lane, MemoryTable, Op, Program, Storage, ValueId};
use xtrain_tensor::TensorType;
use xtrain_tensor::host::ALIGN_BYTES;

/// The workspace of an op's kernel: the tensors that it uses while it runs besides its operands, given the op
/// and the types of its inputs. It differs between devices, and is known without one.
pub type WorkspaceOf<'a> = dyn Fn(&dyn Op, &[TensorType]) -> Vec<TensorType> + 'a;

/// The place of every value of a program.
pub struct Plan {
    /// By value id. None for a transient value that no instance uses.
    pub locations: Vec<Option<Location>>,
    /// By instance: the workspace of its kernel.
    pub workspaces: Vec<Vec<(TensorType, Location)>>,
    /// Bytes of each region, in the order of [`Region`].
    pub region_bytes: [usize; 3],
    /// Bytes of the inputs, which come first in [`Region::Io`] and are copied as one. The outputs follow.
    pub input_bytes: usize,
    /// The memory by purpose.
    pub memory: MemoryTable,
}

/// A span of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The region.
    pub region: Region,
    /// The first byte within the region; a multiple of [`ALIGN_BYTES`].
    pub offset: usize,
    /// The length in bytes.
    pub bytes: usize,
}

/// A part of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Region {
    /// Lives across steps, shared by programs.
    State,
    /// Written and read by the host; of one program.
    Io,
    /// Reused within a step, shared by programs.
    Scratch,
}

/// A span of scratch.
pub(crate) struct Buffer {
    pub(crate) bytes: usize,
    pub(crate) holds: Holds,
    /// The first instance that writes it.
    pub(crate) first: usize,
    /// All instances that use it.
    pub(crate) users: Vec<usize>,
    pub(crate) offset: usize,
    /// By lane: the position after the last user, 0 without users.
    done: Clock,
}

/// The contents of a span of scratch.
pub(crate) enum Holds {
    /// A value, or several of which each was computed in place of the one before.
    Values(Vec<ValueId>),
    /// A tensor of the workspace of the first user's kernel.
    Workspace(TensorType),
}

impl Plan {
    /// Plans `program` for a device whose kernels need `workspace`.
    ///
    /// # Panics If a transient value is read before it is written, or lives across phases: both are bugs of
    /// the code that built the program.
    pub fn of(program: &Program, workspace: &WorkspaceOf<'_>) -> Self {
        let order = Order::of(program);
        let mut locations = vec![None; program.values.len()];
        let mut region_bytes = [0usize; 3];
        // Returns where the region then ends.
        let mut place_all = |region: Region, lives_there: fn(&Storage) -> bool| {
            let end = &mut region_bytes[region as usize];
            for id in program.ids().filter(|&id| lives_there(&program.value(id).storage)) {
                let bytes = program.ty(id).bytes();
                locations[id.0 as usize] = Some(Location { region, offset: *end, bytes });
                *end += round_up(bytes);
            }
            *end
        };
        place_all(Region::State, |s| matches!(s, Storage::State { .. } | Storage::Constant { .. }));
        let input_bytes = place_all(Region::Io, |s| matches!(s, Storage::Input { .. }));
        place_all(Region::Io, |s| matches!(s, Storage::Output { .. }));
        let mut buffers = buffers(program, &order, workspace);
        let scratch = assign(&mut buffers, &order);
        region_bytes[Region::Scratch as usize] = scratch;
        let mut workspaces = vec![Vec::new(); program.instances.len()];
        for b in &buffers {
            let location = |bytes| Location { region: Region::Scratch, offset: b.offset, bytes };
            match &b.holds {
                Holds::Values(values) => {
                    values.iter().for_each(|v| {
                        locations[v.0 as usize] = Some(location(program.ty(*v).bytes()));
                    });
                }
                Holds::Workspace(ty) => workspaces[b.first].push((*ty, location(ty.bytes()))),
            }
        }
        let memory = MemoryTable::of(program, &buffers, region_bytes);
        Plan { locations, workspaces, region_bytes, input_bytes, memory }
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

/// The scratch buffers: one for each transient value, shared if an op computes it in place of a dying input,
/// and one for each tensor of workspace.
fn buffers(program: &Program, order: &Order, workspace: &WorkspaceOf<'_>) -> Vec<Buffer> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); program.values.len()];
    for (i, instance) in program.instances.iter().enumerate() {
        let outputs = instance.outputs.iter().map(|o| o.value);
        for v in instance.inputs.iter().copied().chain(outputs) {
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
        let written = instance.outputs.iter().map(|o| o.value);
        for (k, v) in written.enumerate().filter(|&(_, v)| transient(v)) {
            if owner[v.0 as usize].is_some() {
                continue;
            }
            let source =
                instance.code.op().in_place().iter().find(|(o, _)| *o == k).map(|&(_, n)| instance.inputs[n]);
            let joined = source.and_then(|source| {
                let b = owner[source.0 as usize]?;
                let dies = buffers[b].users.iter().all(|&u| u == i || order.before(u, i));
                let once = instance.inputs.iter().filter(|&&w| w == source).count() == 1;
                let fits = program.ty(source).bytes() == program.ty(v).bytes();
                (dies && once && fits).then_some(b)
            });
            let b = joined.unwrap_or_else(|| {
                let bytes = round_up(program.ty(v).bytes());
                buffers.push(Buffer::new(bytes, Holds::Values(Vec::new()), i));
                buffers.len() - 1
            });
            owner[v.0 as usize] = Some(b);
            if let Holds::Values(values) = &mut buffers[b].holds {
                values.push(v);
            }
            for &u in &users[v.0 as usize] {
                assert!(
                    program.instances[u].phase() == instance.phase(),
                    "{v:?} lives across phases; it must be state"
                );
                buffers[b].is_used_by(u, order);
            }
        }
        for ty in workspace(instance.code.op(), &program.input_types(instance)) {
            let mut buffer = Buffer::new(round_up(ty.bytes()), Holds::Workspace(ty), i);
            buffer.is_used_by(i, order);
            buffers.push(buffer);
        }
    }
    buffers
}

impl Buffer {
    fn new(bytes: usize, holds: Holds, first: usize) -> Self {
        Buffer { bytes, holds, first, users: Vec::new(), offset: 0, done: [0; Lane::COUNT] }
    }

    fn is_used_by(&mut self, instance: usize, order: &Order) {
        self.users.push(instance);
        let done = &mut self.done[order.lane(instance)];
        *done = (*done).max(order.position(instance) + 1);
    }
}

/// Buffers at one offset. They share bytes, so they are used one after the other, in this order.
struct Place {
    offset: usize,
    turns: Vec<Turn>,
}

/// A placed buffer: when it is used, and where it ends.
struct Turn {
    clock: Clock,
    done: Clock,
    end: usize,
}

/// Instances by lane.
type Clock = [u32; Lane::COUNT];

/// Gives every buffer an offset; returns the bytes of the region.
fn assign(buffers: &mut [Buffer], order: &Order) -> usize {
    // An empty buffer shares no byte.
    let mut by_size: Vec<usize> = (0..buffers.len()).filter(|&b| buffers[b].bytes > 0).collect();
    by_size.sort_by_key(|&b| (std::cmp::Reverse(buffers[b].bytes), buffers[b].first));
    // True if an instance with the clock `clock` starts after all that is `done`.
    let precedes = |done: &Clock, clock: &Clock| done.iter().zip(clock).all(|(done, seen)| done <= seen);
    // In the order of their offsets.
    let mut places: Vec<Place> = Vec::new();
    let mut total = 0;
    for b in by_size {
        let Buffer { bytes, first, done, .. } = buffers[b];
        let clock = order.clock(first);
        let earlier = |turns: &[Turn]| turns.partition_point(|turn| precedes(&turn.done, &clock));
        let mut offset = 0;
        for place in &places {
            if place.offset >= offset + bytes {
                break;
            }
            let not_earlier = place.turns[earlier(&place.turns)..].iter();
            for turn in not_earlier.take_while(|turn| !precedes(&done, &turn.clock)) {
                offset = offset.max(turn.end);
            }
        }
        let at = places.partition_point(|place| place.offset < offset);
        if places.get(at).is_none_or(|place| place.offset > offset) {
            places.insert(at, Place { offset, turns: Vec::new() });
        }
        let turns = &mut places[at].turns;
        turns.insert(earlier(turns), Turn { clock, done, end: offset + bytes });
        buffers[b].offset = offset;
        total = total.max(offset + bytes);
    }
    total
}
