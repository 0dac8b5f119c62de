//! Collectives over direct TCP connections between all ranks.
//!
//! For CPUs, and for tests of what runs on GPUs. Each collective is an exchange between every two ranks,
//! which sends and receives at the same time. It cannot deadlock, whatever the sizes are.

mod connect;
mod exchange;

use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::{Cause, CommError, Fault};
use exchange::{CallHeader, Collective, Peer, exchange};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use xtrain_rank::Groups;

/// A communicator over TCP.
///
/// A collective fails if no byte arrives within the timeout, if a rank has left, or if the run was aborted:
/// then within a second, with the cause. Every later call fails with the same error.
pub struct TcpCommunicator {
    control: Arc<Control>,
    /// In milliseconds.
    timeout: AtomicU64,
    state: Mutex<State>,
    sent_bytes: AtomicU64,
}

struct State {
    /// The other ranks, in order.
    peers: Vec<Peer>,
    /// The number of the next collective.
    number: u64,
    error: Option<CommError>,
}

impl TcpCommunicator {
    /// Connects all ranks with each other. All ranks call it.
    ///
    /// # Errors
    /// The run has ended; a rank does not come within `timeout`.
    pub fn connect(control: &Arc<Control>, timeout: Duration) -> Result<Self, CommError> {
        let peers = connect::connect(control, timeout)?;
        let state = Mutex::new(State { peers, number: 0, error: None });
        let (control, sent_bytes) = (control.clone(), AtomicU64::new(0));
        let communicator = TcpCommunicator { control, timeout: AtomicU64::new(0), state, sent_bytes };
        communicator.set_timeout(timeout);
        Ok(communicator)
    }

    /// The time without a byte after which collectives fail from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// Sends `sends[r]` to the rank at the place `r` of a group, and receives into `receives[r]` from it.
    /// Those of this rank are ignored.
    fn run(
        &self,
        collective: Collective,
        groups: Groups,
        first: usize,
        sends: &[&[u8]],
        receives: Vec<&mut [u8]>,
    ) -> Result<(), CommError> {
        let rank = self.rank();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(error) = &state.error {
            return Err(error.clone());
        }
        let bytes = receives[groups.place(rank)].len() as u64;
        let header = CallHeader { number: state.number, collective, groups, first: first as u64, bytes };
        state.number += 1;
        let timeout = Duration::from_millis(self.timeout.load(Ordering::Relaxed));
        let operands = groups.ranks(rank).zip(sends.iter().copied().zip(receives));
        let others = operands.filter(|(other, _)| *other != rank).map(|(other, (send, receive))| {
            // The list has no place for this rank.
            let peer = &state.peers[if other < rank { other } else { other - 1 }];
            (peer, send, receive)
        });
        let result = exchange(others.collect(), rank, header, &self.control, timeout);
        match &result {
            Ok(()) => {
                let sent = bytes * (groups.size as u64 - 1);
                self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
            }
            Err(error) => state.error = Some(error.clone()),
        }
        result
    }
}

impl Communicator for TcpCommunicator {
    fn rank(&self) -> usize {
        self.control.world().rank.index
    }

    fn world_size(&self) -> usize {
        self.control.world().rank.world_size
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let (n, bytes) = (groups.size, input.len());
        assert_eq!(output.len(), n * bytes, "the output of all_gather has a piece for each rank");
        let mut receives = pieces(output, n);
        // Piece p is of the place (first + p) % n.
        receives.rotate_right(first % n);
        receives[groups.place(self.rank())].copy_from_slice(input);
        self.run(Collective::AllGather, groups, first, &vec![input; n], receives)
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let (n, place) = (groups.size, groups.place(self.rank()));
        assert_eq!(input.len(), output.len(), "all_to_all sends as much as it receives");
        assert!(input.len().is_multiple_of(n), "all_to_all has a piece of equal length for each rank");
        let bytes = input.len() / n;
        let mut sends: Vec<&[u8]> = (0..n).map(|piece| &input[piece * bytes..][..bytes]).collect();
        sends.rotate_right(first % n);
        let mut receives = pieces(output, n);
        receives[place].copy_from_slice(sends[place]);
        self.run(Collective::AllToAll, groups, first, &sends, receives)
    }

    fn fault(&self) -> Option<Fault> {
        self.control.fault()
    }

    fn timeout(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.timeout.load(Ordering::Relaxed)))
    }

    fn abort(&self, cause: Cause, message: &str) -> Fault {
        self.control.abort(cause, message)
    }
}

/// `n` pieces of equal length, which may be 0.
fn pieces(mut bytes: &mut [u8], n: usize) -> Vec<&mut [u8]> {
    let length = bytes.len() / n;
    let mut pieces = Vec::with_capacity(n);
    for _ in 0..n {
        let (piece, rest) = bytes.split_at_mut(length);
        pieces.push(piece);
        bytes = rest;
    }
    pieces
}

impl fmt::Debug for TcpCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpCommunicator").field("control", &self.control).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
