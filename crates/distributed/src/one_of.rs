//! One rank of many whose others do not exist, for measurements on one device.

use crate::communicator::Communicator;
use crate::error::CommError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use xtrain_rank::Groups;

/// The communicator of rank 0 of a run whose other ranks do not exist. In place of a collective it copies as
/// many bytes within this process: all other ranks appear to send what this one does.
#[derive(Debug)]
pub struct OneOf {
    world_size: usize,
    pace: Option<Pace>,
    sent_bytes: AtomicU64,
}

/// The least time of a collective, or of several that are issued together.
#[derive(Clone, Debug, PartialEq)]
pub struct Pace {
    /// By kind of collectives. Others take no time.
    pub times: Vec<(Sending, PaceTime)>,
}

/// Collectives of one kind: the groups of ranks, and the path of the bytes that a rank sends to the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sending {
    /// The groups.
    pub groups: Groups,
    /// The path.
    pub path: Path,
}

/// The path of the bytes that a rank sends to others of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// Pieces pass around a ring of all ranks, as in an all-gather.
    Ring,
    /// Each rank sends to all.
    All,
    /// A rank sends to one other.
    One,
}

/// The least time of collectives of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaceTime {
    /// Time in addition to that of the bytes.
    pub latency: Duration,
    /// Bytes per second that a rank sends to others of its group.
    pub bandwidth: f64,
}

impl Pace {
    /// The least time of collectives in which a rank sends these bytes to others of its groups. Those that
    /// are issued together take the longest latency once.
    pub fn least(&self, sent_bytes: impl IntoIterator<Item = (Sending, u64)>) -> Duration {
        let (mut latency, mut seconds) = (Duration::ZERO, 0.0);
        for (sending, bytes) in sent_bytes {
            if let Some((_, time)) = self.times.iter().find(|(of, _)| *of == sending) {
                latency = latency.max(time.latency);
                seconds += bytes as f64 / time.bandwidth;
            }
        }
        latency + Duration::from_secs_f64(seconds)
    }
}

impl OneOf {
    /// Rank 0 of `world_size`. With a `pace`, collectives take at least its time.
    pub fn new(world_size: usize, pace: Option<Pace>) -> OneOf {
        OneOf { world_size, pace, sent_bytes: AtomicU64::new(0) }
    }

    /// The least time of collectives, if they have one.
    pub fn pace(&self) -> Option<&Pace> {
        self.pace.as_ref()
    }

    /// Runs `copy` in place of a collective in which this rank sends so many bytes to others.
    fn run(&self, sending: Sending, sent: usize, copy: impl FnOnce()) -> Result<(), CommError> {
        let begun = Instant::now();
        copy();
        let sent = sent as u64;
        self.sent_bytes.fetch_add(sent, Ordering::Relaxed);
        if let Some(pace) = &self.pace {
            thread::sleep(pace.least([(sending, sent)]).saturating_sub(begun.elapsed()));
        }
        Ok(())
    }
}

impl Communicator for OneOf {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        self.world_size
    }

    fn sent_bytes(&self) -> u64 {
        self.sent_bytes.load(Ordering::Relaxed)
    }

    fn all_gather(&self, groups: Groups, _: usize, input: &[u8], output: &mut [u8]) -> Result<(), CommError> {
        assert_eq!(output.len(), groups.size * input.len(), "the output has a piece for each rank");
        let sent = input.len() * (groups.size - 1);
        self.run(Sending { groups, path: Path::Ring }, sent, || {
            output.chunks_exact_mut(input.len().max(1)).for_each(|piece| piece.copy_from_slice(input));
        })
    }

    fn all_to_all(
        &self,
        groups: Groups,
        first: usize,
        input: &[u8],
        output: &mut [u8],
    ) -> Result<(), CommError> {
        assert_eq!(input.len(), output.len(), "all_to_all sends as much as it receives");
        let n = groups.size;
        let (bytes, own) = (input.len() / n, (n - first % n) % n);
        let piece = &input[own * bytes..][..bytes];
        self.run(Sending { groups, path: Path::All }, bytes * (n - 1), || {
            output.chunks_exact_mut(bytes.max(1)).for_each(|received| received.copy_from_slice(piece));
        })
    }

    fn send(&self, groups: Groups, _: usize, message: &[u8]) -> Result<(), CommError> {
        self.run(Sending { groups, path: Path::One }, message.len(), || {})
    }

    /// The message is zeros.
    fn receive(&self, _: Groups, _: usize, message: &mut [u8]) -> Result<(), CommError> {
        message.fill(0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_appear_to_send_what_this_rank_does() {
        let ranks = OneOf::new(3, None);
        let mut output = [0; 6];
        assert_eq!(ranks.all_gather(ranks.world(), 2, &[1, 2], &mut output), Ok(()));
        assert_eq!((output, ranks.sent_bytes()), ([1, 2, 1, 2, 1, 2], 4));
        // The second piece belongs to rank 0 if the first belongs to rank 2.
        assert_eq!(ranks.all_to_all(ranks.world(), 2, &[1, 2, 3, 4, 5, 6], &mut output), Ok(()));
        assert_eq!((output, ranks.sent_bytes()), ([3, 4, 3, 4, 3, 4], 8));
        assert_eq!(ranks.all_gather(ranks.world(), 0, &[], &mut []), Ok(()));
    }

    #[test]
    fn a_pace_is_kept() {
        let replicas = Groups { size: 2, stride: 2 };
        let time =
            |milliseconds, bandwidth| PaceTime { latency: Duration::from_millis(milliseconds), bandwidth };
        let sending = |groups, path| Sending { groups, path };
        let times = vec![
            (sending(Groups::world(4), Path::Ring), time(5, 300.0)),
            (sending(Groups::world(4), Path::All), time(1, 50.0)),
            (sending(replicas, Path::Ring), time(5, 50.0)),
        ];
        let pace = Pace { times };
        let least = |sent: &[(Sending, u64)]| pace.least(sent.iter().copied()).as_secs_f64();
        let (ring, direct) = (sending(Groups::world(4), Path::Ring), sending(Groups::world(4), Path::All));
        for (sent, expected) in [
            (&[(ring, 3)][..], 0.015),
            (&[(direct, 3)], 0.061),
            (&[(ring, 3), (direct, 3)], 0.075),
            (&[(sending(replicas, Path::Ring), 3)], 0.065),
            (&[(sending(replicas, Path::All), 3)], 0.0),
        ] {
            assert!((least(sent) - expected).abs() < 1e-9, "{sent:?}");
        }
        let ranks = OneOf::new(4, Some(pace));
        for (groups, milliseconds) in [(ranks.world(), 15), (replicas, 25)] {
            let begun = Instant::now();
            assert_eq!(ranks.all_gather(groups, 0, &[7], &mut vec![0; groups.size]), Ok(()));
            assert!(begun.elapsed() >= Duration::from_millis(milliseconds));
        }
    }
}
