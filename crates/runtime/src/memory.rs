//! The host memory of the CPU engine, and loans of an instance's operands.

use xtrain_tensor::AlignedBytes;

/// A span of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChunkSpan {
    pub(crate) chunk: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

impl ChunkSpan {
    /// The span that begins so many bytes later.
    pub(crate) fn later(self, bytes: usize) -> ChunkSpan {
        ChunkSpan { offset: self.offset + bytes, ..self }
    }
}

/// Chunks of memory. The first is scratch, which grows to the needs of the largest program.
pub(crate) struct Memory {
    chunks: Vec<AlignedBytes>,
}

/// The chunk of scratch.
pub(crate) const SCRATCH: usize = 0;

impl Memory {
    pub(crate) fn new() -> Self {
        Memory { chunks: vec![AlignedBytes::zeroed(0)] }
    }

    /// Adds a chunk of zeros and returns its index; None if the system refuses the bytes.
    pub(crate) fn add(&mut self, bytes: usize) -> Option<usize> {
        self.chunks.push(AlignedBytes::try_zeroed(bytes)?);
        Some(self.chunks.len() - 1)
    }

    /// Grows scratch to at least `bytes`; None if the system refuses the bytes.
    pub(crate) fn grow_scratch(&mut self, bytes: usize) -> Option<()> {
        let held = self.scratch_bytes();
        if held >= bytes {
            return Some(());
        }
        // Free the old chunk first, so that both never exist together.
        self.chunks[SCRATCH] = AlignedBytes::zeroed(0);
        let grown = AlignedBytes::try_zeroed(bytes);
        let done = grown.is_some();
        self.chunks[SCRATCH] = grown.unwrap_or_else(|| AlignedBytes::zeroed(held));
        done.then_some(())
    }

    pub(crate) fn scratch_bytes(&self) -> usize {
        self.chunks[SCRATCH].as_slice().len()
    }

    pub(crate) fn total_bytes(&self) -> usize {
        self.chunks.iter().map(|c| c.as_slice().len()).sum()
    }

    pub(crate) fn get(&self, span: ChunkSpan) -> &[u8] {
        &self.chunks[span.chunk].as_slice()[span.offset..][..span.bytes]
    }

    pub(crate) fn get_mut(&mut self, span: ChunkSpan) -> &mut [u8] {
        &mut self.chunks[span.chunk].as_mut_slice()[span.offset..][..span.bytes]
    }

    /// Copies `from` to `to`, which have the same length and do not overlap.
    pub(crate) fn copy(&mut self, from: ChunkSpan, to: ChunkSpan) {
        let (mut source, mut target) = self.lend(&[from], &[to]);
        if let (Some(source), Some(target)) = (source.pop(), target.pop()) {
            target.copy_from_slice(source);
        }
    }

    /// Lends the spans `reads` for reading and `writes` for writing, all at once.
    ///
    /// # Panics
    /// If a written span overlaps another one. The planner never places operands of one instance so.
    pub(crate) fn lend(&mut self, reads: &[ChunkSpan], writes: &[ChunkSpan]) -> (Vec<&[u8]>, Vec<&mut [u8]>) {
        // Sorted by address, each with its index among the operands, so that each chunk is split front to
        // back.
        let operands = reads.iter().chain(writes).copied().enumerate();
        let mut spans: Vec<(ChunkSpan, usize)> =
            operands.map(|(n, span)| (span, n)).filter(|(s, _)| s.bytes > 0).collect();
        spans.sort_unstable();
        let mut read: Vec<&[u8]> = vec![&[]; reads.len()];
        let mut written: Vec<&mut [u8]> = Vec::new();
        written.resize_with(writes.len(), Default::default);
        let mut rest = &spans[..];
        for (index, chunk) in self.chunks.iter_mut().enumerate() {
            let mut bytes = chunk.as_mut_slice();
            let mut base = 0;
            while let Some(&(span, first)) = rest.first().filter(|(s, _)| s.chunk == index) {
                // Equal spans are neighbours.
                let (same, others) = rest.split_at(rest.partition_point(|(s, _)| *s == span));
                rest = others;
                assert!(span.offset >= base, "operands overlap: {span:?}");
                let (_, tail) = bytes.split_at_mut(span.offset - base);
                let (piece, tail) = tail.split_at_mut(span.bytes);
                bytes = tail;
                base = span.offset + span.bytes;
                match first.checked_sub(reads.len()) {
                    Some(n) if same.len() == 1 => written[n] = piece,
                    None if same.iter().all(|(_, n)| *n < reads.len()) => {
                        let piece: &[u8] = piece;
                        same.iter().for_each(|&(_, n)| read[n] = piece);
                    }
                    _ => panic!("operands overlap: {span:?}"),
                }
            }
        }
        (read, written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(chunk: usize, offset: usize, bytes: usize) -> ChunkSpan {
        ChunkSpan { chunk, offset, bytes }
    }

    #[test]
    fn operands_of_several_chunks_are_lent_together() {
        let mut m = Memory::new();
        m.grow_scratch(256).expect("room");
        let c = m.add(128).expect("room");
        m.get_mut(span(c, 64, 2)).copy_from_slice(&[7, 8]);
        let (r, w) =
            m.lend(&[span(c, 64, 2), span(0, 128, 4), span(c, 64, 2)], &[span(0, 0, 64), span(0, 64, 3)]);
        assert_eq!((r[0], r[2], r[1].len()), (&[7u8, 8][..], &[7u8, 8][..], 4));
        assert_eq!((w[0].len(), w[1].len()), (64, 3));
    }

    #[test]
    fn each_operand_gets_its_own_span() {
        let mut m = Memory::new();
        let c = m.add(64 * 2000).expect("room");
        for n in 0..2000 {
            m.get_mut(span(c, 64 * n, 2)).copy_from_slice(&(n as u16).to_le_bytes());
        }
        let place = |n: usize| span(c, 64 * (n * 7919 % 2000), 2);
        let (reads, writes): (Vec<ChunkSpan>, Vec<ChunkSpan>) =
            (0..1000).map(|n| (place(2 * n), place(2 * n + 1))).unzip();
        let (read, written) = m.lend(&reads, &writes);
        let value = |bytes: &[u8]| usize::from(bytes[0]) + 256 * usize::from(bytes[1]);
        for n in 0..1000 {
            assert_eq!((value(read[n]), value(written[n])), (reads[n].offset / 64, writes[n].offset / 64));
        }
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn a_span_is_not_read_and_written() {
        let mut m = Memory::new();
        m.grow_scratch(256).expect("room");
        m.lend(&[span(0, 64, 4)], &[span(0, 64, 4)]);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn a_written_operand_cannot_overlap_a_read_one() {
        let mut m = Memory::new();
        m.grow_scratch(256).expect("room");
        m.lend(&[span(0, 0, 64)], &[span(0, 32, 64)]);
    }
}
