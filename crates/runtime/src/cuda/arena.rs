//! The memory of a CUDA engine: chunks for state and for the exchange with the host, and scratch, which grows
//! in place.

use crate::error::EngineError;
use crate::state::StateTable;
use xtrain_cuda::{Context, CudaError, DeviceSpan, GrowingMemory, Stream};
use xtrain_program::{Plan, Program, Region};
use xtrain_tensor::host::ALIGN_BYTES;

/// A span of the engine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArenaSpan {
    chunk: ArenaChunk,
    offset: usize,
    pub(super) bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArenaChunk {
    Scratch,
    Persistent(usize),
}

impl ArenaSpan {
    /// A span of scratch.
    pub(super) fn scratch(offset: usize, bytes: usize) -> ArenaSpan {
        ArenaSpan { chunk: ArenaChunk::Scratch, offset, bytes }
    }

    /// The `bytes` bytes of this span from its byte `offset` on.
    pub(super) fn part(self, offset: usize, bytes: usize) -> ArenaSpan {
        ArenaSpan { offset: self.offset + offset, bytes, ..self }
    }

    /// The number of the span's chunk among [`Arena::chunks`], and its first byte there.
    pub(super) fn place(self) -> (usize, usize) {
        match self.chunk {
            ArenaChunk::Scratch => (0, self.offset),
            ArenaChunk::Persistent(n) => (n + 1, self.offset),
        }
    }

    /// The bytes between the end of a value and the next position at which a value may start; `None` if there
    /// are none.
    pub(super) fn padding(self) -> Option<ArenaSpan> {
        let bytes = self.bytes.next_multiple_of(ALIGN_BYTES) - self.bytes;
        (bytes > 0).then(|| self.part(self.bytes, bytes))
    }
}

pub(super) struct Arena {
    context: Context,
    scratch: GrowingMemory,
    /// The planned bytes; slightly more are backed.
    scratch_bytes: usize,
    /// Chunks, each with its planned bytes.
    persistent: Vec<(GrowingMemory, usize)>,
    is_shared: bool,
    state: StateTable<ArenaSpan>,
}

impl Arena {
    /// Empty memory. If `is_shared`, other ranks can map it.
    pub(super) fn new(context: &Context, is_shared: bool) -> Result<Self, CudaError> {
        Ok(Arena {
            context: context.clone(),
            scratch: GrowingMemory::new(context, is_shared)?,
            scratch_bytes: 0,
            persistent: Vec::new(),
            is_shared,
            state: StateTable::new(),
        })
    }

    /// Allocates the state and constants that `program` uses and the engine lacks, its exchange with the
    /// host, its slots, and scratch. State begins as zeros. Returns the span of the exchange, and of the
    /// slots after it.
    pub(super) fn allocate_for(
        &mut self,
        program: &Program,
        plan: &Plan,
        stream: &Stream,
    ) -> Result<ArenaSpan, EngineError> {
        let missing = self.state.missing(program)?;
        let io = plan.region_bytes[Region::Io as usize] + plan.region_bytes[Region::Slots as usize];
        let bytes = io + missing.bytes;
        let scratch = plan.region_bytes[Region::Scratch as usize];
        let held = self.planned_bytes();
        let more = bytes + scratch.saturating_sub(self.scratch_bytes);
        let (free, _) = self.context.memory()?;
        let refused = |free: usize| EngineError::Memory {
            needed_bytes: held + more,
            available_bytes: Some((held + free) as u64),
        };
        if more > free {
            return Err(refused(free));
        }
        let refusal = |error: CudaError| match error {
            CudaError::Memory { free, .. } => refused(free),
            other => other.into(),
        };
        let backed = self.scratch.bytes();
        self.scratch.grow(scratch).map_err(refusal)?;
        self.scratch_bytes = self.scratch_bytes.max(scratch);
        if self.scratch.bytes() > backed {
            // Kernels are timed before there is data: on zeros, not on leftovers of another process.
            self.scratch.span(backed..self.scratch.bytes()).fill(0, stream)?;
        }
        let memory = GrowingMemory::allocate(&self.context, bytes, self.is_shared).map_err(refusal)?;
        if bytes > 0 {
            memory.span(0..bytes).fill(0, stream)?;
        }
        self.persistent.push((memory, bytes));
        let chunk = ArenaChunk::Persistent(self.persistent.len() - 1);
        let place = |offset, bytes| ArenaSpan { chunk, offset: io + offset, bytes };
        let (memory, _) = &self.persistent[self.persistent.len() - 1];
        self.state.add(missing, place, |span, bytes| {
            memory.span(span.offset..span.offset + span.bytes).write(bytes, stream)
        })?;
        Ok(ArenaSpan { chunk, offset: 0, bytes: io })
    }

    /// The memory of a span.
    pub(super) fn memory(&self, span: ArenaSpan) -> DeviceSpan<'_> {
        let range = span.offset..span.offset + span.bytes;
        match span.chunk {
            ArenaChunk::Scratch => self.scratch.span(range),
            ArenaChunk::Persistent(n) => self.persistent[n].0.span(range),
        }
    }

    /// The context of the GPU.
    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    /// All memory: scratch, then the chunks in the order in which they were allocated.
    pub(super) fn chunks(&self) -> impl Iterator<Item = &GrowingMemory> {
        std::iter::once(&self.scratch).chain(self.persistent.iter().map(|(memory, _)| memory))
    }

    /// The state values and constants.
    pub(super) fn state(&self) -> &StateTable<ArenaSpan> {
        &self.state
    }

    /// All planned bytes.
    pub(super) fn planned_bytes(&self) -> usize {
        self.scratch_bytes + self.persistent.iter().map(|(_, bytes)| bytes).sum::<usize>()
    }
}
