//! A ring of pinned buffers, through which a program's inputs and outputs travel while the GPU works.

use std::collections::VecDeque;
use xtrain_cuda::{Context, CudaError, DeviceSpan, Event, PinnedMemory, Stream};

/// The initial number of slots; outputs add slots if more copies are in progress.
const SLOTS: usize = 4;

/// A pinned buffer with the event of its last copy.
pub(super) struct Slot {
    pub(super) memory: PinnedMemory,
    /// Recorded after the copy from or to the buffer.
    pub(super) copied: Event,
}

impl Slot {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        Ok(Slot { memory: PinnedMemory::new(context, bytes)?, copied: Event::new(context)? })
    }
}

/// Inputs on their way to the GPU.
pub(super) struct Inputs {
    /// The inputs of the next run, in ordinary memory.
    staged: Vec<u8>,
    slots: VecDeque<Slot>,
}

impl Inputs {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let slots = (0..SLOTS).map(|_| Slot::new(context, bytes)).collect::<Result<_, _>>()?;
        Ok(Inputs { staged: vec![0; bytes], slots })
    }

    /// The inputs of the next run.
    pub(super) fn staged(&mut self) -> &mut [u8] {
        &mut self.staged
    }

    /// Enqueues a copy of the staged inputs to `target`. Waits if all slots are in use.
    pub(super) fn send(&mut self, target: DeviceSpan<'_>, stream: &Stream) -> Result<(), CudaError> {
        if self.staged.is_empty() {
            return Ok(());
        }
        let Some(mut slot) = self.slots.pop_front() else { unreachable!("each slot is put back below") };
        let sent = slot.copied.synchronize().and_then(|()| {
            slot.memory.copy_from_slice(&self.staged);
            target.write(&slot.memory, stream)?;
            slot.copied.record(stream)
        });
        self.slots.push_back(slot);
        sent
    }
}

/// Outputs on their way to the host.
pub(super) struct PendingOutputs {
    bytes: usize,
    free: Vec<Slot>,
    /// Copies in progress, with the number of their fetch; collecting one removes it.
    in_progress: VecDeque<(usize, Slot)>,
    fetched: usize,
}

impl PendingOutputs {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let free = (0..SLOTS).map(|_| Slot::new(context, bytes)).collect::<Result<_, _>>()?;
        Ok(PendingOutputs { bytes, free, in_progress: VecDeque::new(), fetched: 0 })
    }

    /// Enqueues a copy of `source`; returns its number.
    pub(super) fn fetch(&mut self, source: DeviceSpan<'_>, stream: &Stream) -> Result<usize, CudaError> {
        let mut slot = match self.free.pop() {
            Some(slot) => slot,
            None => Slot::new(stream.context(), self.bytes)?,
        };
        source.read_into(&mut slot.memory, 0, stream)?;
        slot.copied.record(stream)?;
        self.fetched += 1;
        self.in_progress.push_back((self.fetched, slot));
        Ok(self.fetched)
    }

    /// True if the copy of this number has arrived.
    pub(super) fn has_arrived(&self, number: usize) -> Result<bool, CudaError> {
        self.in_progress
            .iter()
            .find(|(n, _)| *n == number)
            .map_or(Ok(true), |(_, slot)| slot.copied.is_done())
    }

    /// The bytes of the copy of this number; waits for it. None if it was taken before.
    pub(super) fn take(&mut self, number: usize) -> Result<Option<Vec<u8>>, CudaError> {
        let Some(at) = self.in_progress.iter().position(|(n, _)| *n == number) else { return Ok(None) };
        let Some((_, slot)) = self.in_progress.remove(at) else { return Ok(None) };
        slot.copied.synchronize()?;
        let bytes = slot.memory.to_vec();
        self.free.push(slot);
        Ok(Some(bytes))
    }
}
