//! CPU kernel of [`Attention`]. A task is a block of queries with all heads: whole rows of the output.

use super::Attention;
use super::block::{Block, ROWS, factor};
use super::columns::{Columns, transpose, widen};
use crate::host::gemm::Mat;
use crate::host::math::Rounding;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Pooled, Real, TensorType, View, ViewMut, with_real};

impl CpuKernel for Attention {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [o, lse] = outputs else { unreachable!("two outputs") };
        let documents = Documents { starts: inputs.get(1).map(View::ints), seq_len: self.seq_len };
        with_real!(inputs[0].ty.dtype, T => {
            let keys_values = KeysValues::<T>::new(self, inputs[0]);
            attend(self, inputs[0], &keys_values, documents, o, &mut lse.fresh::<T>());
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = *self;
        let ((tokens, _), dtype) = (inputs[0].shape.rows_cols(), inputs[0].dtype);
        let widened = usize::from(dtype != dtype.compute());
        let task = ROWS * (s + widened * 2 * heads * e);
        dtype.compute().bytes((1 + widened) * tokens * kv_heads * e + threads * task)
    }
}

fn attend<T: Real>(
    op: &Attention,
    qkv: View<'_>,
    keys_values: &KeysValues<'_, T>,
    documents: Documents<'_>,
    o: &mut ViewMut<'_>,
    lse: &mut [T],
) {
    let Attention { seq_len: s, heads, kv_heads, head_dim: e, scale, .. } = *op;
    let (out_width, group, rounding) = (heads * e, heads / kv_heads, Rounding::for_operands(qkv.ty.dtype));
    let blocks_per_sequence = s.div_ceil(ROWS);
    // For each block, the slices of lse that it writes, one for each head.
    let mut block_lse: Vec<Vec<&mut [T]>> = Vec::new();
    block_lse.resize_with(blocks_per_sequence * (lse.len() / (heads * s)), Vec::new);
    for (i, row) in lse.chunks_mut(s).enumerate() {
        let first = i / heads * blocks_per_sequence;
        row.chunks_mut(ROWS).zip(&mut block_lse[first..]).for_each(|(part, block)| block.push(part));
    }
    let sequences = o.chunks(s * out_width);
    let blocks: Vec<_> = sequences.flat_map(|o| o.into_chunks(ROWS * out_width)).zip(block_lse).collect();
    blocks.into_par_iter().enumerate().for_each(|(block, (mut o, lse))| {
        let (sequence, first) = (block / blocks_per_sequence, block % blocks_per_sequence * ROWS);
        let m = o.ty.numel() / out_width;
        let start = documents.first_key_of_block(sequence, first, m);
        let n = first + m - start;
        let rows = sequence * s + first..sequence * s + first + m;
        let queries = Columns::<T>::new(qkv, rows, 0..out_width);
        let (mut scores, mut o) = (Pooled::take(ROWS * n), o.fresh::<T>());
        for (head, lse) in lse.into_iter().enumerate() {
            let block = Block {
                queries: queries.part(0..m, head * e..(head + 1) * e),
                keys_t: keys_values.keys_t(sequence, head / group, start, n),
                values: keys_values.values(sequence, head / group, start, n),
                scale: factor(scale, e),
                rounding,
            };
            let seen = |i: usize| documents.first_key(sequence, first + i) - start..first + i + 1 - start;
            block.attend(seen, &mut scores, &mut o[head * e..], out_width, lse);
        }
    });
}

/// Keys and values of all sequences, in the compute type, with keys transposed.
struct KeysValues<'a, T: Real> {
    op: &'a Attention,
    /// qkv, if it is stored in the compute type; values are then read there.
    stored: Option<&'a [T]>,
    /// By sequence and key/value head: the transposed keys, `[e, s]`, then, unless `stored` has them, the
    /// widened values, `[s, e]`.
    copies: Pooled<T>,
    /// Elements of a head in `copies`.
    head_elements: usize,
}

impl<'a, T: Real> KeysValues<'a, T> {
    fn new(op: &'a Attention, qkv: View<'a>) -> Self {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = *op;
        let (tokens, _) = qkv.ty.shape.rows_cols();
        let stored = qkv.stored::<T>();
        let head_elements = if stored.is_some() { e * s } else { 2 * e * s };
        let mut copies = Pooled::take(tokens / s * kv_heads * head_elements);
        copies.par_chunks_exact_mut(head_elements).enumerate().for_each(|(i, copy)| {
            let (rows, kv_head) = (i / kv_heads * s..(i / kv_heads + 1) * s, i % kv_heads);
            let columns = |head: usize| head * e..(head + 1) * e;
            let (keys_t, values) = copy.split_at_mut(e * s);
            transpose(&Columns::new(qkv, rows.clone(), columns(heads + kv_head)), keys_t);
            if !values.is_empty() {
                widen(qkv, rows, columns(heads + kv_heads + kv_head), values);
            }
        });
        KeysValues { op, stored, copies, head_elements }
    }

    /// The copies of a head.
    fn head_copies(&self, sequence: usize, kv_head: usize) -> &[T] {
        &self.copies[(sequence * self.op.kv_heads + kv_head) * self.head_elements..][..self.head_elements]
    }

    /// The keys of `n` tokens from `start` on, transposed.
    fn keys_t(&self, sequence: usize, kv_head: usize, start: usize, n: usize) -> Mat<'_, T> {
        let Attention { seq_len: s, head_dim: e, .. } = *self.op;
        Mat::strided(&self.head_copies(sequence, kv_head)[..e * s][start..], e, n, s)
    }

    /// The values of `n` tokens from `start` on.
    fn values(&self, sequence: usize, kv_head: usize, start: usize, n: usize) -> Mat<'_, T> {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = *self.op;
        let Some(stored) = self.stored else {
            return Mat::new(&self.head_copies(sequence, kv_head)[e * s..][start * e..], n, e);
        };
        let width = (heads + 2 * kv_heads) * e;
        Mat::strided(
            &stored[(sequence * s + start) * width + (heads + kv_heads + kv_head) * e..],
            n,
            e,
            width,
        )
    }
}

/// The document boundaries of a batch.
#[derive(Clone, Copy)]
pub(super) struct Documents<'a> {
    pub(super) starts: Option<&'a [i32]>,
    pub(super) seq_len: usize,
}

impl Documents<'_> {
    /// The first key that token `t` of a sequence sees.
    pub(super) fn first_key(&self, sequence: usize, t: usize) -> usize {
        let Some(starts) = self.starts else { return 0 };
        let start = starts[sequence * self.seq_len + t];
        assert!(
            (0..=t as i64).contains(&start.into()),
            "the document of token {t} of sequence {sequence} cannot start at {start}"
        );
        start as usize
    }

    /// The first key that any of the `m` tokens from `first` sees.
    pub(super) fn first_key_of_block(&self, sequence: usize, first: usize, m: usize) -> usize {
        (first..first + m).map(|t| self.first_key(sequence, t)).min().unwrap_or(0)
    }
}
