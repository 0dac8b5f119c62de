//! A communicator that counts what its rank sends, and that can leave, or take its time.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;
use xtrain_distributed::{CommError, Communicator, Groups, ThreadCommunicator};

/// Bytes by collective.
pub(crate) type Sent = BTreeMap<&'static str, u64>;

/// A communicator that counts its collectives, and the bytes that its rank sends to others.
pub(crate) struct Counting {
    /// None after the rank has left.
    inner: Mutex<Option<ThreadCommunicator>>,
    rank: usize,
    world_size: usize,
    sent: Mutex<Sent>,
    /// Collectives so far. The count outlives the communicator: a rank leaves when its communicator is
    /// dropped.
    pub(crate) calls: Arc<AtomicUsize>,
    /// The number of the collective in which the rank leaves, from 0.
    last: usize,
    /// The time of each pass of a stage: before it sends, and at both ends of a pipeline after it receives.
    pass: Duration,
}

impl Counting {
    pub(crate) fn new(inner: ThreadCommunicator) -> Self {
        Counting::leaving(inner, usize::MAX)
    }

    /// The communicator of a rank that leaves in this collective.
    pub(crate) fn leaving(inner: ThreadCommunicator, last: usize) -> Self {
        let (rank, world_size) = (inner.rank(), inner.world_size());
        let inner = Mutex::new(Some(inner));
        let (sent, calls, pass) = (Mutex::default(), Arc::default(), Duration::ZERO);
        Counting { inner, rank, world_size, sent, calls, last, pass }
    }

    /// The communicator of a stage of one rank whose forwards and backwards take this time each, beside which
    /// that of a small model is nothing.
    pub(crate) fn paced(inner: ThreadCommunicator, pass: Duration) -> Self {
        Counting { pass, ..Counting::new(inner) }
    }

    /// The bytes that were sent since the last call.
    pub(crate) fn take(&self) -> Sent {
        std::mem::take(&mut self.sent.lock().expect("counts"))
    }

    fn count(&self, name: &'static str, bytes: usize) {
        if bytes > 0 {
            *self.sent.lock().expect("counts").entry(name).or_default() += bytes as u64;
        }
    }

    fn call(
        &self,
        name: &'static str,
        groups: Groups,
        piece_bytes: usize,
        collective: impl FnOnce(&ThreadCommunicator) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.count(name, piece_bytes * (groups.size - 1));
        let mut inner = self.inner.lock().expect("a communicator");
        if self.calls.fetch_add(1, Ordering::Relaxed) == self.last {
            *inner = None;
        }
        inner.as_ref().map_or(Err(CommError::Left { rank: self.rank }), collective)
    }
}

impl Communicator for Counting {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn sent_bytes(&self) -> u64 {
        self.inner.lock().expect("a communicator").as_ref().map_or(0, Communicator::sent_bytes)
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.call("all_gather", groups, input.len(), |inner| inner.all_gather(groups, first, input, output))
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let piece_bytes = input.len() / groups.size;
        self.call("all_to_all", groups, piece_bytes, |inner| inner.all_to_all(groups, first, input, output))
    }

    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError> {
        thread::sleep(self.pass);
        self.count("send", message.len());
        self.call("send", Groups::world(1), 0, |inner| inner.send(groups, to, message))
    }

    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError> {
        self.call("receive", Groups::world(1), 0, |inner| inner.receive(groups, from, message))?;
        // The backward of the first stage and the forward of the last one send nothing.
        if [0, self.world_size - 1].contains(&self.rank) {
            thread::sleep(self.pass);
        }
        Ok(())
    }
}
