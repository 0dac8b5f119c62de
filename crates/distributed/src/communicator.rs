//! The interface of collectives and messages on host memory.

use crate::error::{Cause, CommError, Fault};
use std::time::Duration;
use xtrain_rank::Groups;

/// The collectives of the ranks of a run, and messages between them, on host memory.
///
/// A collective moves data among the ranks of each group. All ranks of a group call the same collectives in
/// the same order; a call returns when the caller's output is complete, without waiting for other groups.
/// Buffers are bytes: a collective moves data and computes nothing, so sums have an order that only the
/// caller decides.
///
/// A buffer of all ranks of a group consists of a piece of equal length for each. Piece `p` belongs to the
/// rank at the place `(first + p) % size`; `first` differs by tensor, so that tensors with fewer rows than
/// ranks spread over all ranks.
pub trait Communicator: Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks of the run.
    fn world_size(&self) -> usize;

    /// Bytes that this rank has sent to others, by collectives and messages.
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

    /// Sends a message to the rank at the place `to` of this rank's group, another one, which receives it by
    /// [`Communicator::receive`]. The call does not wait for that rank. Messages and collectives between two
    /// ranks happen in the order in which both call them.
    ///
    /// # Errors
    /// The rank has left.
    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError>;

    /// Waits for the next message of the rank at the place `from` of this rank's group, another one. It has
    /// as many bytes as `message`.
    ///
    /// # Errors
    /// The rank has left, or its next call is something else.
    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError>;

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
