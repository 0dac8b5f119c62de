//! Errors of communication between ranks.

use std::fmt;
use std::time::Duration;
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
    /// A rank ended the run. All ranks report the same rank and message.
    #[error("{0}")]
    Aborted(Fault),
    /// A rank did not take part in a collective in time.
    #[error(
        "{call} number {number} waits for rank {rank}, from which nothing came for {} s; see the output of that rank, or raise \
         parallel.timeout",
        waited.as_secs_f32()
    )]
    Timeout {
        /// The collective.
        call: &'static str,
        /// The number of the collective, from 0.
        number: u64,
        /// A rank that others waited for.
        rank: usize,
        /// The time without a byte from any rank.
        waited: Duration,
    },
    /// The run could not start. The user can correct it.
    #[error("{0}")]
    Start(String),
    /// A limit of the system on open files, threads or memory. The user can raise it.
    #[error("{0}")]
    Limit(String),
    /// The operating system refused an operation.
    #[error("{0}")]
    System(String),
}

/// Maximum length of the text of a fault, in bytes.
const TEXT_BYTES: usize = 1000;

/// The first cause of the end of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The rank at which it happened.
    pub rank: usize,
    /// The host of this rank.
    pub host: String,
    /// The cause, in one line.
    pub message: String,
    /// The kind of the cause.
    pub cause: Cause,
}

/// The kind of the cause of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// A failure of the program or of the system.
    Failure,
    /// Something that the user can correct: a wrong input, a full disk.
    User,
    /// A collective that has waited in vain. The rank that made it wait need not be the one that reports it.
    Timeout,
}

impl CommError {
    /// True if the user can correct it.
    pub fn is_users(&self) -> bool {
        match self {
            CommError::Start(_) | CommError::Limit(_) => true,
            CommError::Aborted(fault) => fault.is_users(),
            _ => false,
        }
    }
}

impl Fault {
    /// A failure, with its message in one line: texts of other processes have no control characters and are
    /// cut after 1,000 bytes.
    pub fn new(rank: usize, host: &str, message: &str) -> Self {
        Fault { rank, host: line(host), message: line(message), cause: Cause::Failure }
    }

    /// This fault, with a cause of another kind.
    pub fn caused_by(self, cause: Cause) -> Self {
        Fault { cause, ..self }
    }

    /// True if the user can correct it.
    pub fn is_users(&self) -> bool {
        self.cause == Cause::User
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} ({}): {}", self.rank, self.host, self.message)
    }
}

/// The text in one line of bounded length.
pub(crate) fn line(text: &str) -> String {
    let mut line: String = text.trim().chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if line.len() > TEXT_BYTES {
        let end = (0..=TEXT_BYTES).rev().find(|at| line.is_char_boundary(*at));
        line.truncate(end.unwrap_or(0));
        line.push_str("...");
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_one_line_of_bounded_length() {
        let fault = Fault::new(3, "node\nb", &format!("disk full\r\n{}\u{1b}[2J", "ä".repeat(600)));
        let text = fault.to_string();
        assert!(text.starts_with("rank 3 (node b): disk full  ä") && text.ends_with("ä..."), "{text}");
        assert!(text.len() < TEXT_BYTES + 50 && !text.contains(char::is_control));
    }
}
