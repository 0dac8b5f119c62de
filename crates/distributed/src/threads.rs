//! Ranks as threads of one process, for tests.

use crate::channel::Channel;
use crate::communicator::Communicator;
use crate::error::CommError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A communicator whose ranks are threads of one process.
///
/// A rank that drops its communicator has left: the collectives of the others then fail.
pub struct ThreadCommunicator {
    rank: usize,
    meeting: Arc<Meeting>,
    sent_bytes: AtomicU64,
}

struct Meeting {
    world_size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// The collective that is under way.
struct State {
    /// The call and the input of each rank that has arrived.
    arrived: Vec<Option<(Call, Vec<u8>)>>,
    /// The ranks that have read the inputs and have still to be waited for by the next collective.
    read: usize,
    left: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Call {
    name: &'static str,
    first: usize,
    bytes: usize,
}

impl ThreadCommunicator {
    /// One communicator for each of `world_size` ranks.
    pub fn world(world_size: usize) -> Vec<ThreadCommunicator> {
        let state = State { arrived: vec![None; world_size], read: 0, left: None };
        let meeting = Arc::new(Meeting { world_size, state: Mutex::new(state), changed: Condvar::new() });
        let of_rank =
            |rank| ThreadCommunicator { rank, meeting: meeting.clone(), sent_bytes: AtomicU64::new(0) };
        (0..world_size).map(of_rank).collect()
    }

    /// Waits until all ranks have arrived with equal calls, lets `read` see their inputs, and waits until all
    /// have read.
    fn meet(&self, call: Call, input: &[u8], read: impl FnOnce(&[&[u8]])) -> Result<(), CommError> {
        let n = self.world_size();
        let mut state = self.wait(self.lock(), |state| state.arrived[self.rank].is_none())?;
        state.arrived[self.rank] = Some((call, input.to_vec()));
        self.meeting.changed.notify_all();
        let mut state = self.wait(state, |state| state.arrived.iter().all(Option::is_some))?;
        let mut inputs = Vec::with_capacity(n);
        for (rank, (other, bytes)) in state.arrived.iter().flatten().enumerate() {
            if *other != call {
                let message = format!("rank {} {call:?}, rank {rank} {other:?}", self.rank);
                return Err(CommError::Mismatch(message));
            }
            inputs.push(bytes.as_slice());
        }
        read(&inputs);
        self.sent_bytes.fetch_add((call.bytes * (n - 1)) as u64, Ordering::Relaxed);
        state.read += 1;
        if state.read == n {
            state.read = 0;
            state.arrived.fill(None);
            self.meeting.changed.notify_all();
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        until: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'a, State>, CommError> {
        while !until(&state) {
            if let Some(rank) = state.left {
                return Err(CommError::Left { rank });
            }
            state = self.meeting.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(state)
    }
}

impl Communicator for ThreadCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.meeting.world_size
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn all_gather(&self, first: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        let (n, bytes) = (self.world_size(), input.len());
        assert_eq!(output.len(), n * bytes, "the output of all_gather has a piece for each rank");
        self.meet(Call { name: "all_gather", first, bytes }, input, |inputs| {
            for p in 0..n {
                output[p * bytes..][..bytes].copy_from_slice(inputs[(first + p) % n]);
            }
        })
    }

    fn all_to_all(&self, first: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        let n = self.world_size();
        assert_eq!(input.len(), output.len(), "all_to_all sends as much as it receives");
        assert!(input.len().is_multiple_of(n), "all_to_all has a piece of equal length for each rank");
        let bytes = input.len() / n;
        let piece = (self.rank + n - first % n) % n;
        self.meet(Call { name: "all_to_all", first, bytes }, input, |inputs| {
            for r in 0..n {
                output[r * bytes..][..bytes].copy_from_slice(&inputs[r][piece * bytes..][..bytes]);
            }
        })
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        self.lock().left.get_or_insert(self.rank);
        self.meeting.changed.notify_all();
    }
}

/// A channel whose ranks are threads of one process. A rank that drops it has left: the calls of the others
/// then fail.
pub struct ThreadChannel(ThreadCommunicator);

impl ThreadChannel {
    /// One channel for each of `world_size` ranks.
    pub fn world(world_size: usize) -> Vec<ThreadChannel> {
        ThreadCommunicator::world(world_size).into_iter().map(ThreadChannel).collect()
    }
}

impl Channel for ThreadChannel {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn broadcast(&self, bytes: &[u8]) -> Result<Vec<u8>, CommError> {
        let mut of_root = Vec::new();
        let call = Call { name: "broadcast", first: 0, bytes: 0 };
        self.0.meet(call, bytes, |all| of_root = all[0].to_vec())?;
        Ok(of_root)
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut gathered = Vec::new();
        self.0.meet(Call { name: "gather", first: 0, bytes: 0 }, bytes, |all| {
            if self.0.rank == 0 {
                gathered = all.iter().map(|bytes| bytes.to_vec()).collect();
            }
        })?;
        Ok(gathered)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn on_ranks<T: Send>(n: usize, f: impl Fn(ThreadCommunicator) -> T + Sync) -> Vec<T> {
        thread::scope(|scope| {
            let spawn = |ranks| scope.spawn(|| f(ranks));
            let handles: Vec<_> = ThreadCommunicator::world(n).into_iter().map(spawn).collect();
            handles.into_iter().map(|h| h.join().expect("a rank")).collect()
        })
    }

