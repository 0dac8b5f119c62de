//! A communicator that counts the bytes that its rank sends.

use std::collections::BTreeMap;
use std::sync::Mutex;
use xtrain_distributed::{CommError, Communicator, Groups, ThreadCommunicator};

/// Bytes by collective.
pub(crate) type Sent = BTreeMap<&'static str, u64>;

/// A communicator that counts the bytes that its rank sends to others.
pub(crate) struct Counting {
    inner: Mutex<ThreadCommunicator>,
    rank: usize,
    world_size: usize,
    sent: Mutex<Sent>,
}

impl Counting {
    pub(crate) fn new(inner: ThreadCommunicator) -> Self {
        let (rank, world_size) = (inner.rank(), inner.world_size());
        Counting { inner: Mutex::new(inner), rank, world_size, sent: Mutex::default() }
    }

    /// The bytes that were sent since the last call.
    pub(crate) fn take(&self) -> Sent {
        std::mem::take(&mut self.sent.lock().expect("counts"))
    }

    fn count(&self, collective: &'static str, groups: Groups, piece_bytes: usize) {
        let bytes = (piece_bytes * (groups.size - 1)) as u64;
        *self.sent.lock().expect("counts").entry(collective).or_default() += bytes;
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
        self.inner.lock().expect("a communicator").sent_bytes()
    }

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.count("all_gather", groups, input.len());
        self.inner.lock().expect("a communicator").all_gather(groups, first, input, output)
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        self.count("all_to_all", groups, input.len() / groups.size);
        self.inner.lock().expect("a communicator").all_to_all(groups, first, input, output)
    }
}
