//! CPU kernel of [`Attention`]: one task a block of queries, which are whole rows of the output.

use super::Attention;
use super::block::{Block, ROWS, Rounding, transpose};
use crate::host::gemm::Mat;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

impl CpuKernel for Attention {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [o, lse] = outputs else { unreachable!("two outputs") };
        let documents = Documents { starts: inputs.get(1).map(View::ints), seq_len: self.seq_len };
        let rounding = Rounding::of(inputs[0].ty.dtype);
        with_real!(inputs[0].ty.dtype, T => {
            let qkv = inputs[0].reals::<T>();
            attend::<T>(self, &qkv, documents, rounding, &mut o.reals::<T>(), &mut lse.reals::<T>());
        });
    }
}

fn attend<T: Real>(
    op: &Attention,
    qkv: &[T],
    documents: Documents<'_>,
    rounding: Rounding,
    o: &mut [T],
    lse: &mut [T],
) {
    let Attention { seq_len: s, heads, kv_heads, head_dim: e } = *op;
    let (width, out_width, group) = ((heads + 2 * kv_heads) * e, heads * e, heads / kv_heads);
    // Every key head of every sequence, transposed once: [B, k, e, s].
    let mut keys_t = vec![T::ZERO; qkv.len() / width * kv_heads * e];
    keys_t.par_chunks_mut(e * s).enumerate().for_each(|(i, to)| {
        let (sequence, kv_head) = (i / kv_heads, i % kv_heads);
        transpose(&qkv[sequence * s * width + (heads + kv_head) * e..], width, s, e, to);
    });
    let blocks_a_sequence = s.div_ceil(ROWS);
    // The log-sum-exps of a block: one slice a head.
    let mut block_lse: Vec<Vec<&mut [T]>> = Vec::new();
    block_lse.resize_with(blocks_a_sequence * (lse.len() / (heads * s)), Vec::new);
    for (i, row) in lse.chunks_mut(s).enumerate() {
        let first = i / heads * blocks_a_sequence;
        row.chunks_mut(ROWS).zip(&mut block_lse[first..]).for_each(|(part, block)| block.push(part));
    }
    let blocks: Vec<_> =
        o.chunks_mut(s * out_width).flat_map(|o| o.chunks_mut(ROWS * out_width)).zip(block_lse).collect();
    blocks.into_par_iter().enumerate().for_each_init(
        || vec![T::ZERO; ROWS * s],
        |scores, (block, (o, lse))| {
            let (sequence, first) = (block / blocks_a_sequence, block % blocks_a_sequence * ROWS);
            let m = o.len() / out_width;
            let start = documents.first_of_block(sequence, first, m);
            let n = first + m - start;
            let qkv = &qkv[sequence * s * width..][..s * width];
            for (head, lse) in lse.into_iter().enumerate() {
                let kv_head = head / group;
                let keys_t = &keys_t[(sequence * kv_heads + kv_head) * e * s..][..e * s];
                let block = Block {
                    queries: Mat::strided(&qkv[first * width + head * e..], m, e, width),
                    keys_t: Mat::strided(&keys_t[start..], e, n, s),
                    values: Mat::strided(
                        &qkv[start * width + (heads + kv_heads + kv_head) * e..],
                        n,
                        e,
                        width,
                    ),
                    rounding,
                };
                let seen = |i: usize| documents.first_of(sequence, first + i) - start..first + i + 1 - start;
                block.attend(seen, scores, &mut o[head * e..], out_width, lse);
            }
        },
    );
}

/// Where documents start.
#[derive(Clone, Copy)]
pub(super) struct Documents<'a> {
    pub(super) starts: Option<&'a [i32]>,
    pub(super) seq_len: usize,
}

impl Documents<'_> {
    /// The first key that token `t` of a sequence sees.
    pub(super) fn first_of(&self, sequence: usize, t: usize) -> usize {
        let Some(starts) = self.starts else { return 0 };
        let start = starts[sequence * self.seq_len + t];
        assert!(
            (0..=t as i64).contains(&start.into()),
            "the document of token {t} of sequence {sequence} cannot start at {start}"
        );
        start as usize
    }

    /// The first key that any of the `m` tokens from `first` sees.
    pub(super) fn first_of_block(&self, sequence: usize, first: usize, m: usize) -> usize {
        (first..first + m).map(|t| self.first_of(sequence, t)).min().unwrap_or(0)
    }
}
