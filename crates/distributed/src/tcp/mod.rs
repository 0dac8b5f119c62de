//! Collectives over direct TCP connections between all ranks.
//!
//! For CPUs, and for tests of what runs on GPUs. Each collective is an exchange between every two ranks,
//! which sends and receives at the same time. It cannot deadlock, whatever the sizes are. Messages wait until
//! the connection takes them, so their sender waits for no one.

mod connect;
mod exchange;
mod outbox;
mod sender;

use crate::communicator::Communicator;
use crate::control::Control;
use crate::error::{Cause, CommError, Fault};
use exchange::{CallHeader, CallKind, Peer, PeerLane, complete, reason};
use sender::SenderThread;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
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
    state: Arc<Mutex<State>>,
    sent_bytes: AtomicU64,
    /// Sends what is in outboxes between calls, once there is a message.
    sender: OnceLock<Result<SenderThread, CommError>>,
}

struct State {
    /// The other ranks, in order.
    peers: Vec<Peer>,
    error: Option<CommError>,
}

impl State {
    /// The connection with `other`, of the rank `rank`: the list has no place for it.
    fn peer(&mut self, rank: usize, other: usize) -> &mut Peer {
        &mut self.peers[if other < rank { other } else { other - 1 }]
    }

    /// Keeps the error of a call, with which later calls fail.
    fn keep<T>(&mut self, result: Result<T, CommError>) -> Result<T, CommError> {
        self.error = result.as_ref().err().cloned();
        result
    }
}

impl TcpCommunicator {
    /// Connects all ranks with each other. All ranks call it.
    ///
    /// # Errors
    /// The run has ended; a rank does not come within `timeout`.
    pub fn connect(control: &Arc<Control>, timeout: Duration) -> Result<Self, CommError> {
        let peers = connect::connect(control, timeout)?;
        let state = Arc::new(Mutex::new(State { peers, error: None }));
        let (control, sent_bytes, sender) = (control.clone(), AtomicU64::new(0), OnceLock::new());
        let communicator = TcpCommunicator { control, timeout: AtomicU64::new(0), state, sent_bytes, sender };
        communicator.set_timeout(timeout);
        Ok(communicator)
    }

    /// The time without a byte after which collectives fail from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        self.timeout.store(timeout.as_millis() as u64, Ordering::Relaxed);
    }

    /// The state, unless an earlier call has failed.
    fn lock(&self) -> Result<MutexGuard<'_, State>, CommError> {
        let state = lock(&self.state);
        state.error.clone().map_or(Ok(state), Err)
    }

    fn time(&self) -> Duration {
        Duration::from_millis(self.timeout.load(Ordering::Relaxed))
    }

    /// Sends `sends[r]` to the rank at the place `r` of a group, and receives into `receives[r]` from it.
    /// Those of this rank are ignored.
    fn exchange(
        &self,
        kind: CallKind,
        groups: Groups,
        first: usize,
        sends: &[&[u8]],
        receives: Vec<&mut [u8]>,
    ) -> Result<(), CommError> {
        let rank = self.rank();
        let mut state = self.lock()?;
        let bytes = receives[groups.place(rank)].len() as u64;
        let header = CallHeader { number: 0, kind, groups, first: first as u64, bytes };
        let mut operands: Vec<_> = sends.iter().copied().zip(receives).map(Some).collect();
        let (mut lanes, mut others) = (Vec::new(), Vec::new());
        for peer in &mut state.peers {
            let is_of_group = groups.ranks(rank).any(|other| other == peer.rank);
            match operands[groups.place(peer.rank)].take_if(|_| is_of_group) {
                Some((send, receive)) => lanes.push(PeerLane::exchange(peer, header, send, receive)),
                None => others.push(peer),
            }
        }
        let result = complete(lanes, others, rank, &self.control, self.time());
        if result.is_ok() {
            let sent = bytes * (groups.size as u64 - 1);
            self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        }
        state.keep(result)
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.exchange(CallKind::AllGather, groups, first, &vec![input; n], receives)
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
        self.exchange(CallKind::AllToAll, groups, first, &sends, receives)
    }

    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError> {
        let rank = self.rank();
        let to = groups.rank_at(rank, to);
        let mut state = self.lock()?;
        let posted = state.peer(rank, to).post(groups, message).map_err(|_| reason(to, &self.control));
        let waits = posted.is_ok() && !state.peer(rank, to).outbox.is_empty();
        state.keep(posted)?;
        self.sent_bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
        if waits {
            let start = || SenderThread::start(&self.state, &state.peers, &self.control);
            let sender = self.sender.get_or_init(start).as_ref().map_err(CommError::clone)?;
            drop(state);
            sender.wake();
        }
        Ok(())
    }

    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError> {
        let rank = self.rank();
        let from = groups.rank_at(rank, from);
        let mut state = self.lock()?;
        let (mut lanes, mut others, mut message) = (Vec::new(), Vec::new(), Some(message));
        for peer in &mut state.peers {
            match message.take_if(|_| peer.rank == from) {
                Some(message) => lanes.push(PeerLane::message(peer, groups, message)),
                None => others.push(peer),
            }
        }
        let result = complete(lanes, others, rank, &self.control, self.time());
        state.keep(result)
    }

    fn fault(&self) -> Option<Fault> {
        self.control.fault()
    }

    fn timeout(&self) -> Option<Duration> {
        Some(self.time())
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
