//! Collectives on GPU memory by NCCL, which graphs contain. Each kind of groups has a communicator, and each
//! pair of ranks that send messages.

use super::arena::Arena;
use super::communicator::{Call, Copies, DeviceCommError, DeviceCommunicator, piece_of};
use super::loaded::Loaded;
use super::nccl_messages::{MessagePair, NcclMessages};
use super::watchdog::{PeerLink, Watchdog};
use crate::part::{Part, ProgramId};
use std::sync::Arc;
use xtrain_cuda::{Context, CudaError, DeviceSpan, NcclCall, NcclCommunicator, NcclId, Stream};
use xtrain_distributed::{Communicator, Groups};
use xtrain_program::{Collective, Parallel, Program};
use xtrain_rank::Rank;

/// The kinds of groups, of several ranks each, among which a run moves data.
pub fn groups_of_run(parallel: &Parallel) -> Vec<Groups> {
    let all = [
        parallel.world(),
        parallel.stage_groups(),
        parallel.shard_groups(),
        parallel.replica_groups(),
        parallel.expert_groups(),
        parallel.expert_shard_groups(),
        parallel.tensor_groups(),
    ];
    let mut kinds: Vec<Groups> = Vec::new();
    for groups in all {
        if groups.size > 1 && !kinds.contains(&groups) {
            kinds.push(groups);
        }
    }
    kinds
}

/// A rank's communicator of each kind of groups, and those of its messages.
pub struct NcclGroups {
    communicators: Vec<(Groups, Arc<NcclCommunicator>)>,
    of_messages: Vec<(MessagePair, Arc<NcclCommunicator>)>,
    names_in_graphs: bool,
}

impl NcclGroups {
    /// Joins the other ranks of each group of `rank`, one kind after the other. `ids` has the id of each of
    /// these groups. `poll` is called every now and then meanwhile.
    ///
    /// # Errors
    /// Those of [`NcclCommunicator::join`].
    pub fn join<E: From<CudaError>>(
        context: &Context,
        rank: usize,
        kinds: &[Groups],
        ids: &[NcclId],
        poll: &dyn Fn() -> Result<(), E>,
    ) -> Result<NcclGroups, E> {
        let join = |(groups, id): (&Groups, &NcclId)| {
            let communicator = NcclCommunicator::join(context, id, groups.rank_within(rank), poll)?;
            Ok((*groups, Arc::new(communicator)))
        };
        let communicators = kinds.iter().zip(ids).map(join).collect::<Result<_, E>>()?;
        Ok(NcclGroups { communicators, of_messages: Vec::new(), names_in_graphs: false })
    }

    /// Joins the other rank of each of `pairs` of which `rank` is one, in their order, which is that of all
    /// ranks. Each has an id.
    ///
    /// # Errors
    /// Those of [`NcclCommunicator::join`].
    pub fn with_messages<E: From<CudaError>>(
        mut self,
        context: &Context,
        rank: usize,
        pairs: &[(MessagePair, NcclId)],
        poll: &dyn Fn() -> Result<(), E>,
    ) -> Result<NcclGroups, E> {
        for (pair, id) in pairs.iter().filter(|(pair, _)| pair.has(rank)) {
            let place = Rank { index: usize::from(pair.to == rank), world_size: 2 };
            let communicator = NcclCommunicator::join(context, id, place, poll)?;
            self.of_messages.push((*pair, Arc::new(communicator)));
        }
        Ok(self)
    }

    /// Lets graphs tell which collectives they have come to, if `names`, so that an error can name those that
    /// do not complete. It adds two copies of four bytes for each launch of collectives.
    pub fn naming(self, names: bool) -> NcclGroups {
        NcclGroups { names_in_graphs: names, ..self }
    }
}

/// NCCL's communicators of a rank, and the thread that watches them.
pub(super) struct Nccl {
    // It ends before the communicators, which it uses.
    watchdog: Watchdog,
    messages: NcclMessages,
    groups: NcclGroups,
    world_size: usize,
}

impl Nccl {
    /// Collectives by `groups`, of a run whose ranks `host` connects.
    pub(super) fn new(
        groups: NcclGroups,
        host: Arc<dyn Communicator>,
        context: &Context,
    ) -> Result<Self, DeviceCommError> {
        let of_groups = groups.communicators.iter().map(|(_, communicator)| communicator);
        let all = of_groups.chain(groups.of_messages.iter().map(|(_, communicator)| communicator));
        let all = all.map(|communicator| communicator.clone() as Arc<dyn PeerLink>).collect();
        let messages = NcclMessages::new(host.rank(), &groups.of_messages, context)?;
        let (names, world_size) = (groups.names_in_graphs, host.world_size());
        Ok(Nccl { watchdog: Watchdog::start(all, host, context, names)?, messages, groups, world_size })
    }
}

impl PeerLink for NcclCommunicator {
    fn check(&self) -> Result<(), CudaError> {
        NcclCommunicator::check(self)
    }

    fn abort(&self) {
        NcclCommunicator::abort(self);
    }
}

impl DeviceCommunicator for Nccl {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn is_recordable(&self) -> bool {
        true
    }

