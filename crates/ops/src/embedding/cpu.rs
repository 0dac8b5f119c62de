//! CPU kernels of [`Embedding`] and [`EmbeddingGrad`].

use super::{Embedding, EmbeddingGrad};
use crate::host::rows::{add_into, for_row_blocks};
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, View, ViewMut, with_real};

impl CpuKernel for Embedding {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ids = inputs[0].ints();
        let (_, width) = inputs[1].ty.shape.rows_cols();
        let row_bytes = inputs[1].ty.dtype.bytes(width);
        let table = inputs[1].bytes();
        // The table is copied as it is stored: no arithmetic, so no widening.
        outputs[0].bytes().par_chunks_mut(row_bytes.max(1)).zip(ids).for_each(|(row, &id)| {
            row.copy_from_slice(&table[id as usize * row_bytes..][..row_bytes]);
        });
    }
}

impl CpuKernel for EmbeddingGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, width) = inputs[1].ty.shape.rows_cols();
        // The tokens of each row, in order: rows can then be summed independently of each other.
        let mut by_row: Vec<Vec<usize>> = vec![Vec::new(); self.vocab_size];
        for (token, &id) in inputs[0].ints().iter().enumerate() {
            by_row[id as usize].push(token);
        }
        with_real!(inputs[1].ty.dtype, T => {
            let dx = inputs[1].reals::<T>();
            let accumulate = outputs[0].accumulate;
            let mut dtable = outputs[0].reals::<T>();
            for_row_blocks(&mut dtable, width, |first, rows| {
                if !accumulate {
                    rows.fill(0.0);
                }
                for (row, tokens) in rows.chunks_mut(width).zip(&by_row[first..]) {
                    tokens.iter().for_each(|&t| add_into(row, &dx[t * width..][..width]));
                }
            });
        });
    }
}
