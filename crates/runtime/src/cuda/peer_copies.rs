//! Collectives between the GPUs of one host by their copy engines: each rank copies its pieces into the
//! memory of the others. Multiprocessors have no part in it, so kernels beside it lose little.
//!
//! All ranks have the same plan, so a value has the same place in the memory of each. Every rank maps the
//! memory of the others. Two words for each pair of ranks order their copies; a rank's words are in its own
//! memory, and others write them:
//!
//! 1. A rank that reaches a collective writes to the *ready* word of each other one: its output may be
//!    written.
//! 2. It waits for its own *ready* words, resets them, and copies.
//! 3. It writes to the *done* word of each other rank, after its copies.
//! 4. It waits for its own *done* words, and resets them: its output is complete.
//!
//! The next collective writes a word again only after the other rank has reset it, since that happens before
//! step 3 or the next step 1 of that rank, for which this one has waited.

use super::arena::{Arena, ArenaSpan};
use super::communicator::{Call, Copies, DeviceCommError, DeviceCommunicator, piece_of};
use super::watchdog::{PeerLink, Watchdog};
use crate::part::ProgramId;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::AsFd;
use std::sync::Arc;
use xtrain_cuda::{Context, CudaError, DevicePtr, DeviceSpan, Event, GrowingMemory, Signal, Stream};
use xtrain_distributed::{CommError, Communicator, exchange_files};
use xtrain_program::{Collective, Program};

/// Bytes between two words.
const WORD: usize = 64;

/// The copies of a rank.
pub(super) struct PeerCopies {
    // It ends before the words, which it writes.
    watchdog: Watchdog,
    host: Arc<dyn Communicator>,
    words: Arc<FlagWords>,
    /// The words, then the chunks of the arena.
    chunks: Vec<PeerChunk>,
    local: Local,
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

/// The memory of this rank that has an index, and that of the others with this index.
struct PeerChunk {
    own: DevicePtr,
    bytes: usize,
    /// The number of pieces that the others have mapped.
    pieces: usize,
    /// By rank; none of this rank.
    peers: Vec<Option<GrowingMemory>>,
}

impl PeerCopies {
    /// The copies of a run whose ranks, all on this host, `host` connects.
    pub(super) fn new(
        host: Arc<dyn Communicator>,
        context: &Context,
        names_in_graphs: bool,
    ) -> Result<Self, DeviceCommError> {
        let bytes = 2 * WORD * host.world_size();
        let (memory, stream) = (GrowingMemory::allocate(context, bytes, true)?, Stream::new(context)?);
        memory.span(0..bytes).fill(0, &stream)?;
        stream.synchronize()?;
        let words = Arc::new(FlagWords { memory, stream });
        let watchdog = Watchdog::start(vec![words.clone()], host.clone(), context, names_in_graphs)?;
        let [begin, end] = [Event::new(context)?, Event::new(context)?];
        let local = Local { stream: Stream::before_others(context)?, begin, end };
        Ok(PeerCopies { watchdog, host, words, chunks: Vec::new(), local })
    }

