//! CPU kernel of [`AttentionGrad`]: one task a key/value head of a sequence, with the query heads of its group.
//!
//! A task walks over tiles of keys, and for each over the blocks of queries that see it, so that a tile's keys, values and their
//! gradients stay in cache.

use super::block::{ROWS, Rounding, exact, round_bf16, scale, transpose};
use super::cpu::Documents;
use super::{Attention, AttentionGrad};
use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{exp, sum, vectorized};
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

/// Keys of a tile; a multiple of [`ROWS`], so that the blocks of queries that see a tile start where it starts.
const TILE: usize = 512;

impl CpuKernel for AttentionGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        with_real!(inputs[1].ty.dtype, T => {
            let (d_o, qkv) = (inputs[0].reals::<T>(), inputs[1].reals::<T>());
            let (o, lse) = (inputs[2].reals::<T>(), inputs[3].reals::<T>());
            let pass = Pass {
                op: self,
                d_o: &d_o,
                qkv: &qkv,
                o: &o,
                lse: &lse,
                documents: Documents { starts: inputs.get(4).map(View::ints), seq_len: self.0.seq_len },
                rounding: Rounding::of(inputs[1].ty.dtype),
            };
            pass.run(&mut outputs[0].reals::<T>());
        });
    }
}

struct Pass<'a, T> {
    op: &'a AttentionGrad,
    d_o: &'a [T],
    qkv: &'a [T],
    o: &'a [T],
    lse: &'a [T],
    documents: Documents<'a>,
    rounding: Rounding,
}

/// What one task writes: e columns of each token of its sequence, for each of its heads.
struct Target<'a, T> {
    sequence: usize,
    kv_head: usize,
    /// By token, then by head of the group.
    queries: Vec<&'a mut [T]>,
    /// By token.
    keys: Vec<&'a mut [T]>,
    /// By token.
    values: Vec<&'a mut [T]>,
}

/// Memory of one task, reused by the next.
struct Scratch<T> {
    keys_t: Vec<T>,
    values_t: Vec<T>,
    dq: Vec<T>,
    dk: Vec<T>,
    dv: Vec<T>,
    delta: Vec<T>,
    p: Vec<T>,
    ds: Vec<T>,
}

impl<T: Real> Scratch<T> {
    fn new(s: usize, e: usize) -> Self {
        let zeros = |n| vec![T::ZERO; n];
        let tile = ROWS * TILE.min(s);
        Scratch {
            keys_t: zeros(e * s),
            values_t: zeros(e * s),
            dq: zeros(s * e),
            dk: zeros(s * e),
            dv: zeros(s * e),
            delta: zeros(s),
            p: zeros(tile),
            ds: zeros(tile),
        }
    }
}

