//! The place of a process in a run, and groups of its ranks.

use thiserror::Error;

/// A wrong description of the ranks of a run, in one line. The user can correct it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct WorldError(pub String);

/// Maximum number of ranks. A wrong number in a variable is refused before memory is allocated for ranks.
const MAX_RANKS: usize = 65_536;

/// The place of this process among the processes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// The number of this process, from 0.
    pub rank: usize,
    /// The number of processes.
    pub world_size: usize,
    /// The number of this process among those of its node, from 0.
    pub local_rank: usize,
    /// The number of processes on this node.
    pub local_world_size: usize,
    /// Host name or IP address of rank 0.
    pub address: String,
    /// The TCP port at which rank 0 listens while the run starts.
    pub port: u16,
}

impl World {
    /// The world of a process that trains alone.
    pub fn single() -> Self {
        let address = "127.0.0.1".to_owned();
        World { rank: 0, world_size: 1, local_rank: 0, local_world_size: 1, address, port: 0 }
    }

    /// True if the run has ranks on other nodes.
    pub fn spans_nodes(&self) -> bool {
        self.local_world_size < self.world_size
    }

    /// Returns the world if its numbers agree.
    ///
    /// # Errors
    /// A rank is not below the number of ranks, there are more ranks on this node than in the run or more
    /// than 65,536 in the run, or the address is empty.
    pub fn checked(self) -> Result<Self, WorldError> {
        let World { rank, world_size, local_rank, local_world_size, .. } = self;
        let refuse = |message: String| Err(WorldError(message));
        if world_size > MAX_RANKS {
            return refuse(format!("a world of {world_size} ranks is too large: the limit is {MAX_RANKS}"));
        }
        if rank >= world_size {
            return refuse(format!(
                "rank {rank} does not exist in a world of {world_size}: ranks count from 0"
            ));
        }
        if local_rank >= local_world_size {
            return refuse(format!(
                "local rank {local_rank} does not exist on a node of {local_world_size}: local ranks count from 0"
            ));
        }
        if local_world_size > world_size {
            return refuse(format!(
                "a node has {local_world_size} ranks, but the world has only {world_size}"
            ));
        }
        if self.address.trim().is_empty() {
            return refuse("the address of rank 0 is empty: set MASTER_ADDR".to_owned());
        }
        Ok(self)
    }
}

/// A partition of the ranks of a run into groups of equal size, whose ranks move data among themselves.
///
/// The ranks of a group are at a distance of `stride`: with `size` 2 and `stride` 3, they are 0 and 3, 1 and
/// 4, 2 and 5, 6 and 9, and so on. A rank's *place* is its number within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Ranks of a group.
    pub size: usize,
    /// Distance between neighbours of a group.
    pub stride: usize,
}

impl Groups {
    /// One group of all ranks.
    pub const fn world(world_size: usize) -> Groups {
        Groups { size: world_size, stride: 1 }
    }

    /// The place of `rank` within its group.
    pub const fn place(self, rank: usize) -> usize {
        rank / self.stride % self.size
    }

    /// The ranks of the group of `rank`, in the order of their places.
    pub fn ranks(self, rank: usize) -> impl ExactSizeIterator<Item = usize> + Clone {
        let first = rank - self.place(rank) * self.stride;
        (0..self.size).map(move |place| first + place * self.stride)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn groups_divide_the_ranks_of_a_run(size in 1usize..5, stride in 1usize..5, blocks in 1usize..4) {
            let (groups, world_size) = (Groups { size, stride }, size * stride * blocks);
            for rank in 0..world_size {
                let ranks: Vec<usize> = groups.ranks(rank).collect();
                prop_assert_eq!(ranks[groups.place(rank)], rank);
                prop_assert_eq!(ranks.len(), size);
                prop_assert!(ranks.iter().all(|&other| other < world_size && groups.ranks(other).eq(groups.ranks(rank))));
                prop_assert!(ranks.is_sorted_by(|a, b| a + stride == *b));
            }
        }

        #[test]
        fn shards_and_replicas_cross_in_one_rank(shards in 1usize..6, replicas in 1usize..6) {
            let of_shards = Groups { size: shards, stride: 1 };
            let of_replicas = Groups { size: replicas, stride: shards };
            for rank in 0..shards * replicas {
                prop_assert!(of_shards.ranks(rank).eq(rank / shards * shards..(rank / shards + 1) * shards));
                let common = of_replicas.ranks(rank).filter(|other| of_shards.ranks(rank).any(|r| r == *other));
                prop_assert_eq!(common.collect::<Vec<_>>(), [rank]);
            }
        }
    }

    #[test]
    fn numbers_that_do_not_agree_are_refused() {
        let world = World { rank: 1, world_size: 4, local_rank: 1, local_world_size: 2, ..World::single() };
        assert!(world.clone().checked().is_ok() && world.spans_nodes());
        for wrong in [
            World { rank: 4, ..world.clone() },
            World { local_rank: 2, ..world.clone() },
            World { local_world_size: 5, ..world.clone() },
            World { world_size: 0, ..world.clone() },
            World { world_size: MAX_RANKS + 1, ..world.clone() },
            World { address: " ".into(), ..world },
        ] {
            assert!(wrong.clone().checked().is_err(), "{wrong:?}");
        }
    }
}
