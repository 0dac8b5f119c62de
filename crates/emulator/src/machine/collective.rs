//! CommitGroups of NCCL calls in the queue: they post, wait for the other ranks, and complete.

use super::Machine;
use crate::nccl::link::RankLink;
use crate::nccl::{CallGroup, Refusal};
use crate::queue::{ItemId, Taken};
use crate::settings::Ordering;
use crate::status::{self, Status};
use crate::work::{Failure, WorkItem};
use std::sync::Arc;

/// A rank's end of a communicator.
pub(crate) struct Communicator {
    pub(crate) device: usize,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) link: Arc<RankLink>,
    /// The group of the last call, until it is queued; the stream; and how often `ncclCommGetAsyncError`
    /// answers "in progress" before.
    pub(crate) launching: Option<(Arc<CallGroup>, usize, usize)>,
    /// The number of groups queued so far.
    pub(crate) issued: u64,
    /// The number of those that this rank has posted.
    pub(crate) posted: u64,
    /// The last of them.
    pub(crate) tail: Option<ItemId>,
    /// The error that ended it.
    pub(crate) error: Option<(Refusal, String)>,
    pub(crate) is_finalized: bool,
}

/// A group that has posted.
pub(super) struct Waiting {
    item: ItemId,
    communicator: usize,
    number: u64,
    /// True once it can complete: all ranks have posted, or it was aborted.
    is_ready: bool,
}

impl Machine {
    /// Queues a group, or adds it to the graph that the stream captures. `omit` and `swap` change the order.
    pub(crate) fn put_group(&mut self, stream: usize, group: Arc<CallGroup>) -> Result<(), Status> {
        let rank = self.communicators.get(&group.communicator).map_or(0, |of| of.rank);
        if rank == 1 && self.omits(Ordering::Collective) {
            return Ok(());
        }
        if let Some((_, number)) = self.settings.swap.filter(|(of, _)| *of == rank) {
            self.swappable += 1;
            if self.swappable == number + 1 {
                self.held_back = Some((stream, group));
                return Ok(());
            }
        }
        let communicator = group.communicator;
        self.put(stream, WorkItem::Collective(group))?;
        match self.held_back.take_if(|(_, held)| held.communicator == communicator) {
            Some((stream, held)) => self.put(stream, WorkItem::Collective(held)),
            None => Ok(()),
        }
    }

    /// Makes groups ready for which all other ranks are there, and those of communicators that were aborted.
    pub(super) fn admit(&mut self) {
        let Machine { waiting, communicators, queue, .. } = self;
        for waiting in waiting.iter_mut().filter(|waiting| !waiting.is_ready) {
            let is_ready = communicators.get(&waiting.communicator).is_none_or(|of| {
                of.link.has_all(waiting.number) || of.link.finished_before(waiting.number).is_some()
            });
            if is_ready {
                waiting.is_ready = true;
                queue.make_ready(waiting.item);
            }
        }
    }

    /// Posts a group, or completes it if it has posted before. True if it is done.
    pub(super) fn run_collective(&mut self, group: &CallGroup, taken: &Taken) -> Result<bool, Failure> {
        // Work that was aborted ends without effect.
        let Some(of) = self.communicators.get_mut(&group.communicator) else {
            self.waiting.retain(|waiting| waiting.item != taken.id);
            return Ok(true);
        };
        let memory = &self.devices[of.device].memory;
        let failure = |text: String| Failure { status: status::LAUNCH_FAILED, text: format!("NCCL: {text}") };
        let Some(at) = self.waiting.iter().position(|waiting| waiting.item == taken.id) else {
            // CommitGroups run in the order in which they were queued.
            let number = of.posted;
            of.posted += 1;
            of.link.post(group.post(number, memory, self.settings.compares_places).map_err(failure)?);
            let (item, communicator) = (taken.id, group.communicator);
            self.waiting.push(Waiting { item, communicator, number, is_ready: false });
            return Ok(false);
        };
        let number = self.waiting.swap_remove(at).number;
        let posts = of.link.take(number);
        let completed = match of.link.finished_before(number).filter(|_| posts.len() < of.size) {
            Some((rank, count)) => Err(format!(
                "the ranks disagree on the number of groups of their communicator: rank {} calls {} as \
                 number {number}, but rank {rank} has finished after {count}",
                of.rank,
                group.calls.first().map_or_else(String::new, |call| call.kind.to_string())
            )),
            None => group.complete(of.rank, &posts, memory, self.settings.seed),
        };
        if let Err(text) = &completed {
            of.error = Some((Refusal::InvalidUsage, text.clone()));
        }
        completed.map(|()| true).map_err(failure)
    }

    /// Drops the work of a device that failed.
    pub(super) fn clear(&mut self, device: usize) {
        self.queue.clear(device);
        let queue = &self.queue;
        self.waiting.retain(|waiting| queue.is_pending(waiting.item));
        self.blocked.retain(|(item, ..)| queue.is_pending(*item));
    }

    /// Ends the work of a communicator without effect: what is queued, and what graphs contain.
    pub(crate) fn abort(&mut self, communicator: usize) {
        if let Some(of) = self.communicators.remove(&communicator) {
            of.link.leave();
            self.aborted.insert(communicator);
        }
    }

    /// True if queued work of a communicator has not run.
    pub(crate) fn has_groups(&self, communicator: usize) -> bool {
        let tail = self.communicators.get(&communicator).and_then(|of| of.tail);
        tail.is_some_and(|item| self.queue.is_pending(item))
    }

    /// A random number below `bound`.
    pub(crate) fn draw(&mut self, bound: usize) -> usize {
        self.random.below(bound)
    }

    /// Runs an item of the queue, so that polling ends.
    pub(crate) fn step(&mut self) {
        self.run_one();
    }

    /// The number of graphs, instantiated or not, with work of a communicator.
    pub(crate) fn graphs_with(&self, communicator: usize) -> usize {
        let is_of = |work: &WorkItem| matches!(work, WorkItem::Collective(group) if group.communicator == communicator);
        self.graphs.values().filter(|graph| graph.nodes.iter().any(|node| is_of(&node.work))).count()
    }
}
