//! Channels of a control connection: independent sequences of calls, for threads that do not wait for each
//! other.

use super::message::{Call, Data, check_size, encode_data};
use super::shared::{ControlPhase, Shared};
use crate::channel::Channel;
use crate::error::CommError;
use crate::world::World;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use xtrain_rank::Rank;

/// A sequence of calls over a control connection. Calls end with the run, also after the connection was
/// dropped.
pub struct ControlChannel {
    number: u32,
    rank: Rank,
    /// Absent in a world of one rank.
    shared: Option<Arc<Shared>>,
    /// The number of the next call. It is locked for the whole call.
    calls: Mutex<u64>,
}

impl ControlChannel {
    pub(super) fn new(number: u32, world: &World, shared: Option<Arc<Shared>>) -> Self {
        ControlChannel { number, rank: world.rank, shared, calls: Mutex::new(0) }
    }

    /// The number of a call that this rank begins.
    fn begin(&self, shared: &Shared, call: Call, bytes: usize, calls: &mut u64) -> Result<u64, CommError> {
        check_size(call, bytes)?;
        if let Some(fault) = shared.lock().fault.clone() {
            return Err(CommError::Aborted(fault));
        }
        *calls += 1;
        Ok(*calls - 1)
    }

    fn send(&self, shared: &Shared, call: Call, number: u64, bytes: &[u8]) {
        let message = encode_data(call, self.number, number, bytes);
        shared.change(|state| state.send(message));
    }

    /// Receives the bytes that `rank` sends in a call.
    fn receive(&self, shared: &Shared, rank: usize, call: Call, number: u64) -> Result<Vec<u8>, CommError> {
        let is_of_this = |data: &Data| data.channel == self.number;
        let mut state = shared.wait(None, |state| {
            state.fault.is_some()
                || state.inbox[rank].iter().any(is_of_this)
                || state.phase == ControlPhase::Ended
        });
        // What came before the end of the run counts.
        let at = state.inbox[rank].iter().position(is_of_this);
        let Some(data) = at.and_then(|at| state.inbox[rank].remove(at)) else {
            return Err(state.fault.clone().map_or(CommError::Left { rank }, CommError::Aborted));
        };
        if (data.call, data.number) == (call, number) {
            return Ok(data.bytes);
        }
        let Data { call: other, number: others, .. } = data;
        Err(CommError::Mismatch(format!(
            "{call}, number {number} of channel {} of the control connection, but rank {rank} called {other}, number {others}",
            self.number
        )))
    }
}

impl Channel for ControlChannel {
    fn rank(&self) -> usize {
        self.rank.index
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = &self.shared else { return Ok(bytes.to_vec()) };
        let sent = if self.rank.index == 0 { bytes.len() } else { 0 };
        let number = self.begin(shared, Call::Broadcast, sent, &mut calls)?;
        if self.rank.index > 0 {
            return self.receive(shared, 0, Call::Broadcast, number);
        }
        self.send(shared, Call::Broadcast, number, bytes);
        Ok(bytes.to_vec())
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = &self.shared else { return Ok(vec![bytes.to_vec()]) };
        let number = self.begin(shared, Call::Gather, bytes.len(), &mut calls)?;
        if self.rank.index > 0 {
            self.send(shared, Call::Gather, number, bytes);
            return Ok(Vec::new());
        }
        let others = (1..self.rank.world_size).map(|rank| self.receive(shared, rank, Call::Gather, number));
        std::iter::once(Ok(bytes.to_vec())).chain(others).collect()
    }
}

impl fmt::Debug for ControlChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControlChannel")
            .field("number", &self.number)
            .field("rank", &self.rank.index)
            .finish_non_exhaustive()
    }
}
