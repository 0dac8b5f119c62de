//! Ranks as threads of one process, for tests.

use crate::channel::Channel;
use crate::communicator::Communicator;
use crate::error::CommError;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use xtrain_rank::Groups;

/// A communicator whose ranks are threads of one process.
///
/// A rank that drops its communicator has left: the collectives of the others with it then fail.
pub struct ThreadCommunicator {
    rank: usize,
    /// Its collectives with each group.
    calls: Mutex<HashMap<Groups, u64>>,
    meeting: Arc<Meeting>,
    sent_bytes: AtomicU64,
}

struct Meeting {
    world_size: usize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The collectives of which not all ranks have read the inputs, by the groups, the first rank of the
    /// group and the collectives of the group before.
    underway: HashMap<(Groups, usize, u64), Underway>,
    /// The messages that are sent and not received, by sender and receiver, oldest first.
    messages: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    /// The ranks that have left.
    left: Vec<usize>,
}

struct Underway {
    /// The call and the input of each rank of the group that has arrived.
    arrived: Vec<Option<(ThreadCall, Vec<u8>)>>,
    /// The ranks that have read.
    read: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThreadCall {
    name: &'static str,
    groups: Groups,
    first: usize,
    bytes: usize,
}

impl ThreadCommunicator {
    /// One communicator for each of `world_size` ranks.
    pub fn world(world_size: usize) -> Vec<ThreadCommunicator> {
        let meeting = Meeting { world_size, state: Mutex::default(), changed: Condvar::new() };
        let meeting = Arc::new(meeting);
        let rank = |rank| ThreadCommunicator {
            rank,
            calls: Mutex::default(),
            sent_bytes: AtomicU64::new(0),
            meeting: meeting.clone(),
        };
        (0..world_size).map(rank).collect()
    }