impl<T: Real> Pass<'_, T> {
    fn run(&self, dqkv: &mut [T]) {
        let (s, e) = (self.op.0.seq_len, self.op.0.head_dim);
        dqkv.par_chunks_mut(s * self.width())
            .enumerate()
            .flat_map(|(sequence, rows)| self.targets(sequence, rows).into_par_iter())
            .for_each_init(|| Scratch::new(s, e), |scratch, target| self.head(scratch, target));
    }

    fn width(&self) -> usize {
        (self.op.0.heads + 2 * self.op.0.kv_heads) * self.op.0.head_dim
    }

    /// Cuts a sequence's rows into the columns of each key/value head's task.
    fn targets<'a>(&self, sequence: usize, rows: &'a mut [T]) -> Vec<Target<'a, T>> {
        let (heads, kv_heads) = (self.op.0.heads, self.op.0.kv_heads);
        let mut targets: Vec<Target<'a, T>> = (0..kv_heads)
            .map(|kv_head| Target {
                sequence,
                kv_head,
                queries: Vec::with_capacity(self.op.0.seq_len * heads / kv_heads),
                keys: Vec::with_capacity(self.op.0.seq_len),
                values: Vec::with_capacity(self.op.0.seq_len),
            })
            .collect();
        for row in rows.chunks_exact_mut(self.width()) {
            for (head, columns) in row.chunks_exact_mut(self.op.0.head_dim).enumerate() {
                if head < heads {
                    targets[head * kv_heads / heads].queries.push(columns);
                } else if head < heads + kv_heads {
                    targets[head - heads].keys.push(columns);
                } else {
                    targets[head - heads - kv_heads].values.push(columns);
                }
            }
        }
        targets
    }

    /// A key/value head of a sequence.
    fn head(&self, scratch: &mut Scratch<T>, target: Target<'_, T>) {
        let Target { sequence, kv_head, mut queries, keys, values } = target;
        let Attention { seq_len: s, heads, kv_heads, head_dim: e } = self.op.0;
        let of_head = |head: usize| &self.qkv[sequence * s * self.width() + head * e..];
        transpose(of_head(heads + kv_head), self.width(), s, e, &mut scratch.keys_t);
        transpose(of_head(heads + kv_heads + kv_head), self.width(), s, e, &mut scratch.values_t);
        scratch.dk.fill(T::ZERO);
        scratch.dv.fill(T::ZERO);
        let group = heads / kv_heads;
        for member in 0..group {
            self.query_head(scratch, sequence, kv_head * group + member);
            write(queries.iter_mut().skip(member).step_by(group), &scratch.dq, e);
        }
        write(keys, &scratch.dk, e);
        write(values, &scratch.dv, e);
    }

    /// One query head: assigns `dq`, adds to `dk` and `dv`.
    fn query_head(&self, scratch: &mut Scratch<T>, sequence: usize, head: usize) {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e } = self.op.0;
        let (width, out_width) = (self.width(), heads * e);
        let qkv = &self.qkv[sequence * s * width..][..s * width];
        let (d_o, o) = (&self.d_o[sequence * s * out_width..], &self.o[sequence * s * out_width..]);
        let data = QueryHead {
            sequence,
            queries: &qkv[head * e..],
            keys: &qkv[(heads + head * kv_heads / heads) * e..],
            d_o: &d_o[head * e..],
            lse: &self.lse[(sequence * heads + head) * s..][..s],
        };
        row_products(&d_o[head * e..], &o[head * e..], out_width, e, &mut scratch.delta);
        scratch.dq.fill(T::ZERO);
        for tile in (0..s).step_by(TILE) {
            for first in (tile..s).step_by(ROWS) {
                let queries = first..(first + ROWS).min(s);
                let start = self.documents.first_of_block(sequence, first, queries.len()).max(tile);
                let end = queries.end.min(tile + TILE);
                if start < end {
                    self.block(scratch, &data, queries, start..end);
                }
            }
        }
    }

    /// What a block of queries and the keys of a tile that it sees add to `dq`, `dk` and `dv`.
    fn block(
        &self,
        scratch: &mut Scratch<T>,
        head: &QueryHead<'_, T>,
        queries: Range<usize>,
        keys: Range<usize>,
    ) {
        let Attention { seq_len: s, heads, head_dim: e, .. } = self.op.0;
        let (width, out_width) = (self.width(), heads * e);
        let (m, n, first) = (queries.len(), keys.len(), queries.start);
        let (p, ds) = (&mut scratch.p[..m * n], &mut scratch.ds[..m * n]);
        let q = Mat::strided(&head.queries[first * width..], m, e, width);
        let k = Mat::strided(&head.keys[keys.start * width..], n, e, width);
        let d_o = Mat::strided(&head.d_o[first * out_width..], m, e, out_width);
        let keys_t = Mat::strided(&scratch.keys_t[keys.start..], e, n, s);
        let values_t = Mat::strided(&scratch.values_t[keys.start..], e, n, s);
        gemm_single(scale(e), q, keys_t, MatMut::new(p, m, n), false);
        gemm_single(T::ONE, d_o, values_t, MatMut::new(ds, m, n), false);
        let (lse, delta) = (&head.lse[first..], &scratch.delta[first..]);
        match self.rounding {
            Rounding::None => scores_grad(p, ds, n, lse, delta, exact),
            Rounding::Bf16 => scores_grad(p, ds, n, lse, delta, round_bf16),
        }
        for (t, (p, ds)) in queries.zip(p.chunks_exact_mut(n).zip(ds.chunks_exact_mut(n))) {
            let start = self.documents.first_of(head.sequence, t).clamp(keys.start, keys.end) - keys.start;
            let end = (t + 1).min(keys.end) - keys.start;
            for row in [p, ds] {
                row[..start].fill(T::ZERO);
                row[end..].fill(T::ZERO);
            }
        }
        let (p, ds) = (Mat::new(p, m, n), Mat::new(ds, m, n));
        let dq = MatMut::new(&mut scratch.dq[first * e..], m, e);
        let dk = MatMut::new(&mut scratch.dk[keys.start * e..], n, e);
        let dv = MatMut::new(&mut scratch.dv[keys.start * e..], n, e);
        gemm_single(scale(e), ds, k, dq, true);
        gemm_single(scale(e), ds.t(), q, dk, true);
        gemm_single(T::ONE, p.t(), d_o, dv, true);
    }
}

/// Copies rows of e elements.
fn write<T: Real>(to: impl IntoIterator<Item = impl AsMut<[T]>>, from: &[T], e: usize) {
    for (mut to, from) in to.into_iter().zip(from.chunks_exact(e)) {
        to.as_mut().copy_from_slice(from);
    }
}

/// A query head of a sequence: its operands from their first element on.
struct QueryHead<'a, T> {
    sequence: usize,
    queries: &'a [T],
    keys: &'a [T],
    d_o: &'a [T],
    lse: &'a [T],
}

/// The products of the rows of `a` and `b`: e elements each, `stride` apart.
fn row_products<T: Real>(a: &[T], b: &[T], stride: usize, e: usize, products: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for (row, product) in products.iter_mut().enumerate() {
                let (a, b) = (&a[row * stride..][..e], &b[row * stride..][..e]);
                *product = sum(e, |i| a[i] * b[i]);
            }
        },
    );
}

/// Turns rows of n scores and of dp into the probabilities and ds (not yet divided by sqrt(e)), both rounded.
fn scores_grad<T: Real>(p: &mut [T], ds: &mut [T], n: usize, lse: &[T], delta: &[T], round: impl Fn(T) -> T) {
    vectorized(
        #[inline(always)]
        || {
            let rows = p.chunks_exact_mut(n).zip(ds.chunks_exact_mut(n));
            for (((p, ds), lse), delta) in rows.zip(lse).zip(delta) {
                for (p, ds) in p.iter_mut().zip(ds) {
                    let probability = exp(*p - *lse);
                    *ds = round(probability * (*ds - *delta));
                    *p = round(probability);
                }
            }
        },
    );
}
