//! Messages of the ranks that score together.

use crate::error::EvaluationError;
use xtrain_distributed::{Channel, CommError};
use xtrain_rank::Rank;

/// The ranks that evaluate together, as one of them sees them, for messages of one length.
pub trait Gather {
    /// This rank.
    fn rank(&self) -> Rank;

    /// The messages of all ranks, in their order. All have the same length.
    ///
    /// # Errors
    /// The run has ended; a rank does not come within the time of a step.
    fn gather(&self, own: &[u64]) -> Result<Vec<Vec<u64>>, CommError>;
}

/// The ranks that score together, as one of them sees them. Rank 0 reads and writes files of scores, and may
/// wait for a file that another process writes, so that messages have no time limit, unlike those of
/// [`Gather`].
pub struct Exchange<'a> {
    channel: &'a dyn Channel,
    rank: Rank,
}

impl<'a> Exchange<'a> {
    /// The ranks of `channel`.
    pub fn new(channel: &'a dyn Channel, rank: Rank) -> Exchange<'a> {
        Exchange { channel, rank }
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// True for a process that scores alone.
    pub(crate) fn is_alone(&self) -> bool {
        self.rank == Rank::ALONE
    }

    /// The words of all ranks, in their order. They may have different numbers of them.
    ///
    /// # Errors
    /// The run has ended.
    pub(crate) fn all(&self, own: Vec<u64>) -> Result<Vec<Vec<u64>>, EvaluationError> {
        if self.is_alone() {
            return Ok(vec![own]);
        }
        let of_ranks = self.channel.gather(bytemuck::cast_slice(&own))?;
        let mut all = Vec::new();
        for words in &of_ranks {
            all.extend((words.len() as u64).to_le_bytes());
            all.extend_from_slice(words);
        }
        let all = self.channel.broadcast(&all)?;
        let mut words = all.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
        let of_ranks = (0..self.rank.world_size).map(|_| {
            let bytes = usize::try_from(words.next()?).ok()?;
            Some(words.by_ref().take(bytes / size_of::<u64>()).collect())
        });
        let of_ranks: Option<Vec<Vec<u64>>> = of_ranks.collect();
        Ok(of_ranks.ok_or_else(|| CommError::Mismatch("rank 0 sent no words of all ranks".into()))?)
    }

    /// The words of rank 0. `decide` is called there alone.
    ///
    /// # Errors
    /// `decide` failed; the run has ended.
    pub(crate) fn of_first(
        &self,
        decide: impl FnOnce() -> Result<Vec<u64>, EvaluationError>,
    ) -> Result<Vec<u64>, EvaluationError> {
        if self.is_alone() {
            return decide();
        }
        let own = if self.rank.is_first() { decide()? } else { Vec::new() };
        let words = self.channel.broadcast(bytemuck::cast_slice(&own))?;
        Ok(words.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect())
    }
}
