//! The place of a process among those that share a run.

/// The place of a process among those that share a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
}

impl Member {
    /// The only process of a run.
    pub const ALONE: Member = Member { rank: 0, world_size: 1 };

    /// The first of `world_size` processes, for plans.
    pub fn first_of(world_size: usize) -> Member {
        Member { rank: 0, world_size: world_size.max(1) }
    }
}