    #[test]
    fn gathered_pieces_are_placed_from_the_first_rank_on() {
        let gathered = on_ranks(3, |ranks| {
            let mut output = [0; 3];
            ranks.all_gather(2, &[ranks.rank() as u8], &mut output).map(|()| output)
        });
        assert_eq!(gathered, vec![Ok([2, 0, 1]); 3]);
    }

    #[test]
    fn pieces_arrive_at_their_ranks_in_the_order_of_senders() {
        let received = on_ranks(3, |ranks| {
            let r = ranks.rank() as u8 * 10;
            let mut output = [0; 3];
            ranks.all_to_all(2, &[r, r + 1, r + 2], &mut output).map(|()| output)
        });
        assert_eq!(received, [Ok([1, 11, 21]), Ok([2, 12, 22]), Ok([0, 10, 20])]);
    }

    #[test]
    fn a_rank_that_leaves_ends_the_collectives_of_the_others() {
        let results = on_ranks(2, |ranks| match ranks.rank() {
            0 => Ok(()),
            _ => ranks.all_gather(0, &[1], &mut [0; 2]),
        });
        assert_eq!(results, [Ok(()), Err(CommError::Left { rank: 0 })]);
    }

    #[test]
    fn a_channel_carries_bytes_of_any_length_to_and_from_rank_0() {
        let said = thread::scope(|scope| {
            let spawn = |channel: ThreadChannel| {
                scope.spawn(move || {
                    let own = vec![7; channel.rank()];
                    (channel.gather(&own), channel.broadcast(&[channel.rank() as u8; 2]))
                })
            };
            let handles: Vec<_> = ThreadChannel::world(3).into_iter().map(spawn).collect();
            handles.into_iter().map(|handle| handle.join().expect("a rank")).collect::<Vec<_>>()
        });
        assert_eq!(said[0], (Ok(vec![vec![], vec![7], vec![7, 7]]), Ok(vec![0, 0])));
        assert_eq!(said[2], (Ok(vec![]), Ok(vec![0, 0])));
    }

    #[test]
    fn different_collectives_are_refused() {
        let results = on_ranks(2, |ranks| {
            let result = ranks.all_gather(ranks.rank(), &[1], &mut [0; 2]);
            matches!(result, Err(CommError::Mismatch(_)) | Err(CommError::Left { .. }))
        });
        assert_eq!(results, [true, true]);
    }
}
