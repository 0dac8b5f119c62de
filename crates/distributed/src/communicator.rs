//! The interface of collectives on host memory.

use crate::error::{Cause, CommError, Fault};
use std::time::Duration;
use xtrain_rank::Groups;

/// The collectives of the ranks of a run, on host memory.
///
/// A collective moves data among the ranks of each group. All ranks of the run call the same collectives with
/// the same groups in the same order; a call returns when the caller's output is complete, without waiting
/// for other groups. Buffers are bytes: a collective moves data and computes nothing, so sums have an order
/// that only the caller decides.
///
/// A buffer of all ranks of a group consists of a piece of equal length for each. Piece `p` belongs to the
/// rank at the place `(first + p) % size`; `first` differs by tensor, so that tensors with fewer rows than
/// ranks spread over all ranks.
pub trait Communicator: Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks of the run.
    fn world_size(&self) -> usize;

    /// Bytes that the collectives of this rank have sent to other ranks.
    fn sent_bytes(&self) -> u64;

    /// One group of all ranks.
    fn world(&self) -> Groups {
        Groups::world(self.world_size())
    }

    /// Gathers one piece from each rank of a group: `output` is every rank's `input`, each as the piece that
    /// belongs to its rank.
    ///
    /// # Errors
    /// A rank has left, or the calls of the ranks do not match.
    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError>;

    /// Sends each piece of `input` to the rank of the group to which it belongs. Piece `r` of `output` is
    /// what the rank at the place `r` sent to this rank, whatever `first` is.
    ///
    /// # Errors
    /// A rank has left, or the calls of the ranks do not match.
    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError>;

    /// The first cause of the end of the run, if it has ended because of a fault.
    fn fault(&self) -> Option<Fault> {
        None
    }

    /// The time without progress after which collectives fail; `None` if they wait for ever.
    fn timeout(&self) -> Option<Duration> {
        None
    }

    /// Ends the run on all ranks, where they can hear it. Returns the first cause, which is an earlier one if
    /// another rank has failed before.
    fn abort(&self, cause: Cause, message: &str) -> Fault {
        Fault::new(self.rank(), "", message).caused_by(cause)
    }
}
