//! A rank of a run, and groups of ranks.
//!
//! A *rank* is one process with one device; ranks are numbered from 0, and their number is the *world size*.
//! Everything that depends on a rank or on the number of ranks takes a [`Rank`].

/// A rank, and the number of ranks among which it counts: those of a run, or those of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number, from 0.
    pub index: usize,
    /// The number of ranks.
    pub world_size: usize,
}

impl Rank {
    /// The only rank.
    pub const ALONE: Rank = Rank { index: 0, world_size: 1 };

    /// Rank 0 of `world_size` ranks, for plans.
    pub const fn first_of(world_size: usize) -> Rank {
        Rank { index: 0, world_size: if world_size == 0 { 1 } else { world_size } }
    }

    /// True for rank 0, which decides, reports and writes.
    pub const fn is_first(self) -> bool {
        self.index == 0
    }

    /// True if there is no other rank.
    pub const fn is_alone(self) -> bool {
        self.world_size == 1
    }

    /// The rank with another number among as many.
    pub const fn with_index(self, index: usize) -> Rank {
        Rank { index, ..self }
    }

    /// All ranks, in their order.
    pub fn all(world_size: usize) -> impl ExactSizeIterator<Item = Rank> {
        (0..world_size).map(move |index| Rank { index, world_size })
    }
}

/// A partition of the ranks of a run into groups of equal size, whose ranks move data among themselves.
///
/// The ranks of a group are at a distance of `stride`: with `size` 2 and `stride` 3, they are 0 and 3, 1 and
/// 4, 2 and 5, 6 and 9, and so on. A rank's *place* is its number within its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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

    /// `rank` of the run among the ranks of its group.
    pub const fn rank_within(self, rank: usize) -> Rank {
        Rank { index: self.place(rank), world_size: self.size }
    }

    /// The rank at a place of the group of `rank`.
    pub const fn rank_at(self, rank: usize, place: usize) -> usize {
        rank - self.place(rank) * self.stride + place * self.stride
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
                prop_assert!((0..size).map(|place| groups.rank_at(rank, place)).eq(groups.ranks(rank)));
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
}
