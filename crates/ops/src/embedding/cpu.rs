//! CPU kernels of [`Embedding`] and [`EmbeddingGrad`].

use super::{Embedding, EmbeddingGrad};
use crate::host::rows::{add_into, for_row_blocks};
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, TensorType, View, ViewMut, with_real};

impl CpuKernel for Embedding {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ids = inputs[0].ints();
        let (_, width) = inputs[1].ty.shape.rows_cols();
        let row_bytes = inputs[1].ty.dtype.bytes(width);
        let table = inputs[1].bytes();
        // Rows are copied as bytes: without arithmetic there is nothing to widen.
        outputs[0].bytes().par_chunks_mut(row_bytes.max(1)).zip(ids).for_each(|(row, &id)| {
            row.copy_from_slice(&table[id as usize * row_bytes..][..row_bytes]);
        });
    }
}

impl CpuKernel for EmbeddingGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, width) = inputs[1].ty.shape.rows_cols();
        let by_row = TokensByRow::new(inputs[0].ints(), self.vocab_size);
        let [dtable] = outputs else { unreachable!("one output") };
        with_real!(inputs[1].ty.dtype, T => {
            for_row_blocks(self.vocab_size, [dtable], |rows, [mut block]| {
                if by_row.tokens(rows.clone()).is_empty() && block.accumulate {
                    return;
                }
                let accumulate = block.accumulate;
                let mut block = if accumulate { block.reals::<T>() } else { block.fresh::<T>() };
                for (row, to) in rows.zip(block.chunks_exact_mut(width)) {
                    if !accumulate {
                        to.fill(0.0);
                    }
                    for &token in by_row.tokens(row..row + 1) {
                        add_into(to, &inputs[1].rows(token as usize..token as usize + 1).reals::<T>());
                    }
                }
            });
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        size_of::<u32>() * (inputs[0].numel() + 2 * (self.vocab_size + 1))
    }
}

/// Tokens sorted by the row that they read, those of one row in their own order, so that rows can be summed
/// independently of each other.
struct TokensByRow {
    tokens: Vec<u32>,
    /// For each row, the index in `tokens` of its first one, then the number of tokens.
    starts: Vec<u32>,
}

impl TokensByRow {
    /// Counting sort of the tokens by `ids`.
    fn new(ids: &[i32], rows: usize) -> Self {
        let mut starts = vec![0u32; rows + 1];
        ids.iter().for_each(|&id| starts[id as usize + 1] += 1);
        for row in 0..rows {
            starts[row + 1] += starts[row];
        }
        let (mut next, mut tokens) = (starts.clone(), vec![0; ids.len()]);
        for (token, &id) in ids.iter().enumerate() {
            tokens[next[id as usize] as usize] = token as u32;
            next[id as usize] += 1;
        }
        TokensByRow { tokens, starts }
    }

    /// The tokens of these rows.
    fn tokens(&self, rows: Range<usize>) -> &[u32] {
        &self.tokens[self.starts[rows.start] as usize..self.starts[rows.end] as usize]
    }
}
