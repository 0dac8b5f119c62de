//! Collectives between the GPUs of one host by their copy engines: each rank copies its pieces into the
//! memory of the others. Multiprocessors have no part in it, so kernels beside it lose little.
//!
//! Every rank maps the memory of the others, and tells them its places ([`peer_places`](super::peer_places)).
//! Two words for each pair of ranks order their copies; a rank's words are in its own memory, and others
//! write them:
//!
//! 1. A rank that reaches a collective writes to the *ready* word of each other one: its output may be
//!    written.
//! 2. It waits for its own *ready* words, resets them, and copies.
//! 3. It writes to the *done* word of each other rank, after its copies.
//! 4. It waits for its own *done* words, and resets them: its output is complete.
//!
//! The next collective writes a word again only after the other rank has reset it, since that happens before
//! step 3 or the next step 1 of that rank, for which this one has waited.
//!
//! # Messages
//!
//! Each message has two words of its own, and its receiver an *inbox* for it, which is ready from the start.
//! The sender waits for *ready*, copies to the inbox, and writes *done*. The receiver waits for *done*,
//! copies the inbox to the output, and writes *ready*. So send n of a message waits until receive n - 1 has
//! begun, but not for receive n, and the transfer overlaps with the part that the receiver runs before it.
//!
//! No cycle of waits exists. Stage s of p (1F1B, p - s slots) runs forward n at the time s + 2n and backward
//! n at 2p - 1 - s + 2n: times grow along its own order of parts, also with fewer micro-batches than stages.
//! A receive waits for a send of the time before its own: in forward n for that of stage s - 1, in backward n
//! for that of s + 1. A send waits for receive n - 1 of the neighbour, which is at s + 1 + 2(n - 1) for
//! forwards and at 2p - 1 - (s - 1) + 2(n - 1) for backwards: before its own time, too. Other collectives of
//! a micro-step are within a stage, whose ranks are at one time, and those of all stages follow the last
//! backward. In a program without a backward, a receive waits for an earlier message of its run, those of the
//! stages before the logits of the last one, and a send for a receive of the run before.
//!
//! Ranks that send to each other at once write into each other's output, which is ready when they reach it.

use super::arena::Arena;
use super::communicator::{Call, Copies, DeviceCommError, DeviceCommunicator, piece_of};
use super::loaded::Loaded;
use super::peer_memory::PeerMemory;
use super::peer_places::{self, OwnCollective, PeerPlace, Queue};
use super::watchdog::{PeerLink, Watchdog};
use crate::part::{MicroSlot, ProgramId};
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_cuda::{
    Context, CudaError, DevicePtr, DeviceSpan, Event, GrowingMemory, Signal, Stream, exclude_capture,
};
use xtrain_distributed::{CommError, Communicator};
use xtrain_program::{Collective, Program};

/// Bytes between two words.
const WORD: usize = 64;

/// Bytes of all words, which are allocated once.
const WORDS_BYTES: usize = 2 << 20;

/// Inboxes have a multiple of these bytes, so that programs share them.
const INBOX_BYTES: usize = 2 << 20;

/// The numbers of the chunks of memory that ranks share. Those of the arena follow.
const WORDS_CHUNK: usize = 0;
const INBOXES_CHUNK: usize = 1;
const ARENA_CHUNK: usize = 2;

/// The copies of a rank.
pub(super) struct PeerCopies {
    // It ends before the words, which it writes.
    watchdog: Watchdog,
    host: Arc<dyn Communicator>,
    words: Arc<FlagWords>,
    /// The number of the first word that no message has.
    free_word: usize,
    inboxes: GrowingMemory,
    /// The planned bytes of inboxes.
    inbox_bytes: usize,
    /// The channels of the n-th message of a program between two ranks, from the smallest. Programs share
    /// them; both ranks choose the same.
    channels: HashMap<(Queue, usize), Vec<Channel>>,
    routes: HashMap<(ProgramId, usize), Route>,
    memory: PeerMemory,
    /// True if a program sends messages: ranks are stages of a pipeline, and all of them run all programs.
    has_stages: bool,
    local: Local,
}

