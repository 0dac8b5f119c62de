//! The place of a process in a run.

use thiserror::Error;
use xtrain_rank::Rank;

/// A wrong description of the ranks of a run, in one line. The user can correct it.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct WorldError(pub String);

/// Maximum number of ranks. A wrong number in a variable is refused before memory is allocated for ranks.
const MAX_RANKS: usize = 65_536;

/// The place of this process among the processes of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct World {
    /// This process among all of the run.
    pub rank: Rank,
    /// This process among those of its node.
    pub local_rank: Rank,
    /// Host name or IP address of rank 0.
    pub address: String,
    /// The TCP port at which rank 0 listens while the run starts.
    pub port: u16,
}

impl World {
    /// The world of a process that trains alone.
    pub fn single() -> Self {
        let address = "127.0.0.1".to_owned();
        World { rank: Rank::ALONE, local_rank: Rank::ALONE, address, port: 0 }
    }

    /// True if the run has ranks on other nodes.
    pub fn spans_nodes(&self) -> bool {
        self.local_rank.world_size < self.rank.world_size
    }

    /// Returns the world if its numbers agree.
    ///
    /// # Errors
    /// A rank is not below the number of ranks, there are more ranks on this node than in the run or more
    /// than 65,536 in the run, or the address is empty.
    pub fn checked(self) -> Result<Self, WorldError> {
        let Rank { index: rank, world_size } = self.rank;
        let Rank { index: local_rank, world_size: local_world_size } = self.local_rank;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_do_not_agree_are_refused() {
        let (rank, local_rank) = (Rank { index: 1, world_size: 4 }, Rank { index: 1, world_size: 2 });
        let world = World { rank, local_rank, ..World::single() };
        assert!(world.clone().checked().is_ok() && world.spans_nodes());
        for wrong in [
            World { rank: rank.with_index(4), ..world.clone() },
            World { local_rank: local_rank.with_index(2), ..world.clone() },
            World { local_rank: Rank { world_size: 5, ..local_rank }, ..world.clone() },
            World { rank: Rank { world_size: 0, ..rank }, ..world.clone() },
            World { rank: Rank { world_size: MAX_RANKS + 1, ..rank }, ..world.clone() },
            World { address: " ".into(), ..world },
        ] {
            assert!(wrong.clone().checked().is_err(), "{wrong:?}");
        }
    }
}
