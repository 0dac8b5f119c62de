//! The memory table: the bytes of a plan by purpose.

use crate::buffer::{Buffer, Holds};
use crate::{Instance, Lane, Payload, Program, Role, Stage, StateKind, Storage, ValueId};
use std::collections::{BTreeMap, HashSet};

/// The memory of a plan by purpose. The rows add up to the plan, to the byte; of scratch they count the
/// buffers that are live at its peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTable {
    /// The rows; each has at least one byte.
    pub rows: Vec<MemoryRow>,
    /// The instance at the peak of scratch: block, site and role.
    pub peak_at: String,
    /// Workspace that is not live at the peak: for each site, that of the block with the most. Its bytes are
    /// part of other rows.
    pub elsewhere: Vec<MemoryRow>,
}

/// One purpose and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRow {
    /// The purpose.
    pub purpose: Purpose,
    /// The bytes.
    pub bytes: usize,
}

/// A purpose of memory, in the order in which tables show them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// State of one kind.
    State(StateKind),
    /// Constants, for example tables of rotation angles.
    Constants,
    /// Token ids, control scalars, metrics.
    HostExchange,
    /// Activations of a block (`None`: outside of the blocks) that are saved from forward to backward.
    Saved(Option<u32>),
    /// Weights that are gathered from all ranks while a block reads them.
    GatheredWeights,
    /// Gradients before they are summed over ranks, and what ranks send each other of them.
    ExchangedGradients,
    /// Tokens for the experts of other ranks, what returns of them, and gradients of both.
    ExchangedTokens,
    /// Activations and gradients that the same stage reads.
    Temporary,
    /// Workspace of the op of this name and site.
    Workspace(String),
    /// Alignment, and gaps that no buffer fills.
    Gaps,
}

impl MemoryTable {
    /// Bytes of all rows.
    pub fn total_bytes(&self) -> usize {
        self.rows.iter().map(|r| r.bytes).sum()
    }

    pub(crate) fn new(program: &Program, buffers: &[Buffer], region_bytes: &[usize]) -> Self {
        let mut rows: BTreeMap<Purpose, usize> = BTreeMap::new();
        let mut peak_at = String::new();
        let mut elsewhere = workspaces(program, buffers);
        // Static scales are constants, but readers expect them with the delayed ones.
        let scales: HashSet<ValueId> = program.delayed.iter().map(|tensor| tensor.scale).collect();
        for id in program.ids() {
            let purpose = match program.value(id).storage {
                _ if scales.contains(&id) => Purpose::State(StateKind::Scale),
                Storage::State { kind, .. } => Purpose::State(kind),
                Storage::Constant { .. } => Purpose::Constants,
                Storage::Input { .. } | Storage::Output { .. } => Purpose::HostExchange,
                Storage::Transient => continue,
            };
            *rows.entry(purpose).or_default() += program.ty(id).bytes();
        }
        let (saved, within): (Vec<&Buffer>, Vec<&Buffer>) =
            buffers.iter().partition(|b| b.in_slots_of.is_some());
        for b in saved {
            let slots = b.in_slots_of.map_or(0, |chunk| program.slots[chunk]);
            *rows.entry(purpose(program, b)).or_default() += b.bytes * slots;
        }
        if let Some(peak) = peak(program.instances.len(), &within) {
            let origin = &program.instances[peak].origin;
            peak_at = format!("{origin} ({})", origin.role.name());
            for b in within.into_iter().filter(|b| live(b).contains(&peak)) {
                let producer = &program.instances[b.first];
                if matches!(b.holds, Holds::Workspace(_)) {
                    elsewhere.remove(&workspace_of(producer));
                }
                let purpose = purpose(program, b);
                *rows.entry(purpose).or_default() += b.bytes;
            }
        }
        let gaps = region_bytes.iter().sum::<usize>() - rows.values().sum::<usize>();
        rows.insert(Purpose::Gaps, gaps);
        let rows = rows
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(purpose, bytes)| MemoryRow { purpose, bytes })
            .collect();
        let elsewhere = elsewhere.into_iter().map(|(purpose, bytes)| MemoryRow { purpose, bytes }).collect();
        MemoryTable { rows, peak_at, elsewhere }
    }
}

/// The purpose of a scratch buffer.
fn purpose(program: &Program, b: &Buffer) -> Purpose {
    let producer = &program.instances[b.first];
    let users = || b.users.iter().map(|&user| &program.instances[user]);
    let is_reduction = |i: &Instance| i.origin.role == Role::Reduce;
    let sends_tokens =
        |i: &Instance| i.lane == Lane::Communication && Payload::from_instance(i) == Payload::Tokens;
    if matches!(b.holds, Holds::Workspace(_)) {
        workspace_of(producer)
    } else if producer.origin.role == Role::Gather {
        Purpose::GatheredWeights
    } else if users().any(is_reduction) {
        Purpose::ExchangedGradients
    } else if producer.origin.stage == Stage::Forward
        && users().any(|user| user.origin.stage == Stage::Backward)
    {
        Purpose::Saved(producer.origin.block)
    } else if sends_tokens(producer) || users().any(sends_tokens) {
        Purpose::ExchangedTokens
    } else {
        Purpose::Temporary
    }
}

/// The purpose of an instance's workspace, which is equal for one op at one site in all blocks.
fn workspace_of(instance: &Instance) -> Purpose {
    Purpose::Workspace(format!("{} {}", instance.origin.site, instance.code.op().name()))
}

/// The workspace of each site: the bytes of the instance that needs the most.
fn workspaces(program: &Program, buffers: &[Buffer]) -> BTreeMap<Purpose, usize> {
    let mut by_instance: BTreeMap<usize, usize> = BTreeMap::new();
    for b in buffers.iter().filter(|b| matches!(b.holds, Holds::Workspace(_))) {
        *by_instance.entry(b.first).or_default() += b.bytes;
    }
    let mut largest: BTreeMap<Purpose, usize> = BTreeMap::new();
    for (i, bytes) in by_instance {
        let maximum = largest.entry(workspace_of(&program.instances[i])).or_default();
        *maximum = bytes.max(*maximum);
    }
    largest
}

/// The instances from the first to the last user of a buffer, in list order.
fn live(b: &Buffer) -> std::ops::RangeInclusive<usize> {
    b.first..=b.users.iter().copied().max().unwrap_or(b.first)
}

/// The instance at which most scratch bytes are live.
fn peak(instances: usize, buffers: &[&Buffer]) -> Option<usize> {
    let mut change = vec![0i64; instances + 1];
    for b in buffers {
        change[*live(b).start()] += b.bytes as i64;
        change[*live(b).end() + 1] -= b.bytes as i64;
    }
    let mut live_bytes = 0;
    let totals = change.iter().take(instances).map(|c| {
        live_bytes += c;
        live_bytes
    });
    totals.enumerate().max_by_key(|&(i, total)| (total, std::cmp::Reverse(i))).map(|(i, _)| i)
}
