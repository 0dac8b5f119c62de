//! The interface of messages between ranks outside a program's collectives.

use crate::error::CommError;

/// A sequence of calls that all ranks of a run make, for decisions and reports, not for tensors.
///
/// All ranks make the same calls in the same order. Threads of a rank that do not wait for each other use
/// different channels.
pub trait Channel: Send + Sync {
    /// The number of this rank, from 0.
    fn rank(&self) -> usize;

    /// Sends the bytes of rank 0 to all ranks, and returns them. `bytes` is ignored on other ranks. Rank 0
    /// does not wait.
    ///
    /// # Errors
    /// The run has ended; the ranks made different calls; there are more than 256 MiB.
    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError>;

    /// Sends each rank's bytes to rank 0, where they are returned in the order of ranks. Other ranks get an
    /// empty list, and need not wait.
    ///
    /// # Errors
    /// The run has ended; the ranks made different calls; there are more than 256 MiB on a rank.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;
}
