//! Collectives on GPU memory by NCCL, which graphs contain.

use super::communicator::{DeviceCommError, DeviceCommunicator};
use super::watchdog::Watchdog;
use crate::part::Part;
use std::sync::Arc;
use xtrain_cuda::{Context, CudaError, DeviceSpan, NcclCall, NcclCommunicator, Stream};
use xtrain_distributed::{CommError, Communicator};
use xtrain_program::{Collective, Group, Program};

/// NCCL's communicators of a rank, and the thread that watches them.
pub(super) struct Nccl {
    // It ends before the communicator, which it uses.
    watchdog: Watchdog,
    world: Arc<NcclCommunicator>,
}

impl Nccl {
    /// Collectives by `world`, of a run whose ranks `host` connects.
    pub(super) fn new(
        world: NcclCommunicator,
        host: Arc<dyn Communicator>,
        context: &Context,
    ) -> Result<Self, CommError> {
        let world = Arc::new(world);
        Ok(Nccl { watchdog: Watchdog::start(world.clone(), host, context)?, world })
    }

    fn of(&self, group: Group) -> &NcclCommunicator {
        match group {
            Group::World { .. } => &self.world,
        }
    }
}

impl DeviceCommunicator for Nccl {
    fn world_size(&self) -> usize {
        self.world.world_size()
    }

    fn is_recordable(&self) -> bool {
        true
    }

    fn reserve(&mut self, _: &Program, _: &Context) -> Result<(), CudaError> {
        Ok(())
    }

    fn enqueue(
        &self,
        (collective, group): (Collective, Group),
        input: DeviceSpan<'_>,
        output: DeviceSpan<'_>,
        stream: &Stream,
    ) -> Result<(), DeviceCommError> {
        let communicator = self.of(group);
        let (rank, ranks) = (communicator.rank(), communicator.world_size());
        let piece = collective.piece_bytes(group, input.bytes(), output.bytes());
        let calls = match collective {
            Collective::AllGather { first } => gather(first, ranks, input, output),
            Collective::AllToAll { first } => exchange(first, rank, ranks, piece, input, output, stream)?,
        };
        communicator.enqueue(&calls, stream, &|| self.watchdog.check().map_err(DeviceCommError::from))
    }

    fn enqueued(&self, part: Part, stream: &Stream) -> Result<(), CudaError> {
        self.watchdog.enqueued(part, stream)
    }

    fn set_waits(&self, waits: bool) -> Result<(), CommError> {
        self.watchdog.set_waits(waits)
    }
}

/// The bytes of `span` in piece `p`: fewer than those of a piece, or none, where the span ends before.
fn piece_of(span: DeviceSpan<'_>, p: usize, bytes: usize) -> DeviceSpan<'_> {
    let end = |n: usize| (n * bytes).min(span.bytes());
    span.part(end(p)..end(p + 1))
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
    rank: usize,
    ranks: usize,
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
