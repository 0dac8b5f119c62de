//! Scratch buffers: the spans of scratch memory that a program needs, before they have offsets.

use crate::order::Order;
use crate::{Lane, Op, Program, Stage, Storage, ValueId, WriteMode};
use std::collections::HashSet;
use xtrain_tensor::TensorType;
use xtrain_tensor::host::ALIGN_BYTES;

/// Function that returns the workspace of an op's kernel: the tensors that the kernel uses in addition to its
/// operands, given the op and the types of its inputs. Each kind of device has its own, which needs no
/// device.
pub type WorkspaceOf<'a> = dyn Fn(&dyn Op, &[TensorType]) -> Vec<TensorType> + 'a;

/// For each lane, a number of instances.
pub(crate) type Clock = [u32; Lane::COUNT];

/// A span of scratch.
pub(crate) struct Buffer {
    pub(crate) bytes: usize,
    pub(crate) holds: Holds,
    /// The first instance that writes it.
    pub(crate) first: usize,
    /// All instances that use it.
    pub(crate) users: Vec<usize>,
    /// The first byte, once [`Plan::new`](crate::Plan::new) has placed it.
    pub(crate) offset: usize,
    /// For each lane, the position after the last user; 0 without users.
    pub(crate) done: Clock,
    /// The chunk whose backward reads it in another part of the step than the one that wrote it, so that each
    /// micro-batch needs one.
    pub(crate) in_slots_of: Option<usize>,
}

/// The contents of a span of scratch.
pub(crate) enum Holds {
    /// A value, or several, each computed in the memory of the one before.
    Values(Vec<ValueId>),
    /// A tensor in the workspace of the first user's kernel.
    Workspace(TensorType),
}

pub(crate) fn round_up(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGN_BYTES)
}

/// The scratch buffers of a program: one for each transient value and one for each tensor of workspace. A
/// value shares the buffer of an input in whose memory an op computes it, if nothing reads that input
/// afterwards.
///
/// # Panics
/// If a transient value is read before it is written, or lives across phases.
pub(crate) fn scratch(program: &Program, order: &Order, workspace: &WorkspaceOf<'_>) -> Vec<Buffer> {
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
    let saved = saved(program);
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
            let shared = source.and_then(|source| {
                let b = owner[source.0 as usize]?;
                let is_last_use = buffers[b].users.iter().all(|&u| u == i || order.before(u, i));
                let is_read_once = instance.inputs.iter().filter(|&&w| w == source).count() == 1;
                let fits = program.ty(source).bytes() == program.ty(v).bytes();
                (is_last_use && is_read_once && fits).then_some(b)
            });
            let b = shared.unwrap_or_else(|| {
                let bytes = round_up(program.ty(v).bytes());
                buffers.push(Buffer::new(bytes, Holds::Values(Vec::new()), i));
                buffers.len() - 1
            });
            owner[v.0 as usize] = Some(b);
            if saved.contains(&v) {
                buffers[b].in_slots_of = Some(instance.chunk);
            }
            if let Holds::Values(values) = &mut buffers[b].holds {
                values.push(v);
            }
            for &u in &users[v.0 as usize] {
                let user = &program.instances[u];
                assert!(
                    (user.phase(), user.chunk) == (instance.phase(), instance.chunk),
                    "{v:?} lives across phases, so it must be state"
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

/// The values that the backward reads of the forward, if both run apart: those that an instance of the
/// backward reads before one writes them.
fn saved(program: &Program) -> HashSet<ValueId> {
    let (mut saved, mut written) = (HashSet::new(), HashSet::new());
    if program.slots.is_empty() {
        return saved;
    }
    for instance in program.instances.iter().filter(|i| i.origin.stage == Stage::Backward) {
        let added_to = instance.outputs.iter().filter(|o| o.mode == WriteMode::Add).map(|o| o.value);
        saved.extend(instance.inputs.iter().copied().chain(added_to).filter(|v| !written.contains(v)));
        written.extend(instance.outputs.iter().map(|o| o.value));
    }
    saved
}

impl Buffer {
    fn new(bytes: usize, holds: Holds, first: usize) -> Self {
        let done = [0; Lane::COUNT];
        Buffer { bytes, holds, first, users: Vec::new(), offset: 0, done, in_slots_of: None }
    }

    fn is_used_by(&mut self, instance: usize, order: &Order) {
        self.users.push(instance);
        let done = &mut self.done[order.lane(instance)];
        *done = (*done).max(order.position(instance) + 1);
    }
}