/// The order of the messages of one kind between two ranks, and where they arrive.
#[derive(Clone, Copy)]
struct Channel {
    /// Bytes of the longest message.
    room: usize,
    /// The number of the *ready* word of this rank; that of the *done* word follows.
    words: usize,
    /// The first byte among the inboxes of a receiver.
    inbox: usize,
}

/// The places of a collective of a program.
struct Route {
    /// On the other rank of a message; on all ranks of the group otherwise.
    places: Vec<PeerPlace>,
    /// The channel of a message.
    channel: Option<Channel>,
}

/// The stream of copies within this GPU, which run beside those to others, and the events at their begin and
/// end.
struct Local {
    stream: Stream,
    begin: Event,
    end: Event,
}

/// The words that other ranks write.
struct FlagWords {
    memory: GrowingMemory,
    /// For aborts.
    stream: Stream,
}

impl FlagWords {
    fn word(&self, number: usize) -> DeviceSpan<'_> {
        self.memory.span(WORD * number..WORD * number + size_of::<u32>())
    }
}

impl PeerCopies {
    /// The copies of a run whose ranks, all on this host, `host` connects.
    pub(super) fn new(
        host: Arc<dyn Communicator>,
        context: &Context,
        names_in_graphs: bool,
    ) -> Result<Self, DeviceCommError> {
        let (memory, stream) = (GrowingMemory::allocate(context, WORDS_BYTES, true)?, Stream::new(context)?);
        memory.span(0..WORDS_BYTES).fill(0, &stream)?;
        stream.synchronize()?;
        let words = Arc::new(FlagWords { memory, stream });
        let watchdog = Watchdog::start(vec![words.clone()], host.clone(), context, names_in_graphs)?;
        let [begin, end] = [Event::new(context)?, Event::new(context)?];
        let local = Local { stream: Stream::before_others(context)?, begin, end };
        Ok(PeerCopies {
            watchdog,
            free_word: 2 * host.world_size(),
            host,
            words,
            inboxes: GrowingMemory::new(context, true)?,
            inbox_bytes: 0,
            channels: HashMap::new(),
            routes: HashMap::new(),
            memory: PeerMemory::default(),
            has_stages: false,
            local,
        })
    }

