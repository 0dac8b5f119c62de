//! Pinned memory in a ring, through which a program's inputs and outputs travel while the card works.

use std::collections::VecDeque;
use xtrain_cuda::{Context, CudaError, DeviceSpan, Event, PinnedMemory, Stream};

/// Slots at first. More are added where more are under way at once.
const SLOTS: usize = 4;

/// Pinned memory, and how far the last copy from or to it is.
pub(super) struct Slot {
    pub(super) memory: PinnedMemory,
    /// Passed when the copy from or to the slot is done.
    pub(super) copied: Event,
}

impl Slot {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        Ok(Slot { memory: PinnedMemory::new(context, bytes)?, copied: Event::new(context)? })
    }
}

/// What the host writes, on its way to the card.
pub(super) struct Inputs {
    /// The host's copy, which the next run takes.
    staged: Vec<u8>,
    slots: VecDeque<Slot>,
}

impl Inputs {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let slots = (0..SLOTS).map(|_| Slot::new(context, bytes)).collect::<Result<_, _>>()?;
        Ok(Inputs { staged: vec![0; bytes], slots })
    }

    /// What the next run takes.
    pub(super) fn staged(&mut self) -> &mut [u8] {
        &mut self.staged
    }

    /// Puts a copy of what is staged to `target` into `stream`. Waits where all slots are under way.
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

/// What the card made, on its way to the host.
pub(super) struct Outputs {
    bytes: usize,
    free: Vec<Slot>,
    /// By number of the fetch; a slot is taken out when it is collected.
    under_way: VecDeque<(usize, Slot)>,
    fetched: usize,
}

impl Outputs {
    pub(super) fn new(context: &Context, bytes: usize) -> Result<Self, CudaError> {
        let free = (0..SLOTS).map(|_| Slot::new(context, bytes)).collect::<Result<_, _>>()?;
        Ok(Outputs { bytes, free, under_way: VecDeque::new(), fetched: 0 })
    }

    /// Puts a copy of `source` into `stream`; returns its number.
    pub(super) fn fetch(&mut self, source: DeviceSpan<'_>, stream: &Stream) -> Result<usize, CudaError> {
        let mut slot = match self.free.pop() {
            Some(slot) => slot,
            None => Slot::new(stream.context(), self.bytes)?,
        };
        source.read_into(&mut slot.memory, 0, stream)?;
        slot.copied.record(stream)?;
        self.fetched += 1;
        self.under_way.push_back((self.fetched, slot));
        Ok(self.fetched)
    }

    /// Whether the copy of this number is here.
    pub(super) fn is_here(&self, number: usize) -> Result<bool, CudaError> {
        self.under_way.iter().find(|(n, _)| *n == number).map_or(Ok(true), |(_, slot)| slot.copied.is_done())
    }

    /// The bytes of the copy of this number, waited for; nothing where it was taken before.
    pub(super) fn take(&mut self, number: usize) -> Result<Option<Vec<u8>>, CudaError> {
        let Some(at) = self.under_way.iter().position(|(n, _)| *n == number) else { return Ok(None) };
        let Some((_, slot)) = self.under_way.remove(at) else { return Ok(None) };
        slot.copied.synchronize()?;
        let bytes = slot.memory.to_vec();
        self.free.push(slot);
        Ok(Some(bytes))
    }
}