    /// The place in `rank`'s memory that `span` has in the memory of this rank.
    fn of_rank(&self, rank: usize, span: DeviceSpan<'_>) -> DeviceSpan<'_> {
        let offset = |chunk: &PeerChunk| span.pointer().0.wrapping_sub(chunk.own.0) as usize;
        let chunk = self.chunks.iter().find(|chunk| offset(chunk) < chunk.bytes);
        let chunk = chunk.expect("memory of the arena, which the others have mapped");
        let peer = chunk.peers[rank].as_ref().expect("another rank");
        peer.span(offset(chunk)..offset(chunk) + span.bytes())
    }

    /// The word of `rank` that `by` writes, of these kinds.
    fn word(&self, kind: Kind, rank: usize, by: usize) -> DevicePtr {
        let at = WORD * (2 * by + kind as usize);
        let own = self.words.memory.span(at..at + size_of::<u32>());
        if rank == self.host.rank() { own.pointer() } else { self.of_rank(rank, own).pointer() }
    }

    /// Signals `others` that this rank has reached a point.
    fn signal(&self, kind: Kind, others: &[usize], stream: &Stream) -> Result<(), CudaError> {
        let rank = self.host.rank();
        let signals = others.iter().map(|&other| Signal::Write(self.word(kind, other, rank), 1));
        Signal::enqueue(&signals.collect::<Vec<_>>(), stream)
    }

    /// Waits until `others` have reached a point.
    fn wait_for(&self, kind: Kind, others: &[usize], stream: &Stream) -> Result<(), CudaError> {
        let words = others.iter().map(|&other| self.word(kind, self.host.rank(), other));
        let waits = words.clone().map(|word| Signal::Wait(word, 1));
        let reset = words.map(|word| Signal::Write(word, 0));
        Signal::enqueue(&waits.chain(reset).collect::<Vec<_>>(), stream)
    }

    /// Fails unless all ranks have the same description of their memory.
    fn compare(&self, own: u64) -> Result<(), CommError> {
        let mut all = vec![0; size_of::<u64>() * self.host.world_size()];
        self.host.all_gather(self.host.world(), 0, &own.to_le_bytes(), &mut all)?;
        let differing = all.chunks_exact(size_of::<u64>()).position(|other| other != own.to_le_bytes());
        differing.map_or(Ok(()), |rank| {
            Err(CommError::System(format!(
                "rank {rank} has placed tensors at other addresses of its GPU than this rank; this is a bug of \
                 xtrain, and parallel.transport = \"nccl\" does without equal addresses"
            )))
        })
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
        self.watchdog.reserve(id, program, stream)
    }

    fn watchdog(&self) -> Option<&Watchdog> {
        Some(&self.watchdog)
    }

    /// Maps what the other ranks have allocated since the last call.
    fn connect(
        &mut self,
        program: &Program,
        places: &[Option<ArenaSpan>],
        arena: &Arena,
    ) -> Result<(), DeviceCommError> {
        let collectives = program.instances.iter().filter_map(|instance| instance.code.op().collective());
        let collectives: Vec<Collective> = collectives.map(|(collective, _)| collective).collect();
        if collectives.is_empty() {
            return Ok(());
        }
        if collectives.iter().any(|of| of.is_message()) {
            let text = "messages between the stages of a pipeline need parallel.transport = \"host\"";
            return Err(CommError::System(text.to_owned()).into());
        }
        if collectives.iter().any(|of| matches!(of, Collective::ReduceScatter { .. })) {
            let text = "copies between GPUs add nothing: a reduce-scatter needs NCCL or the host";
            return Err(CommError::System(text.to_owned()).into());
        }
        let words = self.words.clone();
        let memory: Vec<&GrowingMemory> = std::iter::once(&words.memory).chain(arena.chunks()).collect();
        let known = |index: usize| self.chunks.get(index).map_or(0, |chunk| chunk.pieces);
        let new = memory.iter().enumerate().flat_map(|(index, memory)| {
            memory.pieces().enumerate().skip(known(index)).map(move |(piece, bytes)| (index, piece, bytes))
        });
        let new: Vec<(usize, usize, usize)> = new.collect();
        let mut layout = DefaultHasher::new();
        new.hash(&mut layout);
        places.hash(&mut layout);
        self.compare(layout.finish())?;
        let files = new.iter().map(|&(index, piece, _)| memory[index].share(piece));
        let files = files.collect::<Result<Vec<_>, CudaError>>()?;
        let received = exchange_files(&*self.host, &files.iter().map(AsFd::as_fd).collect::<Vec<_>>())?;
        let rank = self.host.rank();
        for (index, memory) in memory.iter().enumerate() {
            if index == self.chunks.len() {
                let map = |other: usize| {
                    let peer = || GrowingMemory::with_room(arena.context(), memory.room(), false);
                    (other != rank).then(peer).transpose()
                };
                let peers = (0..received.len()).map(map).collect::<Result<_, CudaError>>()?;
                self.chunks.push(PeerChunk { own: memory.pointer(), bytes: 0, pieces: 0, peers });
            }
            let chunk = &mut self.chunks[index];
            (chunk.bytes, chunk.pieces) = (memory.bytes(), memory.pieces().len());
        }
        for (n, &(index, _, bytes)) in new.iter().enumerate() {
            for (peer, files) in self.chunks[index].peers.iter_mut().zip(&received) {
                peer.as_mut().map_or(Ok(()), |peer| peer.join(files[n].as_fd(), bytes))?;
            }
        }
        Ok(())
    }

    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError> {
        let Some(&Call { groups: kind, .. }) = calls.first() else { return Ok(()) };
        if kind.size == 1 {
            return Copies::unpaced(1).enqueue(calls, stream);
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
            let SentPiece { sent, to } = piece(call, place, place, ranks.len());
            if sent.bytes() > 0 {
                to.copy_from(sent, beside)?;
            }
            for padding in padding(call, place, ranks.len()) {
                padding.fill(0, beside)?;
            }
        }
        end.record(beside)?;
        self.wait_for(Kind::Ready, &global, stream)?;
        for &other in &others {
            for call in calls {
                let SentPiece { sent, to } = piece(call, place, other, ranks.len());
                if sent.bytes() > 0 {
                    self.of_rank(ranks[other], to).copy_from(sent, stream)?;
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
    /// In the sender's memory.
    sent: DeviceSpan<'a>,
    /// The place in the receiver's memory, as a span of the sender's.
    to: DeviceSpan<'a>,
}

/// The bytes that the rank at the place `from` of a group of `n` sends to that at the place `to`.
fn piece<'a>(call: &Call<'a>, from: usize, to: usize, n: usize) -> SentPiece<'a> {
    let bytes = call.collective.piece_bytes(call.groups, call.input.bytes(), call.output.bytes());
    match call.collective {
        Collective::AllGather { first } => {
            let to = piece_of(call.output, (from + n - first % n) % n, bytes);
            SentPiece { sent: call.input.part(0..to.bytes()), to }
        }
        Collective::AllToAll { first } => {
            let sent = piece_of(call.input, (to + n - first % n) % n, bytes);
            SentPiece { sent, to: piece_of(call.output, from, bytes).part(0..sent.bytes()) }
        }
        Collective::ReduceScatter { .. } | Collective::Send { .. } | Collective::Receive { .. } => {
            unreachable!("refused before its program runs")
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