    /// The bytes at `place` in the memory of another rank, in a part that uses this slot.
    fn span(&self, place: &PeerPlace, slot: MicroSlot, first: usize, bytes: usize) -> DeviceSpan<'_> {
        let first = place.offset + slot.number * place.stride + first;
        self.memory.chunk(place.rank, place.chunk).span(first..first + bytes)
    }

    /// The word of this number in the memory of `rank`, another one.
    fn word_of(&self, rank: usize, number: usize) -> DevicePtr {
        self.memory.chunk(rank, WORDS_CHUNK).pointer().offset(WORD * number)
    }

    /// Signals `others` that this rank has reached a point.
    fn signal(&self, kind: Kind, others: &[usize], stream: &Stream) -> Result<(), CudaError> {
        let number = 2 * self.host.rank() + kind as usize;
        let signals = others.iter().map(|&other| Signal::Write(self.word_of(other, number), 1));
        Signal::enqueue(&signals.collect::<Vec<_>>(), stream)
    }

    /// Waits until `others` have reached a point.
    fn wait_for(&self, kind: Kind, others: &[usize], stream: &Stream) -> Result<(), CudaError> {
        let words = others.iter().map(|&other| self.words.word(2 * other + kind as usize).pointer());
        let waits = words.clone().map(|word| Signal::Wait(word, 1));
        let reset = words.map(|word| Signal::Write(word, 0));
        Signal::enqueue(&waits.chain(reset).collect::<Vec<_>>(), stream)
    }

    /// The channel of a message, a new one if it is longer than those before.
    fn channel(&mut self, of: &OwnCollective) -> Result<Channel, DeviceCommError> {
        let bytes = of.message_bytes();
        let channels = self.channels.entry((of.queue, of.number)).or_default();
        if let Some(channel) = channels.iter().find(|channel| channel.room >= bytes) {
            return Ok(*channel);
        }
        let room = bytes.next_multiple_of(INBOX_BYTES);
        let channel = Channel { room, words: self.free_word, inbox: self.inbox_bytes };
        self.free_word += 2;
        if self.free_word > WORDS_BYTES / WORD {
            let text = "programs of a run have too many different messages for copies between GPUs; \
                        parallel.transport = \"nccl\" has no such limit";
            return Err(CommError::System(text.to_owned()).into());
        }
        match of.collective {
            Collective::Send { .. } => {
                let _no_capture = exclude_capture();
                self.words.word(channel.words + Kind::Ready as usize).fill(1, &self.words.stream)?;
                self.words.stream.synchronize()?;
            }
            Collective::Receive { .. } => {
                self.inbox_bytes += room;
                self.inboxes.grow(self.inbox_bytes)?;
            }
            _ => {}
        }
        channels.push(channel);
        Ok(channel)
    }

    /// The place that other ranks write for a collective, and its channel if it is a message.
    fn own_place(&mut self, of: &OwnCollective) -> Result<(PeerPlace, Option<Channel>), DeviceCommError> {
        let channel = if of.collective.is_message() { Some(self.channel(of)?) } else { None };
        let words = channel.map_or(0, |channel| channel.words);
        let place = match (of.collective, channel, of.output) {
            (Collective::Receive { .. }, Some(channel), _) => {
                PeerPlace { chunk: INBOXES_CHUNK, offset: channel.inbox, words, ..PeerPlace::default() }
            }
            (_, _, Some((span, stride))) => {
                let (chunk, offset) = span.place();
                PeerPlace { chunk: ARENA_CHUNK + chunk, offset, stride, words, ..PeerPlace::default() }
            }
            (_, _, None) => PeerPlace { words, ..PeerPlace::default() },
        };
        Ok((place, channel))
    }

    /// Enqueues a message.
    fn enqueue_message(
        &self,
        call: &Call<'_>,
        Route { places, channel }: &Route,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let (place, Some(channel)) = (&places[0], channel) else { unreachable!("a message has a channel") };
        let write = |kind: Kind| Signal::Write(self.word_of(place.rank, place.words + kind as usize), 1);
        let wait = |kind: Kind| {
            let word = self.words.word(channel.words + kind as usize).pointer();
            [Signal::Wait(word, 1), Signal::Write(word, 0)]
        };
        let send = || -> Result<(), CudaError> {
            Signal::enqueue(&wait(Kind::Ready), stream)?;
            let to = self.span(place, call.slot, 0, call.input.bytes());
            if call.input.bytes() > 0 {
                to.copy_from(call.input, stream)?;
            }
            Signal::enqueue(&[write(Kind::Done)], stream)
        };
        match call.collective {
            Collective::Send { .. } => send(),
            Collective::Receive { .. } => {
                Signal::enqueue(&wait(Kind::Done), stream)?;
                let bytes = call.output.bytes();
                if bytes > 0 {
                    let inbox = self.inboxes.span(channel.inbox..channel.inbox + bytes);
                    call.output.copy_from(inbox, stream)?;
                }
                Signal::enqueue(&[write(Kind::Ready)], stream)
            }
            _ => {
                Signal::enqueue(&[write(Kind::Ready)], stream)?;
                send()?;
                Signal::enqueue(&wait(Kind::Done), stream)
            }
        }
    }
}

/// The kinds of words.
#[derive(Clone, Copy)]
enum Kind {
    Ready,
    Done,
}

