//! Messages between the stages of a pipeline through NCCL.
//!
//! NCCL's send waits until the other rank receives, and so does all that follows it on a stream. In a step, a
//! stage must go on meanwhile. So a graph copies what it sends to an *outbox* and what it receives from an
//! *inbox*, and NCCL moves messages between them around the graphs: the host enqueues a receive before the
//! part that reads it, which waits for it, and a send after the part that writes it, on a stream of its own.
//! The next part that writes the outbox waits for that stream. So send n of a message waits for receive n,
//! but the sender waits for it only before send n + 1, and no cycle of waits exists, as with
//! [copies](super::peer_copies). No host waits.
//!
//! A program without a backward sends and receives within its graphs: its messages have one order in time,
//! that of the stages, in which all ranks enqueue them. So do the two stages that send to each other in the
//! update.

use super::communicator::{Call, DeviceCommError};
use super::loaded::Loaded;
use super::positions::Passage;
use super::watchdog::Watchdog;
use crate::part::{Part, ProgramId};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_cuda::{Context, CudaError, DeviceMemory, Event, NcclCall, NcclCommunicator, Stream};
use xtrain_program::{Collective, Groups, Parallel};

/// The ranks of a communicator for messages. The first is the sender, or the smaller one if both send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MessagePair {
    /// The rank that is 0 in the communicator.
    pub from: usize,
    /// The other one.
    pub to: usize,
}

impl MessagePair {
    /// True if `rank` is one of both.
    pub fn has(self, rank: usize) -> bool {
        self.from == rank || self.to == rank
    }

    /// The pair of a message of `rank`; `None` for other collectives.
    fn from_message(collective: Collective, groups: Groups, rank: usize) -> Option<MessagePair> {
        let other = groups.rank_at(rank, collective.other_place()?);
        let (from, to) = match collective {
            Collective::Send { .. } => (rank, other),
            Collective::Receive { .. } => (other, rank),
            _ => (rank.min(other), rank.max(other)),
        };
        Some(MessagePair { from, to })
    }
}

/// The pairs of a run in which a message may pass, in the order in which ranks join their communicators.
pub fn message_pairs(parallel: &Parallel) -> Vec<MessagePair> {
    let (groups, stages) = (parallel.pipeline_groups(), parallel.pipeline);
    let neighbours = (1..stages).flat_map(|stage| [(stage - 1, stage), (stage, stage - 1)]);
    // The last stage sends logits to all. Tied embeddings are in the first and in the last.
    let of_last = (0..stages).map(|stage| (stages - 1, stage)).chain([(0, stages - 1)]);
    let mut pairs: Vec<MessagePair> = Vec::new();
    for (from, to) in neighbours.chain(of_last).filter(|(from, to)| from != to) {
        for first in 0..groups.stride {
            let pair = MessagePair { from: groups.rank_at(first, from), to: groups.rank_at(first, to) };
            if !pairs.contains(&pair) {
                pairs.push(pair);
            }
        }
    }
    pairs
}

/// The messages of a rank.
pub(super) struct NcclMessages {
    rank: usize,
    links: HashMap<MessagePair, MessageLink>,
    boxes: HashMap<(ProgramId, usize), MessageBox>,
    /// The event at the end of the work on the compute lane.
    reached: Event,
}

struct MessageLink {
    communicator: Arc<NcclCommunicator>,
    /// The stream of the messages around graphs.
    stream: Stream,
}

/// The memory that a graph reads or writes in place of a message.
struct MessageBox {
    pair: MessagePair,
    memory: DeviceMemory,
    /// The end of the last transfer.
    moved: Event,
}

impl NcclMessages {
    pub(super) fn new(
        rank: usize,
        communicators: &[(MessagePair, Arc<NcclCommunicator>)],
        context: &Context,
    ) -> Result<NcclMessages, CudaError> {
        let link = |(pair, communicator): &(MessagePair, Arc<NcclCommunicator>)| {
            let stream = Stream::before_others(context)?;
            Ok((*pair, MessageLink { communicator: communicator.clone(), stream }))
        };
        let links = communicators.iter().map(link).collect::<Result<_, CudaError>>()?;
        Ok(NcclMessages { rank, links, boxes: HashMap::new(), reached: Event::new(context)? })
    }

    /// Allocates the boxes of a program that has a backward.
    pub(super) fn connect(
        &mut self,
        id: ProgramId,
        loaded: &Loaded,
        context: &Context,
    ) -> Result<(), CudaError> {
        let program = &loaded.program;
        for (index, instance) in program.instances.iter().enumerate().filter(|_| !program.slots.is_empty()) {
            let Some((collective, groups)) = instance.code.op().collective() else { continue };
            let operand = match collective {
                Collective::Send { .. } => instance.inputs[0],
                Collective::Receive { .. } => instance.outputs[0].value,
                _ => continue,
            };
            if let Some(pair) = MessagePair::from_message(collective, groups, self.rank) {
                let memory = DeviceMemory::new(context, program.ty(operand).bytes())?;
                self.boxes.insert((id, index), MessageBox { pair, memory, moved: Event::new(context)? });
            }
        }
        Ok(())
    }

