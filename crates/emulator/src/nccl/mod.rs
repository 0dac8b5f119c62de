//! The emulated NCCL: communicators whose ranks are processes, or threads of one.
//!
//! A group of calls is queued like other work. When it runs, its rank posts the calls and the bytes that it
//! sends to all ranks ([`link`]); it completes when all ranks have posted theirs. The calls are compared
//! then, and a difference is a failure that names it. NCCL itself would hang, or mix up data.
//!
//! Stricter than NCCL: every rank takes part in every group of its communicator, and the buffers of a group
//! are at the same place of equally long allocations on all ranks, as symmetric windows need it, unless
//! `places=0`. So ranks that exchange two groups of equal kinds and sizes are found too.
//!
//! Sums are of f32. NCCL promises no order of their ranks; here it is drawn by the seed and the size of the
//! call, so that equal calls have equal bits, as NCCL's have on one machine.
//!
//! Deliberately absent: blocking communicators, all-reduce, other reductions, splitting and shrinking.

mod frame;
mod hub;
pub(crate) mod link;
mod post;

pub(crate) use frame::CommunicatorName;
pub(crate) use hub::open;
pub(crate) use post::{CallKind, MemoryPlace, Post, PostedCall};

use crate::memory::Memory;
use crate::random::Random;
use post::difference;
use std::sync::Arc;

/// An `ncclResult_t` other than success and progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    System = 2,
    Internal = 3,
    InvalidArgument = 4,
    InvalidUsage = 5,
    Remote = 6,
}

/// A call of a group.
#[derive(Clone, Debug)]
pub(crate) struct GroupCall {
    pub(crate) kind: CallKind,
    /// An `ncclDataType_t`.
    pub(crate) element: i32,
    pub(crate) count: u64,
    /// The bytes that this rank sends, if it does: their address and number.
    pub(crate) source: Option<(u64, u64)>,
    /// The bytes that this rank receives, if it does.
    pub(crate) target: Option<(u64, u64)>,
}

/// The calls of a group on one communicator.
#[derive(Debug)]
pub(crate) struct CallGroup {
    pub(crate) communicator: usize,
    pub(crate) calls: Vec<GroupCall>,
}

impl CallGroup {
    /// True if a call reads or writes these bytes of device memory.
    pub(crate) fn uses(&self, start: u64, bytes: u64) -> bool {
        let overlaps = |(address, length): (u64, u64)| address < start + bytes && start < address + length;
        self.calls.iter().any(|call| call.source.is_some_and(overlaps) || call.target.is_some_and(overlaps))
    }

    /// Bytes that this rank sends and receives.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = |range: Option<(u64, u64)>| range.map_or(0, |(_, bytes)| bytes);
        self.calls.iter().map(|call| bytes(call.source) + bytes(call.target)).sum()
    }

    /// Two calls of which one writes what the other reads or writes: they run at the same time.
    fn race(&self) -> Option<String> {
        let overlap = |a: Option<(u64, u64)>, b: Option<(u64, u64)>| {
            a.zip(b).is_some_and(|(a, b)| a.0 < b.0 + b.1 && b.0 < a.0 + a.1)
        };
        let races = |a: &GroupCall, b: &GroupCall| overlap(a.target, b.source) || overlap(a.target, b.target);
        let pairs =
            self.calls.iter().enumerate().flat_map(|(n, a)| self.calls[..n].iter().map(move |b| (a, b)));
        let (a, b) = pairs.into_iter().find(|(a, b)| races(a, b) || races(b, a))?;
        Some(format!("{} and {} of one group use the same bytes, which one of them writes", b.kind, a.kind))
    }

    /// The calls, with the bytes that this rank sends.
    ///
    /// # Errors
    /// A call reads bytes that were never written or are not allocated, or that another one writes.
    pub(crate) fn post(&self, number: u64, memory: &Memory, with_places: bool) -> Result<Post, String> {
        if let Some(race) = self.race() {
            return Err(race);
        }
        let place = |range: Option<(u64, u64)>| {
            let (start, bytes) = memory.allocation(range.filter(|_| with_places)?.0)?;
            Some(MemoryPlace { offset: range?.0 - start, of: bytes })
        };
        let posted = |call: &GroupCall| {
            let mut bytes = Vec::new();
            if let Some((address, length)) = call.source {
                bytes.resize(length as usize, 0);
                memory.read(address, &mut bytes).map_err(|_| {
                    let what = memory.describe(address, length);
                    format!("{} reads bytes that nothing wrote: {what}", call.kind)
                })?;
            }
            let (source, target) = (place(call.source), place(call.target));
            Ok(PostedCall {
                kind: call.kind,
                element: call.element,
                count: call.count,
                source,
                target,
                bytes,
            })
        };
        Ok(Post { number, calls: self.calls.iter().map(posted).collect::<Result<_, String>>()? })
    }

    /// Writes what the ranks have posted to this rank. Sums have an order by `seed`.
    ///
    /// # Errors
    /// The ranks disagree; a call writes outside of an allocation.
    pub(crate) fn complete(
        &self,
        rank: usize,
        posts: &[Arc<Post>],
        memory: &Memory,
        seed: u64,
    ) -> Result<(), String> {
        if let Some(difference) = difference(posts) {
            return Err(difference);
        }
        let write = |address: u64, bytes: &[u8]| {
            let outside = || {
                format!("a collective writes out of bounds: {}", memory.describe(address, bytes.len() as u64))
            };
            memory.write(address, bytes).ok_or_else(outside)
        };
        let mut received = vec![0; posts.len()];
        for (n, call) in self.calls.iter().enumerate() {
            let Some((target, _)) = call.target else { continue };
            match call.kind {
                CallKind::AllGather => {
                    for (other, post) in posts.iter().enumerate() {
                        let bytes = &post.calls[n].bytes;
                        write(target + (other * bytes.len()) as u64, bytes)?;
                    }
                }
                CallKind::Broadcast { root } => write(target, &posts[root].calls[n].bytes)?,
                CallKind::ReduceScatter => {
                    let bytes = call.source.map_or(0, |(_, bytes)| bytes as usize) / posts.len();
                    let piece: Vec<&[u8]> =
                        posts.iter().map(|post| &post.calls[n].bytes[rank * bytes..][..bytes]).collect();
                    write(target, &sum(piece, seed))?;
                }
                CallKind::Reduce { .. } => {
                    write(target, &sum(posts.iter().map(|post| &post.calls[n].bytes[..]).collect(), seed))?;
                }
                CallKind::Receive { from } => {
                    let mut sends =
                        posts[from].calls.iter().filter(|call| call.kind == CallKind::Send { to: rank });
                    let sent = sends.nth(received[from]);
                    received[from] += 1;
                    write(target, &sent.ok_or("a send is missing")?.bytes)?;
                }
                CallKind::Send { .. } => {}
            }
        }
        Ok(())
    }
}

/// The sum of the f32 that ranks send, in an order of the ranks by `seed` and the number of bytes.
fn sum(mut inputs: Vec<&[u8]>, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed ^ inputs[0].len() as u64);
    for rank in (1..inputs.len()).rev() {
        inputs.swap(rank, random.below(rank + 1));
    }
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let mut sum = floats(inputs[0]);
    for input in &inputs[1..] {
        sum.iter_mut().zip(floats(input)).for_each(|(sum, x)| *sum += x);
    }
    sum.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Bytes of an element.
pub(crate) fn element_bytes(element: i32) -> Option<u64> {
    Some(match element {
        0 | 1 | 10 | 11 => 1,
        6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return None,
    })
}