impl PeerLink for FlagWords {
    fn check(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn abort(&self) {
        // Each byte is 1, so each word is greater than 1.
        if let Err(error) = self.memory.span(0..self.memory.bytes()).fill(1, &self.stream) {
            tracing::debug!("waits for other ranks on the GPU cannot be ended: {error}");
        }
    }
}

impl DeviceCommunicator for PeerCopies {
    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn is_recordable(&self) -> bool {
        true
    }

    fn reserve(&mut self, id: ProgramId, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        let mut collectives = program.instances.iter().filter_map(|i| i.code.op().collective());
        self.has_stages |= collectives.any(|(collective, _)| collective.is_message());
        self.watchdog.reserve(id, program, stream)
    }

    fn watchdog(&self) -> Option<&Watchdog> {
        Some(&self.watchdog)
    }

    /// Maps what the other ranks have allocated since the last call, and learns their places.
    fn connect(&mut self, id: ProgramId, loaded: &Loaded, arena: &Arena) -> Result<(), DeviceCommError> {
        let own = peer_places::collectives_of(loaded, self.host.rank());
        // Without collectives, the program may be that of one rank; of stages, that of another has some.
        if own.is_empty() && !self.has_stages {
            return Ok(());
        }
        if own.iter().any(|of| matches!(of.collective, Collective::ReduceScatter { .. })) {
            let text = "copies between GPUs add nothing: a reduce-scatter needs NCCL or the host";
            return Err(CommError::System(text.to_owned()).into());
        }
        let placed = own.iter().map(|of| self.own_place(of));
        let (places, channels): (Vec<_>, Vec<_>) =
            placed.collect::<Result<Vec<_>, DeviceCommError>>()?.into_iter().unzip();
        let places = peer_places::exchange(&*self.host, &own, &places)?;
        let routes = own.iter().zip(places).zip(channels);
        let routes = routes.map(|((of, places), channel)| ((id, of.instance), Route { places, channel }));
        self.routes.extend(routes);
        let memory: Vec<&GrowingMemory> =
            [&self.words.memory, &self.inboxes].into_iter().chain(arena.chunks()).collect();
        self.memory.share(&*self.host, &memory, arena.context())
    }

    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError> {
        let Some(&Call { collective, groups: kind, .. }) = calls.first() else { return Ok(()) };
        if kind.size == 1 {
            return Copies::unpaced(1).enqueue(calls, stream);
        }
        let routed = || calls.iter().map(|call| (call, &self.routes[&(call.program, call.instance)]));
        if collective.is_message() {
            return Ok(routed().try_for_each(|(call, route)| self.enqueue_message(call, route, stream))?);
        }
        let rank = self.host.rank();
        let place = kind.place(rank);
        let ranks: Vec<usize> = kind.ranks(rank).collect();
        // Each rank begins with its successor, so that no two copy to one rank at the same time.
        let others: Vec<usize> = (1..ranks.len()).map(|n| (place + n) % ranks.len()).collect();
        let global: Vec<usize> = others.iter().map(|&other| ranks[other]).collect();
        self.signal(Kind::Ready, &global, stream)?;
        let Local { stream: beside, begin, end } = &self.local;
        begin.record(stream)?;
        beside.wait(begin)?;
        for call in calls {
            let SentPiece { sent, first } = piece(call, place, place, ranks.len());
            if sent.bytes() > 0 {
                call.output.part(first..first + sent.bytes()).copy_from(sent, beside)?;
            }
            for padding in padding(call, place, ranks.len()) {
                padding.fill(0, beside)?;
            }
        }
        end.record(beside)?;
        self.wait_for(Kind::Ready, &global, stream)?;
        for &other in &others {
            for (call, route) in routed() {
                let SentPiece { sent, first } = piece(call, place, other, ranks.len());
                if sent.bytes() > 0 {
                    let to = self.span(&route.places[other], call.slot, first, sent.bytes());
                    to.copy_from(sent, stream)?;
                }
            }
        }
        self.signal(Kind::Done, &global, stream)?;
        self.wait_for(Kind::Done, &global, stream)?;
        Ok(stream.wait(end)?)
    }
}

/// The bytes that a rank sends to one of its group, itself included.
struct SentPiece<'a> {
    sent: DeviceSpan<'a>,
    /// The byte of the receiver's output at which they begin.
    first: usize,
}