    /// Enqueues a message: the copy from or to its box, if it has one.
    pub(super) fn enqueue(
        &self,
        call: &Call<'_>,
        stream: &Stream,
        poll: &dyn Fn() -> Result<(), DeviceCommError>,
    ) -> Result<(), DeviceCommError> {
        let &Call { collective, groups, input, output, .. } = call;
        if let Some(held) = self.boxes.get(&(call.program, call.instance)) {
            let copied = match collective {
                Collective::Send { .. } => held.memory.all().copy_from(input, stream),
                _ => output.copy_from(held.memory.all(), stream),
            };
            return Ok(copied?);
        }
        let Some(pair) = MessagePair::from_message(collective, groups, self.rank) else { return Ok(()) };
        let other = usize::from(pair.from == self.rank);
        let (send, receive) =
            (NcclCall::Send { to: other, input }, NcclCall::Receive { from: other, output });
        let calls = match collective {
            Collective::Send { .. } => vec![send],
            Collective::Receive { .. } => vec![receive],
            _ => vec![send, receive],
        };
        self.links[&pair].communicator.enqueue(&calls, stream, poll)
    }

    /// The messages of a part that have boxes, with the indices of their instances.
    fn of_part<'a>(
        &'a self,
        id: ProgramId,
        loaded: &'a Loaded,
        part: Part,
    ) -> impl Iterator<Item = (usize, bool, &'a MessageBox)> {
        let instances = loaded.program.instances.iter().enumerate();
        instances.filter(move |(_, instance)| part.runs(instance)).filter_map(move |(index, instance)| {
            let held = self.boxes.get(&(id, index))?;
            Some((index, instance.outputs.is_empty(), held))
        })
    }

    /// Lets `compute` wait for what a part receives, and for the boxes of what it sends.
    pub(super) fn begin_part(
        &self,
        id: ProgramId,
        loaded: &Loaded,
        part: Part,
        compute: &Stream,
        watchdog: &Watchdog,
    ) -> Result<(), DeviceCommError> {
        for (index, sends, held) in self.of_part(id, loaded, part) {
            watchdog.passes(id, index, Passage::Before, compute, loaded.is_recorded(part))?;
            if !sends {
                self.transfer(held, compute, false, watchdog)?;
            }
            compute.wait(&held.moved)?;
            watchdog.passes(id, index, Passage::After, compute, loaded.is_recorded(part))?;
        }
        Ok(())
    }

    /// Enqueues what a part has sent, after it.
    pub(super) fn end_part(
        &self,
        id: ProgramId,
        loaded: &Loaded,
        part: Part,
        compute: &Stream,
        watchdog: &Watchdog,
    ) -> Result<(), DeviceCommError> {
        for (index, _, held) in self.of_part(id, loaded, part).filter(|(_, sends, _)| *sends) {
            watchdog.comes_to(id, index);
            self.transfer(held, compute, true, watchdog)?;
        }
        Ok(())
    }

    /// Enqueues a transfer after the work on `compute`.
    fn transfer(
        &self,
        MessageBox { pair, memory, moved }: &MessageBox,
        compute: &Stream,
        sends: bool,
        watchdog: &Watchdog,
    ) -> Result<(), DeviceCommError> {
        let MessageLink { communicator, stream } = &self.links[pair];
        self.reached.record(compute)?;
        stream.wait(&self.reached)?;
        let call = match sends {
            true => NcclCall::Send { to: 1, input: memory.all() },
            false => NcclCall::Receive { from: 0, output: memory.all() },
        };
        watchdog.while_connecting::<DeviceCommError>(|poll| communicator.enqueue(&[call], stream, poll))?;
        Ok(moved.record(stream)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use xtrain_rank::Rank;

    #[test]
    fn every_message_has_one_communicator() {
        for (ranks, pipeline) in [(2, 2), (4, 2), (4, 4), (8, 4)] {
            let parallel = Parallel { rank: Rank::first_of(ranks), pipeline, ..Parallel::ALONE };
            let (pairs, groups) = (message_pairs(&parallel), parallel.pipeline_groups());
            assert_eq!(pairs.iter().collect::<HashSet<_>>().len(), pairs.len());
            let last = pipeline - 1;
            for rank in 0..ranks {
                let stage = groups.place(rank);
                let neighbours = [stage.checked_sub(1), Some(stage + 1).filter(|next| *next <= last)];
                let mut messages: Vec<Collective> = neighbours
                    .into_iter()
                    .flatten()
                    .flat_map(|other| [Collective::Send { to: other }, Collective::Receive { from: other }])
                    .collect();
                match stage {
                    _ if stage == last => {
                        messages.extend((0..last).map(|to| Collective::Send { to }));
                        messages.push(Collective::SendReceive { with: 0 });
                    }
                    _ => messages.push(Collective::Receive { from: last }),
                }
                messages.extend((stage == 0).then_some(Collective::SendReceive { with: last }));
                for message in messages {
                    let pair = MessagePair::from_message(message, groups, rank).expect("a message");
                    assert!(pair.has(rank) && pairs.contains(&pair), "{message:?} of rank {rank} of {ranks}");
                }
            }
        }
    }
}
