//! CommitGroups of lanes of a diverged warp.

use crate::kernel::cluster::Awaited;

/// A place in a kernel: basic block and step.
pub(super) type Place = (u32, u32);

/// Lanes of a warp at the same place.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) struct LaneGroup {
    pub(super) place: Place,
    pub(super) lanes: u32,
    pub(super) waits: Waits,
}

/// The reason why lanes do not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Waits {
    /// The lanes run.
    Nothing,
    /// The lanes wait for other lanes of their warp, those of this mask.
    Warp(u32),
    /// The lanes wait at a barrier of their block.
    Barrier(usize),
    /// The lanes wait for asynchronous work or other blocks.
    Event(Awaited),
}

/// Joins groups at the same place.
pub(super) fn merge(groups: &mut Vec<LaneGroup>) {
    if groups.len() > 1 {
        groups.sort_by_key(|group| (group.place, group.waits));
        groups.dedup_by(|next, kept| {
            let is_same = next.place == kept.place && next.waits == kept.waits;
            if is_same {
                kept.lanes |= next.lanes;
            }
            is_same
        });
    }
}
