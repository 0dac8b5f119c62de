//! The interface of collectives on GPU memory, and that of a run of one process.

use super::arena::Arena;
use super::loaded::Loaded;
use super::watchdog::Watchdog;
use crate::collective::sending;
use crate::error::EngineError;
use crate::part::{MicroSlot, Part, ProgramId};
use thiserror::Error;
use xtrain_cuda::{CudaError, Delay, DeviceSpan, Stream};
use xtrain_distributed::{CommError, Pace};
use xtrain_program::{Collective, Groups, Program};

/// The collectives of a rank, on GPU memory.
///
/// An engine calls it where it would launch a kernel: with the stream of the communication lane, which has
/// waited for the writers of the input, and whose later work is waited for by the readers of the output. The
/// calls of a program come in its list order, on every rank of a stage. Tensors contain no padding
/// ([`Collective`]): a short input is read as if zeros followed it, and a short output is not written past
/// its end.
pub(super) trait DeviceCommunicator: Send + Sync {
    /// The number of ranks of the run.
    fn world_size(&self) -> usize;

    /// True if a call does nothing but enqueue work on the stream. Then a graph can contain the work. Parts
    /// of a program whose collectives are not recordable always run op by op.
    fn is_recordable(&self) -> bool;

    /// True if graphs that contain its work are captured by all ranks at the same time.
    fn is_captured_together(&self) -> bool {
        false
    }

    /// Allocates what the collectives of `program`, which becomes `id`, need in addition to their operands.
    /// No earlier work is in progress, and `stream` has none.
    fn reserve(&mut self, id: ProgramId, program: &Program, stream: &Stream) -> Result<(), CudaError>;

    /// The thread that ends collectives which cannot complete, if other GPUs take part in them.
    fn watchdog(&self) -> Option<&Watchdog> {
        None
    }

    /// Prepares the collectives of a program before its first run, which all ranks begin. The call may wait
    /// for other ranks. The memory of the program, which is `id`, is in `arena`.
    fn connect(&mut self, _: ProgramId, _: &Loaded, _: &Arena) -> Result<(), DeviceCommError> {
        Ok(())
    }

    /// Enqueues on `compute`, the stream of the compute lane, what comes before a part of a program. It is
    /// not recorded.
    fn begin_part(
        &self,
        _: ProgramId,
        _: &Loaded,
        _: Part,
        _compute: &Stream,
    ) -> Result<(), DeviceCommError> {
        Ok(())
    }

    /// Enqueues what follows a part on `compute`.
    fn end_part(&self, _: ProgramId, _: &Loaded, _: Part, _compute: &Stream) -> Result<(), DeviceCommError> {
        Ok(())
    }

    /// Enqueues collectives of one kind and one group of ranks on `stream`, of which none reads or writes
    /// what another writes. The call may wait for other ranks.
    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError>;
}

/// A collective and its operands.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) program: ProgramId,
    /// The index of the instance.
    pub(super) instance: usize,
    /// The slot of the part that runs it.
    pub(super) slot: MicroSlot,
    pub(super) collective: Collective,
    pub(super) groups: Groups,
    pub(super) input: DeviceSpan<'a>,
    pub(super) output: DeviceSpan<'a>,
}

/// The error of a collective on GPU memory.
#[derive(Debug, Error)]
pub(super) enum DeviceCommError {
    /// A failure of the GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A failure of the communication.
    #[error(transparent)]
    Communicator(#[from] CommError),
}

impl From<DeviceCommError> for EngineError {
    fn from(error: DeviceCommError) -> Self {
        match error {
            DeviceCommError::Cuda(error) => error.into(),
            DeviceCommError::Communicator(error) => error.into(),
        }
    }
}

/// The bytes of `span` in piece `p`: fewer than those of a piece, or none, where the span ends before.
pub(super) fn piece_of(span: DeviceSpan<'_>, p: usize, bytes: usize) -> DeviceSpan<'_> {
    let end = |n: usize| (n * bytes).min(span.bytes());
    span.part(end(p)..end(p + 1))
}

/// The communicator of rank 0 of a run whose other ranks do not exist: its collectives are copies, as if the
/// others sent what this rank does, and zeros to a sum. With one rank, of a run of one process.
pub(super) struct Copies {
    pub(super) world_size: usize,
    /// The least time of collectives that are issued together.
    pub(super) pace: Option<(Pace, Delay)>,
}

impl Copies {
    /// Copies that take as long as they do.
    pub(super) fn unpaced(world_size: usize) -> Self {
        Copies { world_size, pace: None }
    }
}

impl DeviceCommunicator for Copies {
    fn world_size(&self) -> usize {
        self.world_size
    }

    fn is_recordable(&self) -> bool {
        true
    }

    fn reserve(&mut self, _: ProgramId, _: &Program, _: &Stream) -> Result<(), CudaError> {
        Ok(())
    }

    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError> {
        let begin = |(_, delay): &(Pace, Delay)| delay.begin(stream);
        self.pace.as_ref().map_or(Ok(()), begin)?;
        calls.iter().try_for_each(|call| copy(*call, stream))?;
        let sent = || calls.iter().map(|call| (sending(call.collective, call.groups), sent_bytes(call)));
        let end = |(pace, delay): &(Pace, Delay)| delay.end(pace.least(sent()), stream);
        Ok(self.pace.as_ref().map_or(Ok(()), end)?)
    }
}

/// Bytes that a rank sends to others in this collective.
fn sent_bytes(Call { collective, groups, input, output, .. }: &Call<'_>) -> u64 {
    collective.sent_bytes(*groups, input.bytes(), output.bytes()) as u64
}

fn copy(Call { collective, groups, input, output, .. }: Call<'_>, stream: &Stream) -> Result<(), CudaError> {
    if collective.is_message() {
        return if output.bytes() > 0 { output.fill(0, stream) } else { Ok(()) };
    }
    let n = groups.size;
    let piece = collective.piece_bytes(groups, input.bytes(), output.bytes());
    // What each rank sends to this one.
    let sent = match collective {
        Collective::AllGather { .. } => input,
        Collective::AllToAll { first } | Collective::ReduceScatter { first } => {
            piece_of(input, (n - first % n) % n, piece)
        }
        Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => {
            unreachable!("not copied")
        }
    };
    for r in 0..output.bytes().div_ceil(piece.max(1)) {
        let room = piece_of(output, r, piece);
        let bytes = sent.bytes().min(room.bytes());
        if bytes > 0 {
            room.part(0..bytes).copy_from(sent.part(0..bytes), stream)?;
        }
        let padding = room.part(bytes..room.bytes());
        if padding.bytes() > 0 {
            padding.fill(0, stream)?;
        }
    }
    Ok(())
}
