//! The memory table: every byte of a plan by its purpose.

use crate::plan::{Buffer, Holds};
use crate::{Instance, Program, Stage, StateKind, Storage};
use std::collections::BTreeMap;

/// A plan's memory by purpose. The rows add up to the plan, to the byte; for scratch they count what is live
/// at its peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryTable {
    /// The rows, none of them empty.
    pub rows: Vec<MemoryRow>,
    /// The instance at the peak of scratch: block, site and role.
    pub peak_at: String,
    /// Workspace that is not live at the peak, whose bytes other rows count: for each site the largest of all
    /// blocks.
    pub elsewhere: Vec<MemoryRow>,
}

/// One purpose and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryRow {
    /// The purpose.
    pub what: Purpose,
    /// The bytes.
    pub bytes: usize,
}

/// A purpose of memory, in the order in which tables show them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// State of one kind.
    State(StateKind),
    /// Tables fixed at tracing.
    Constants,
    /// Token ids, control scalars, metrics.
    HostExchange,
    /// Activations saved from forward to backward, by block (None: outside the blocks).
    Saved(Option<u32>),
    /// Activations and gradients between one op and the next.
    Passing,
    /// Workspace of an op, named by its site.
    Workspace(String),
    /// Alignment, and gaps that no buffer fits.
    Gaps,
}

impl MemoryTable {
    /// Bytes of all rows.
    pub fn total_bytes(&self) -> usize {
        self.rows.iter().map(|r| r.bytes).sum()
    }

    pub(crate) fn of(program: &Program, buffers: &[Buffer], region_bytes: [usize; 3]) -> Self {
        let mut rows: BTreeMap<Purpose, usize> = BTreeMap::new();
        let mut peak_at = String::new();
        let mut elsewhere = workspaces(program, buffers);
        for id in program.ids() {
            let purpose = match program.value(id).storage {
                Storage::State { kind, .. } => Purpose::State(kind),
                Storage::Constant { .. } => Purpose::Constants,
                Storage::Input { .. } | Storage::Output { .. } => Purpose::HostExchange,
                Storage::Transient => continue,
            };
            *rows.entry(purpose).or_default() += program.ty(id).bytes();
        }
        if let Some(peak) = peak(program.instances.len(), buffers) {
            let at = &program.instances[peak];
            peak_at = format!("{at_origin} ({role})", at_origin = at.origin, role = at.origin.role.name());
            for b in buffers.iter().filter(|b| live(b).contains(&peak)) {
                let maker = &program.instances[b.first];
                let stage = |i: usize| program.instances[i].origin.stage;
                let used_later = b.users.iter().any(|&u| stage(u) == Stage::Backward);
                let purpose = if matches!(b.holds, Holds::Workspace(_)) {
                    elsewhere.remove(&site(maker));
                    site(maker)
                } else if stage(b.first) == Stage::Forward && used_later {
                    Purpose::Saved(maker.origin.block)
                } else {
                    Purpose::Passing
                };
                *rows.entry(purpose).or_default() += b.bytes;
            }
        }
        let named: usize = rows.values().sum();
        let gaps = region_bytes.iter().sum::<usize>() - named;
        rows.insert(Purpose::Gaps, gaps);
        let rows = rows
            .into_iter()
            .filter(|(_, bytes)| *bytes > 0)
            .map(|(what, bytes)| MemoryRow { what, bytes })
            .collect();
        let elsewhere = elsewhere.into_iter().map(|(what, bytes)| MemoryRow { what, bytes }).collect();
        MemoryTable { rows, peak_at, elsewhere }
    }
}

/// The purpose of an instance's workspace: equal for the same op at the same site of every block.
fn site(instance: &Instance) -> Purpose {
    Purpose::Workspace(format!("{} {}", instance.origin.site, instance.code.op().name()))
}

/// The workspace of every site, in bytes of its largest instance.
fn workspaces(program: &Program, buffers: &[Buffer]) -> BTreeMap<Purpose, usize> {
    let mut by_instance: BTreeMap<usize, usize> = BTreeMap::new();
    for b in buffers.iter().filter(|b| matches!(b.holds, Holds::Workspace(_))) {
        *by_instance.entry(b.first).or_default() += b.bytes;
    }
    let mut largest: BTreeMap<Purpose, usize> = BTreeMap::new();
    for (i, bytes) in by_instance {
        let held = largest.entry(site(&program.instances[i])).or_default();
        *held = bytes.max(*held);
    }
    largest
}

/// The instances from a buffer's first to its last use, in list order.
fn live(b: &Buffer) -> std::ops::RangeInclusive<usize> {
    b.first..=b.users.iter().copied().max().unwrap_or(b.first)
}

/// The instance at which most scratch bytes are live.
fn peak(instances: usize, buffers: &[Buffer]) -> Option<usize> {
    let mut change = vec![0i64; instances + 1];
    for b in buffers {
        change[*live(b).start()] += b.bytes as i64;
        change[*live(b).end() + 1] -= b.bytes as i64;
    }
    let mut now = 0;
    let totals = change.iter().take(instances).map(|c| {
        now += c;
        now
    });
    totals.enumerate().max_by_key(|&(i, total)| (total, std::cmp::Reverse(i))).map(|(i, _)| i)
}
