//! Errors of communication between ranks.

use thiserror::Error;

/// The error of a collective or of the control connection.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CommError {
    /// Another rank has left the run.
    #[error("rank {rank} has left the run")]
    Left {
        /// The rank that left.
        rank: usize,
    },
    /// The ranks called different collectives, or with sizes that do not match. This is a bug of the program
    /// that calls them.
    #[error("the ranks called different collectives: {0}")]
    Mismatch(String),
}