    /// Waits until all ranks of the group have arrived with equal calls, and lets `read` see their inputs.
    fn meet(&self, call: ThreadCall, input: &[u8], read: impl FnOnce(&[&[u8]])) -> Result<(), CommError> {
        let (groups, changed) = (call.groups, &self.meeting.changed);
        let ranks = groups.ranks(self.rank);
        let key = {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            let number = calls.entry(groups).or_insert(0);
            *number += 1;
            (groups, self.rank - groups.place(self.rank) * groups.stride, *number)
        };
        let new = || Underway { arrived: vec![None; groups.size], read: 0 };
        let mut state = self.lock();
        let arrived = &mut state.underway.entry(key).or_insert_with(new).arrived;
        arrived[groups.place(self.rank)] = Some((call, input.to_vec()));
        changed.notify_all();
        loop {
            let arrived = &state.underway[&key].arrived;
            let Some((_, missing)) = arrived.iter().zip(ranks.clone()).find(|(arrived, _)| arrived.is_none())
            else {
                break;
            };
            if state.left.contains(&missing) {
                return Err(CommError::Left { rank: missing });
            }
            state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let mut inputs = Vec::with_capacity(groups.size);
        let Some(underway) = state.underway.get_mut(&key) else { unreachable!("not all have read") };
        for (arrived, rank) in underway.arrived.iter().zip(ranks) {
            let Some((other, bytes)) = arrived else { unreachable!("all have arrived") };
            if *other != call {
                let message = format!("rank {} {call:?}, rank {rank} {other:?}", self.rank);
                return Err(CommError::Mismatch(message));
            }
            inputs.push(bytes.as_slice());
        }
        read(&inputs);
        let sent = (call.bytes * (groups.size - 1)) as u64;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        underway.read += 1;
        if underway.read == groups.size {
            state.underway.remove(&key);
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.meeting.state.lock().unwrap_or_else(PoisonError::into_inner)
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

    fn all_gather(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let (n, bytes) = (groups.size, input.len());
        assert_eq!(output.len(), n * bytes, "the output of all_gather has a piece for each rank");
        self.meet(ThreadCall { name: "all_gather", groups, first, bytes }, input, |inputs| {
            for p in 0..n {
                output[p * bytes..][..bytes].copy_from_slice(inputs[(first + p) % n]);
            }
        })
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        let n = groups.size;
        assert_eq!(input.len(), output.len(), "all_to_all sends as much as it receives");
        assert!(input.len().is_multiple_of(n), "all_to_all has a piece of equal length for each rank");
        let bytes = input.len() / n;
        let piece = (groups.place(self.rank) + n - first % n) % n;
        self.meet(ThreadCall { name: "all_to_all", groups, first, bytes }, input, |inputs| {
            for r in 0..n {
                output[r * bytes..][..bytes].copy_from_slice(&inputs[r][piece * bytes..][..bytes]);
            }
        })
    }

    fn send(&self, groups: Groups, to: usize, message: &[u8]) -> Result<(), CommError> {
        let to = groups.rank_at(self.rank, to);
        let mut state = self.lock();
        state.messages.entry((self.rank, to)).or_default().push_back(message.to_vec());
        self.sent_bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
        self.meeting.changed.notify_all();
        Ok(())
    }

    fn receive(&self, groups: Groups, from: usize, message: &mut [u8]) -> Result<(), CommError> {
        let from = groups.rank_at(self.rank, from);
        let mut state = self.lock();
        loop {
            let messages = state.messages.entry((from, self.rank)).or_default();
            if let Some(received) = messages.pop_front() {
                if received.len() != message.len() {
                    let (sent, expected) = (received.len(), message.len());
                    return Err(CommError::Mismatch(format!(
                        "rank {} expects a message of {expected} bytes, and rank {from} has sent {sent}",
                        self.rank
                    )));
                }
                message.copy_from_slice(&received);
                return Ok(());
            }
            if state.left.contains(&from) {
                return Err(CommError::Left { rank: from });
            }
            state = self.meeting.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for ThreadCommunicator {
    fn drop(&mut self) {
        self.lock().left.push(self.rank);
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
        let call = ThreadCall { name: "broadcast", groups: self.0.world(), first: 0, bytes: 0 };
        self.0.meet(call, bytes, |all| of_root = all[0].to_vec())?;
        Ok(of_root)
    }

    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        let mut gathered = Vec::new();
        let call = ThreadCall { name: "gather", groups: self.0.world(), first: 0, bytes: 0 };
        self.0.meet(call, bytes, |all| {
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
    use crate::testing;
    use proptest::prelude::*;
    use std::thread;
    use std::time::Duration;

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
            ranks.all_gather(ranks.world(), 2, &[ranks.rank() as u8], &mut output).map(|()| output)
        });
        assert_eq!(gathered, vec![Ok([2, 0, 1]); 3]);
    }

    #[test]
    fn pieces_arrive_at_their_ranks_in_the_order_of_senders() {
        let received = on_ranks(3, |ranks| {
            let r = ranks.rank() as u8 * 10;
            let mut output = [0; 3];
            ranks.all_to_all(ranks.world(), 2, &[r, r + 1, r + 2], &mut output).map(|()| output)
        });
        assert_eq!(received, [Ok([1, 11, 21]), Ok([2, 12, 22]), Ok([0, 10, 20])]);
    }

    #[test]
    fn messages_arrive_in_order_and_end_with_their_sender() {
        let received = on_ranks(2, |ranks| {
            let (world, other) = (ranks.world(), 1 - ranks.rank());
            (1..=2)
                .for_each(|n| ranks.send(world, other, &[n * 10 + ranks.rank() as u8]).expect("a message"));
            let mut message = [0];
            let mut next = || ranks.receive(world, other, &mut message).map(|()| message[0]);
            let both = [next(), next()];
            // Rank 0 leaves.
            (both, if ranks.rank() == 1 { next() } else { Ok(0) })
        });
        assert_eq!(received[0], ([Ok(11), Ok(21)], Ok(0)));
        assert_eq!(received[1], ([Ok(10), Ok(20)], Err(CommError::Left { rank: 0 })));
    }

    #[test]
    fn a_rank_that_leaves_ends_the_collectives_of_the_others() {
        let results = on_ranks(2, |ranks| match ranks.rank() {
            0 => Ok(()),
            _ => ranks.all_gather(ranks.world(), 0, &[1], &mut [0; 2]),
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
            let result = ranks.all_gather(ranks.world(), ranks.rank(), &[1], &mut [0; 2]);
            matches!(result, Err(CommError::Mismatch(_)) | Err(CommError::Left { .. }))
        });
        assert_eq!(results, [true, true]);
    }

    proptest! {
        /// Each rank waits at random, so that some groups are several collectives ahead of others.
        #[test]
        fn collectives_of_groups_equal_a_plain_loop(
            [size, stride, blocks] in [1usize..4, 1usize..4, 1usize..3],
            calls in prop::collection::vec((any::<[bool; 2]>(), 0usize..4, 0usize..5), 1..8),
            seed in any::<u64>(),
        ) {
            let world_size = size * stride * blocks;
            on_ranks(world_size, |ranks| {
                for (n, &([is_gather, of_world], first, bytes)) in calls.iter().enumerate() {
                    if (seed >> ((n * world_size + ranks.rank()) % 64)) & 1 == 1 {
                        thread::sleep(Duration::from_millis(1));
                    }
                    let groups = if of_world { ranks.world() } else { Groups { size, stride } };
                    testing::check(&ranks, groups, is_gather, first % groups.size, bytes).expect("a collective");
                }
            });
        }
    }

    #[test]
    fn a_rank_that_leaves_ends_nothing_of_other_groups() {
        let results = on_ranks(4, |ranks| match ranks.rank() {
            0 => Ok(()),
            _ => ranks.all_gather(Groups { size: 2, stride: 1 }, 0, &[1], &mut [0; 2]),
        });
        assert_eq!(results, [Ok(()), Err(CommError::Left { rank: 0 }), Ok(()), Ok(())]);
    }
}
