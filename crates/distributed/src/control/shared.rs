//! The state that the caller's threads and the background thread of a control connection share.

use super::message::{Data, Message};
use crate::error::Fault;
use crate::net::frame::Packet;
use std::collections::VecDeque;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub(super) struct Shared {
    state: Mutex<ControlState>,
    changed: Condvar,
    /// Wakes the background thread.
    wake: UnixStream,
}

#[derive(Default)]
pub(super) struct ControlState {
    pub(super) phase: ControlPhase,
    /// The first cause of the end of the run.
    pub(super) fault: Option<Fault>,
    /// The fault of this rank that rank 0 has to confirm.
    pub(super) own_fault: Option<Fault>,
    /// Messages for all ranks with which this one is connected.
    outbox: Vec<Packet>,
    /// True if nothing waits to be sent.
    is_sent: bool,
    /// Bytes that each rank has sent and no call has taken yet.
    pub(super) inbox: Vec<VecDeque<Data>>,
    /// The host of each rank, once the run has started.
    pub(super) hosts: Vec<String>,
    /// This rank has finished its work.
    pub(super) finishes: bool,
    /// The control connection was dropped.
    pub(super) closes: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ControlPhase {
    #[default]
    Starts,
    Runs,
    /// The background thread has ended.
    Ended,
}

impl Shared {
    pub(super) fn new(world_size: usize, wake: UnixStream) -> Self {
        let inbox = vec![VecDeque::new(); world_size];
        let state = Mutex::new(ControlState { inbox, is_sent: true, ..ControlState::default() });
        Shared { state, changed: Condvar::new(), wake }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ControlState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `is_done`, or until `limit` has passed.
    pub(super) fn wait(
        &self,
        limit: Option<Duration>,
        is_done: impl Fn(&ControlState) -> bool,
    ) -> MutexGuard<'_, ControlState> {
        let since = Instant::now();
        let mut state = self.lock();
        while !is_done(&state) {
            state = match limit.map(|limit| limit.saturating_sub(since.elapsed())) {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return state,
                Some(rest) => {
                    self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        state
    }

    /// Changes the state, and wakes all that wait for it and the background thread.
    pub(super) fn change<T>(&self, change: impl FnOnce(&mut ControlState) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        // A full pipe wakes it too.
        let _ = (&self.wake).write(&[1]);
        result
    }

    /// Notes that the sockets have taken all messages.
    pub(super) fn note_sent(&self) {
        let is_news = {
            let mut state = self.lock();
            let is_news = !state.is_sent && state.outbox.is_empty();
            state.is_sent |= is_news;
            is_news
        };
        if is_news {
            self.changed.notify_all();
        }
    }

    /// Waits, for a second at most, until all messages are sent: the process may end after that.
    pub(super) fn flush(&self) {
        drop(
            self.wait(Some(Duration::from_secs(1)), |state| {
                state.phase == ControlPhase::Ended || state.is_sent
            }),
        );
    }
}

impl ControlState {
    pub(super) fn send(&mut self, message: Packet) {
        self.outbox.push(message);
        self.is_sent = false;
    }

    pub(super) fn take_outbox(&mut self) -> Vec<Packet> {
        std::mem::take(&mut self.outbox)
    }

    pub(super) fn has_outbox(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Ends the run because of `fault`, if it has not ended yet.
    pub(super) fn fail(&mut self, fault: Fault) {
        if self.fault.is_none() && self.phase != ControlPhase::Ended {
            self.send(Message::Abort(fault.clone()).encode());
            self.fault = Some(fault);
        }
    }
}
