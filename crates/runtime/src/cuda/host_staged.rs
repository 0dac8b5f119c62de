//! Collectives on GPU memory through host memory: correct with any [`Communicator`], and slow.

use super::communicator::{Call, DeviceCommError, DeviceCommunicator};
use crate::collective::{padded_bytes, run_padded};
use crate::part::ProgramId;
use std::sync::{Arc, Mutex, PoisonError};
use xtrain_cuda::{CudaError, PinnedMemory, Stream, exclude_capture};
use xtrain_distributed::Communicator;
use xtrain_program::{Collective, Groups, Program};

/// A communicator that copies an input to the host, waits there for the other ranks, and copies the output
/// back. Since the host takes part, its collectives are not recorded in graphs.
pub(super) struct HostStaged {
    communicator: Arc<dyn Communicator>,
    buffers: Mutex<Option<Buffers>>,
}

/// Pinned memory for the largest input and the largest output, with their padding.
struct Buffers {
    input: PinnedMemory,
    output: PinnedMemory,
}

impl HostStaged {
    pub(super) fn new(communicator: Arc<dyn Communicator>) -> Self {
        HostStaged { communicator, buffers: Mutex::new(None) }
    }
}

/// Bytes of the input and the output of a collective with their padding, given those without.
fn padded_operands((collective, groups): (Collective, Groups), input: usize, output: usize) -> [usize; 2] {
    let padded = padded_bytes(collective, groups, input, output);
    match collective {
        Collective::AllGather { .. } => [input, padded],
        Collective::AllToAll { .. } | Collective::ReduceScatter { .. } => [padded, padded],
        Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => {
            [input, output]
        }
    }
}

impl DeviceCommunicator for HostStaged {
    fn world_size(&self) -> usize {
        self.communicator.world_size()
    }

    fn is_recordable(&self) -> bool {
        false
    }

    fn reserve(&mut self, _: ProgramId, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        let context = stream.context();
        let buffers = self.buffers.get_mut().unwrap_or_else(PoisonError::into_inner);
        let held = buffers.as_ref().map_or([0, 0], |held| [held.input.len(), held.output.len()]);
        let operands = program.instances.iter().filter_map(|instance| {
            let call = instance.code.op().collective()?;
            let input = instance.inputs.first().map_or(0, |&id| program.ty(id).bytes());
            let output = instance.outputs.first().map_or(0, |o| program.ty(o.value).bytes());
            Some(padded_operands(call, input, output))
        });
        let needed = operands.fold(held, |most, next| [most[0].max(next[0]), most[1].max(next[1])]);
        if needed != held {
            let [input, output] = needed;
            // Frees the old ones first, so that both never exist together.
            *buffers = None;
            let input = PinnedMemory::new(context, input)?;
            *buffers = Some(Buffers { input, output: PinnedMemory::new(context, output)? });
        }
        Ok(())
    }

    fn enqueue(&self, calls: &[Call<'_>], stream: &Stream) -> Result<(), DeviceCommError> {
        calls.iter().try_for_each(|call| self.exchange(*call, stream))
    }
}

impl HostStaged {
    fn exchange(
        &self,
        Call { collective, groups, input, output, .. }: Call<'_>,
        stream: &Stream,
    ) -> Result<(), DeviceCommError> {
        let call = (collective, groups);
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let Buffers { input: sent, output: received } =
            buffers.as_mut().expect("they were reserved when the program was loaded");
        let [sent_bytes, received_bytes] = padded_operands(call, input.bytes(), output.bytes());
        {
            let _no_capture = exclude_capture();
            if input.bytes() > 0 {
                input.read_into(sent, 0, stream)?;
            }
            // The copy of the previous output from its buffer, which was enqueued before, has also ended
            // then.
            stream.synchronize()?;
        }
        sent[input.bytes()..sent_bytes].fill(0);
        // Without the capture lock: another rank may be a thread of this process that waits for it.
        run_padded(&*self.communicator, call, &sent[..sent_bytes], &mut received[..received_bytes])?;
        if output.bytes() > 0 {
            let _no_capture = exclude_capture();
            output.write(&received[..output.bytes()], stream)?;
        }
        Ok(())
    }
}
