//! Copies of state between the GPU and ordinary host memory, through a few pinned buffers.
//!
//! The GPU copies to and from pinned memory at the full speed of its bus, and from other memory at a fraction
//! of it. So large values are cut into pieces: while the GPU copies some, the cores move others between the
//! buffers and ordinary memory.

use super::arena::{Arena, ArenaSpan};
use super::ring::Slot;
use rayon::prelude::*;
use xtrain_cuda::{CudaError, Stream};

/// Bytes of a buffer.
const PIECE_BYTES: usize = 8 << 20;
/// The number of buffers: enough that the GPU never waits for the cores.
const PIECES: usize = 4;
/// Bytes that one thread moves at a time.
const COPY_BYTES: usize = 512 << 10;

/// The buffers, allocated at the first use.
#[derive(Default)]
pub(super) struct Staging {
    slots: Vec<Slot>,
}

impl Staging {
    /// Copies each span into its slice, which has the same length, after all work enqueued on `stream`.
    pub(super) fn read(
        &mut self,
        arena: &Arena,
        copies: Vec<(ArenaSpan, &mut [u8])>,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.make_slots(stream)?;
        let read = self.read_pieces(arena, copies, stream);
        if read.is_err() {
            // No copy may be in progress when the buffers are next used or freed.
            let _ = stream.synchronize();
        }
        read
    }

    fn read_pieces(
        &mut self,
        arena: &Arena,
        copies: Vec<(ArenaSpan, &mut [u8])>,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (span, target) in copies {
            let cut = target.chunks_mut(PIECE_BYTES).enumerate();
            pieces.extend(cut.map(|(n, to)| (span.part(n * PIECE_BYTES, to.len()), to)));
        }
        for n in 0..pieces.len() + PIECES {
            let slot = &mut self.slots[n % PIECES];
            // The n-th piece takes the buffer that an earlier piece leaves.
            if let Some((_, target)) = n.checked_sub(PIECES).and_then(|before| pieces.get_mut(before)) {
                slot.copied.synchronize()?;
                move_bytes(target, &slot.memory);
            }
            if let Some((span, _)) = pieces.get(n) {
                arena.memory(*span).read_into(&mut slot.memory, 0, stream)?;
                slot.copied.record(stream)?;
            }
        }
        Ok(())
    }

    /// Enqueues a copy of `source` to the span, which has the same length. The source has been read when this
    /// returns.
    pub(super) fn write(
        &mut self,
        arena: &Arena,
        span: ArenaSpan,
        source: &[u8],
        stream: &Stream,
    ) -> Result<(), CudaError> {
        self.make_slots(stream)?;
        for (n, piece) in source.chunks(PIECE_BYTES).enumerate() {
            // The buffer whose copy began first.
            self.slots.rotate_left(1);
            let Some(slot) = self.slots.last_mut() else { unreachable!("they were added above") };
            slot.copied.synchronize()?;
            move_bytes(&mut slot.memory, piece);
            let target = arena.memory(span.part(n * PIECE_BYTES, piece.len()));
            target.write(&slot.memory[..piece.len()], stream)?;
            slot.copied.record(stream)?;
        }
        Ok(())
    }

    fn make_slots(&mut self, stream: &Stream) -> Result<(), CudaError> {
        while self.slots.len() < PIECES {
            self.slots.push(Slot::new(stream.context(), PIECE_BYTES)?);
        }
        Ok(())
    }
}

/// Copies as many bytes as the shorter slice has.
fn move_bytes(target: &mut [u8], source: &[u8]) {
    target.par_chunks_mut(COPY_BYTES).zip(source.par_chunks(COPY_BYTES)).for_each(|(to, from)| {
        let bytes = to.len().min(from.len());
        to[..bytes].copy_from_slice(&from[..bytes]);
    });
}
