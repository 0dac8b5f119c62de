//! The place of a process in a run, and how the ranks of a run are arranged.

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

/// Arrangement of the ranks as `replicate` groups of `shard` ranks each. Parameters are cut over the ranks of
/// a group, and every group holds all of them. Rank `r` is member `r % shard` of group `r / shard`, so the
/// ranks of a group are neighbours and share a node where they can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    replicate: usize,
    shard: usize,
}

impl Mesh {
    /// A mesh for `world_size` ranks.
    ///
    /// # Errors
    /// The product of the sizes is not the world size.
    pub fn new(world_size: usize, replicate: usize, shard: usize) -> Result<Self, WorldError> {
        if replicate.checked_mul(shard) == Some(world_size) && world_size > 0 {
            return Ok(Mesh { replicate, shard });
        }
        let divisors = (1..=world_size).filter(|d| world_size.is_multiple_of(*d));
        let divisors: Vec<String> = divisors.map(|d| d.to_string()).collect();
        Err(WorldError(format!(
            "{replicate} replicas of {shard} ranks do not make a world of {world_size}; the number of replicas \
             can be {}",
            divisors.join(", ")
        )))
    }

    /// The number of groups.
    pub fn replicate(&self) -> usize {
        self.replicate
    }

    /// The number of ranks in a group.
    pub fn shard(&self) -> usize {
        self.shard
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.replicate * self.shard
    }

    /// Group and member number of a rank.
    pub fn place(&self, rank: usize) -> (usize, usize) {
        (rank / self.shard, rank % self.shard)
    }

    /// The ranks of the group of `rank`, over which parameters are cut.
    pub fn shard_group(&self, rank: usize) -> Vec<usize> {
        let (group, _) = self.place(rank);
        (group * self.shard..(group + 1) * self.shard).collect()
    }

    /// The ranks that hold the same part of the parameters as `rank`, one of each group.
    pub fn replicate_group(&self, rank: usize) -> Vec<usize> {
        let (_, member) = self.place(rank);
        (member..self.world_size()).step_by(self.shard).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_a_mesh_cross_in_one_rank() {
        let mesh = Mesh::new(6, 2, 3).expect("2 x 3");
        assert_eq!(mesh.shard_group(4), [3, 4, 5]);
        assert_eq!(mesh.replicate_group(4), [1, 4]);
        assert_eq!(mesh.place(4), (1, 1));
    }

    #[test]
    fn a_mesh_of_another_size_than_the_world_is_refused() {
        let error = Mesh::new(6, 4, 2).expect_err("8 ranks").to_string();
        assert!(error.contains("world of 6") && error.ends_with("can be 1, 2, 3, 6"), "{error}");
        assert!(Mesh::new(0, 0, 5).is_err());
        assert!(Mesh::new(4, usize::MAX, 5).is_err());
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