    /// NCCL registers buffers of all ranks while they capture.
    fn is_captured_together(&self) -> bool {
        true
    }

    fn reserve(&mut self, id: ProgramId, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        self.watchdog.reserve(id, program, stream)
    }

    fn watchdog(&self) -> Option<&Watchdog> {
        Some(&self.watchdog)
    }

    fn connect(&mut self, id: ProgramId, loaded: &Loaded, arena: &Arena) -> Result<(), DeviceCommError> {
        Ok(self.messages.connect(id, loaded, arena.context())?)
    }

    fn begin_part(
        &self,
        id: ProgramId,
        loaded: &Loaded,
        part: Part,
        compute: &Stream,
    ) -> Result<(), DeviceCommError> {
        self.messages.begin_part(id, loaded, part, compute, &self.watchdog)
    }

    fn end_part(
        &self,
        id: ProgramId,
        loaded: &Loaded,
        part: Part,
        compute: &Stream,
    ) -> Result<(), DeviceCommError> {
        self.messages.end_part(id, loaded, part, compute, &self.watchdog)
    }

    /// All of `calls` are one group of NCCL's: it launches one kernel for them. A message is alone.
    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError> {
        let Some(first @ &Call { groups: kind, .. }) = calls.first() else { return Ok(()) };
        if kind.size == 1 {
            return Copies::unpaced(1).enqueue(calls, stream);
        }
        if first.collective.is_message() {
            return self.watchdog.while_connecting(|poll| self.messages.enqueue(first, stream, poll));
        }
        let found = self.groups.communicators.iter().find(|(groups, _)| *groups == kind);
        let (_, communicator) = found.expect("the groups of the run have communicators");
        let rank = communicator.rank();
        let mut together = Vec::new();
        for &Call { collective, groups, input, output, .. } in calls {
            let piece = collective.piece_bytes(groups, input.bytes(), output.bytes());
            together.extend(match collective {
                Collective::AllGather { first } => gather(first, rank.world_size, input, output),
                Collective::AllToAll { first } => exchange(first, rank, piece, input, output, stream)?,
                Collective::ReduceScatter { first } => reduce(first, rank, input, output, stream)?,
                Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => {
                    unreachable!("a message is alone")
                }
            });
        }
        self.watchdog.while_connecting(|poll| communicator.enqueue(&together, stream, poll))
    }
}

/// An all-gather. NCCL's own places the pieces in the order of ranks, from 0 on, and none is short. Where
/// that does not fit, each rank broadcasts its piece.
fn gather<'a>(
    first: usize,
    ranks: usize,
    input: DeviceSpan<'a>,
    output: DeviceSpan<'a>,
) -> Vec<NcclCall<'a>> {
    if first == 0 && output.bytes() == ranks * input.bytes() {
        return vec![NcclCall::AllGather { input, output }];
    }
    let broadcast = |p: usize| {
        let output = piece_of(output, p, input.bytes());
        let input = input.part(0..output.bytes());
        (output.bytes() > 0).then_some(NcclCall::Broadcast { root: (first + p) % ranks, input, output })
    };
    (0..ranks).filter_map(broadcast).collect()
}

/// An all-to-all: sends and receives. What no rank sends is zeros.
fn exchange<'a>(
    first: usize,
    Rank { index: rank, world_size: ranks }: Rank,
    piece: usize,
    input: DeviceSpan<'a>,
    output: DeviceSpan<'a>,
    stream: &Stream,
) -> Result<Vec<NcclCall<'a>>, CudaError> {
    let piece_for = |to: usize| piece_of(input, (to + ranks - first) % ranks, piece);
    let received = piece_for(rank).bytes();
    let mut calls = Vec::with_capacity(2 * ranks);
    for other in 0..ranks {
        let (sent, output) = (piece_for(other), piece_of(output, other, piece));
        if sent.bytes() > 0 {
            calls.push(NcclCall::Send { to: other, input: sent });
        }
        if received > 0 {
            calls.push(NcclCall::Receive { from: other, output: output.part(0..received) });
        }
        if received < piece {
            output.part(received..piece).fill(0, stream)?;
        }
    }
    Ok(calls)
}

/// A reduce-scatter of f32. NCCL's own places the pieces in the order of ranks, from 0 on, and none is short.
/// Where that does not fit, each piece is reduced to its rank.
fn reduce<'a>(
    first: usize,
    Rank { index: rank, world_size: ranks }: Rank,
    input: DeviceSpan<'a>,
    output: DeviceSpan<'a>,
    stream: &Stream,
) -> Result<Vec<NcclCall<'a>>, CudaError> {
    if first == 0 && input.bytes() == ranks * output.bytes() {
        return Ok(vec![NcclCall::ReduceScatter { input, output }]);
    }
    let received = piece_of(input, (rank + ranks - first) % ranks, output.bytes()).bytes();
    if received < output.bytes() {
        output.part(received..output.bytes()).fill(0, stream)?;
    }
    let reduce = |p: usize| {
        let input = piece_of(input, p, output.bytes());
        let output = output.part(0..received);
        (input.bytes() > 0).then_some(NcclCall::Reduce { root: (first + p) % ranks, input, output })
    };
    Ok((0..ranks).filter_map(reduce).collect())
}
