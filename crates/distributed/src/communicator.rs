//! The interface of collectives on host memory.

use crate::error::CommError;

/// The collectives of a group of ranks, on host memory.
///
/// All ranks of the group call the same collectives in the same order; a call returns when the caller's
/// output is complete. Buffers are bytes: a collective moves data and computes nothing, so sums have an order
/// that only the caller decides.
///
/// A buffer of all ranks consists of `world_size` pieces of equal length. Piece `p` belongs to the rank
/// `(first + p) % world_size`; `first` differs by tensor, so that tensors with fewer rows than ranks spread
/// over all ranks.
pub trait Communicator: Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// Bytes that the collectives of this rank have sent to other ranks.
    fn sent_bytes(&self) -> u64;

    /// Gathers one piece from each rank: `output` is every rank's `input`, each as the piece that belongs to
    /// its rank.
    ///
    /// # Errors
    /// A rank has left, or the calls of the ranks do not match.
    fn all_gather(&self, first: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError>;

    /// Sends each piece of `input` to the rank to which it belongs. Piece `r` of `output` is what rank `r`
    /// sent to this rank, whatever `first` is.
    ///
    /// # Errors
    /// A rank has left, or the calls of the ranks do not match.
    fn all_to_all(&self, first: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError>;
}
