//! CPU kernel of [`AttentionGrad`]: one task a key/value head of a sequence, with the query heads of its group.
//!
//! A task walks over tiles of keys, and for each over the blocks of queries that see it, so that a tile's keys, values and their
//! gradients stay in cache.

use super::AttentionGrad;
use super::block::{Rounding, round_bf16, scale, transpose};
use super::cpu::{Documents, block_rows};
use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{exp, sum, vectorized};
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, Real, View, ViewMut, with_real};

/// Keys of a tile.
const TILE: usize = 256;

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
    keys: Vec<&'a mut [T]>,
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
        let tile = block_rows(s) * TILE.min(s);
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
    fn head(&self, scratch: &mut Scratch<T>, mut target: Target<'_, T>) {
        let Target { sequence, kv_head, .. } = target;
        let (s, e, group) = (self.op.0.seq_len, self.op.0.head_dim, self.op.0.heads / self.op.0.kv_heads);
        let of = |column: usize| &self.qkv[sequence * s * self.width() + column * e..];
        let (keys, values) =
            (of(self.op.0.heads + kv_head), of(self.op.0.heads + self.op.0.kv_heads + kv_head));
        transpose(keys, self.width(), s, e, &mut scratch.keys_t);
        transpose(values, self.width(), s, e, &mut scratch.values_t);
        scratch.dk.fill(T::ZERO);
        scratch.dv.fill(T::ZERO);
        for member in 0..group {
            self.query_head(scratch, sequence, kv_head * group + member);
            for (to, from) in target.queries.iter_mut().skip(member).step_by(group).zip(scratch.dq.chunks_exact(e)) {
                to.copy_from_slice(from);
            }
        }
        for (to, from) in target.keys.iter_mut().zip(scratch.dk.chunks_exact(e)) {
            to.copy_from_slice(from);
        }
        for (to, from) in target.values.iter_mut().zip(scratch.dv.chunks_exact(e)) {
            to.copy_from_slice(from);
        }
    }

    /// One query head: assigns `dq`, adds to `dk` and `dv`.
    fn query_head(&self, scratch: &mut Scratch<T>, sequence: usize, head: usize) {
        let (s, e, width) = (self.op.0.seq_len, self.op.0.head_dim, self.width());
        let (heads, kv_heads) = (self.op.0.heads, self.op.0.kv_heads);
        let out_width = heads * e;
        let qkv = &self.qkv[sequence * s * width..][..s * width];
        let keys = &qkv[(heads + head * kv_heads / heads) * e..];
        let queries = &qkv[head * e..];
        let d_o = &self.d_o[sequence * s * out_width + head * e..];
        let o = &self.o[sequence * s * out_width + head * e..];
        let lse = &self.lse[(sequence * heads + head) * s..][..s];
        for (t, delta) in scratch.delta.iter_mut().enumerate() {
            let (d_o, o) = (&d_o[t * out_width..][..e], &o[t * out_width..][..e]);
            *delta = sum(e, |i| d_o[i] * o[i]);
        }
        scratch.dq.fill(T::ZERO);
        let rows = block_rows(s);
        for tile in (0..s).step_by(TILE) {
            for first in (tile / rows * rows..s).step_by(rows) {
                let m = rows.min(s - first);
                let start = self.documents.first_of_block(sequence, first, m).max(tile);
                let end = (first + m).min(tile + TILE).min(s);
                if start >= end {
                    continue;
                }
                let n = end - start;
                let (p, ds) = (&mut scratch.p[..m * n], &mut scratch.ds[..m * n]);
                let q = Mat::strided(&queries[first * width..], m, e, width);
                let d_o = Mat::strided(&d_o[first * out_width..], m, e, out_width);
                let keys_t = Mat::strided(&scratch.keys_t[start..], e, n, s);
                let values_t = Mat::strided(&scratch.values_t[start..], e, n, s);
                gemm_single(scale(e), q, keys_t, MatMut::new(p, m, n), false);
                gemm_single(T::ONE, d_o, values_t, MatMut::new(ds, m, n), false);
                for (i, (p, ds)) in p.chunks_exact_mut(n).zip(ds.chunks_exact_mut(n)).enumerate() {
                    let t = first + i;
                    let unseen_before = self.documents.first_of(sequence, t).clamp(start, end) - start;
                    let unseen_after = (t + 1).clamp(start, end) - start;
                    match self.rounding {
                        Rounding::None => row_grad(p, ds, lse[t], scratch.delta[t], #[inline(always)] |x| x),
                        Rounding::Bf16 => row_grad(p, ds, lse[t], scratch.delta[t], round_bf16),
                    }
                    for row in [p, ds] {
                        row[..unseen_before].fill(T::ZERO);
                        row[unseen_after..].fill(T::ZERO);
                    }
                }
                let (p, ds) = (Mat::new(p, m, n), Mat::new(ds, m, n));
                let dv = MatMut::new(&mut scratch.dv[start * e..], n, e);
                gemm_single(T::ONE, p.t(), d_o, dv, true);
                let dk = MatMut::new(&mut scratch.dk[start * e..], n, e);
                gemm_single(scale(e), ds.t(), q, dk, true);
                let dq = MatMut::new(&mut scratch.dq[first * e..], m, e);
                gemm_single(scale(e), ds, Mat::strided(&keys[start * width..], n, e, width), dq, true);
            }
        }
    }
}

/// Turns a row of scores and of dp into the probabilities and ds (not yet divided by sqrt(e)), both rounded.
fn row_grad<T: Real>(p: &mut [T], ds: &mut [T], lse: T, delta: T, round: impl Fn(T) -> T) {
    vectorized(
        #[inline(always)]
        || {
            for (p, ds) in p.iter_mut().zip(ds) {
                let probability = exp(*p - lse);
                *ds = round(probability * (*ds - delta));
                *p = round(probability);
            }
        },
    );
}