/// The bytes that the rank at the place `from` of a group of `n` sends to that at the place `to`.
fn piece<'a>(call: &Call<'a>, from: usize, to: usize, n: usize) -> SentPiece<'a> {
    let bytes = call.collective.piece_bytes(call.groups, call.input.bytes(), call.output.bytes());
    match call.collective {
        Collective::AllGather { first } => {
            let number = (from + n - first % n) % n;
            let sent = call.input.part(0..piece_of(call.output, number, bytes).bytes());
            SentPiece { sent, first: number * bytes }
        }
        Collective::AllToAll { first } => {
            let sent = piece_of(call.input, (to + n - first % n) % n, bytes);
            SentPiece { sent, first: from * bytes }
        }
        Collective::ReduceScatter { .. } => unreachable!("refused before its program runs"),
        Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => {
            unreachable!("a message has one piece")
        }
    }
}

/// The bytes of the output that no rank sends, which are zeros.
fn padding<'a>(call: &Call<'a>, place: usize, n: usize) -> Vec<DeviceSpan<'a>> {
    let bytes = call.collective.piece_bytes(call.groups, call.input.bytes(), call.output.bytes());
    let sent = piece(call, place, place, n).sent.bytes();
    match call.collective {
        Collective::AllToAll { .. } if sent < bytes => {
            (0..n).map(|from| piece_of(call.output, from, bytes).part(sent..bytes)).collect()
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    /// The messages of a stage, in its order: it receives (`false`) or sends (`true`) by the inbox of a
    /// stage, of those for activations (0) or for gradients (1).
    fn step_of(stage: usize, stages: usize, micro_steps: usize) -> Vec<(bool, usize, usize)> {
        let (slots, mut step, mut backwards) = (stages - stage, Vec::new(), 0);
        for n in 0..micro_steps {
            step.extend((stage > 0).then_some((false, stage, 0)));
            step.extend((stage + 1 < stages).then_some((true, stage + 1, 0)));
            let done = if n + 1 == micro_steps { micro_steps } else { (n + 2).saturating_sub(slots) };
            for _ in backwards..done {
                step.extend((stage + 1 < stages).then_some((false, stage, 1)));
                step.extend((stage > 0).then(|| (true, stage - 1, 1)));
            }
            backwards = backwards.max(done);
        }
        step
    }

    #[test]
    fn no_stage_waits_for_ever_with_one_inbox_for_each_message() {
        for (stages, micro_steps) in (2..=8).flat_map(|stages| (1..=20).map(move |n| (stages, n))) {
            let steps: Vec<_> = (0..stages).map(|stage| step_of(stage, stages, micro_steps)).collect();
            let (mut next, mut is_full) = (vec![0; stages], vec![[false; 2]; stages]);
            let mut advance = |stage: usize| {
                let Some(&(sends, of, kind)) = steps[stage].get(next[stage]) else { return false };
                // A sender waits for an empty inbox, a receiver for a full one.
                let goes_on = is_full[of][kind] != sends;
                if goes_on {
                    is_full[of][kind] = sends;
                    next[stage] += 1;
                }
                goes_on
            };
            while (0..stages).fold(false, |any, stage| advance(stage) | any) {}
            let ends: Vec<usize> = steps.iter().map(Vec::len).collect();
            assert_eq!(next, ends, "{stages} stages, {micro_steps} micro-batches");
        }
    }
}
