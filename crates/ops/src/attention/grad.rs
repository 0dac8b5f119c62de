//! CPU kernel of [`AttentionGrad`]. A task is one query head of a sequence.
//!
//! A task loops over tiles of keys, and for each over the blocks of queries that see it, so that a tile's
//! keys, values and their gradients stay in cache. The query heads of a group share a key head and a value
//! head: each writes its own sums for them, which are then added in the order of the heads. Several groups
//! are computed at a time: as many as have [`SUM_ELEMENTS`] sums, or, if these are too few, as keep all cores
//! busy.

use super::block::{ROWS, factor};
use super::columns::{Columns, transpose};
use super::cpu::Documents;
use super::{Attention, AttentionGrad};
use crate::host::gemm::{Mat, MatMut, gemm_single};
use crate::host::math::{Rounding, dot, exact, exp, round_bf16, vectorized};
use crate::host::rows::{add_into, store_rows};
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, Pooled, Real, Stored, TensorType, View, ViewMut, with_stored};

/// Keys of a tile: a multiple of [`ROWS`], so that tiles begin at the start of a block of queries.
const TILE: usize = 512;

/// Elements of the sums of the query heads that are computed at a time. With many cores there are more.
const SUM_ELEMENTS: usize = 4 << 20;

impl CpuKernel for AttentionGrad {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        with_stored!(inputs[1].ty.dtype, S => {
            let pass = GradInputs::<S> {
                op: self.0,
                d_o: inputs[0],
                qkv: inputs[1],
                o: inputs[2],
                lse: &inputs[3].reals(),
                documents: Documents { starts: inputs.get(4).map(View::ints), seq_len: self.0.seq_len },
            };
            pass.run(&mut outputs[0]);
        });
    }

    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = self.0;
        let ((tokens, _), dtype) = (inputs[1].shape.rows_cols(), inputs[1].dtype);
        let groups = groups_at_once(&self.0, threads).min(tokens / s * kv_heads);
        let widened = if dtype == dtype.compute() { 0 } else { 4 * s * e };
        let task = 3 * s * e + s + 2 * ROWS * TILE.min(s) + widened;
        let slices = groups * (heads / kv_heads + 2) * s * size_of::<&[u8]>();
        slices + dtype.compute().bytes(groups * (heads / kv_heads) * 2 * s * e + threads * task)
    }
}

/// Number of groups that are computed at a time. It changes no bit, because the sums of each query head start
/// from zero.
fn groups_at_once(op: &Attention, threads: usize) -> usize {
    let heads = (SUM_ELEMENTS / (2 * op.seq_len * op.head_dim)).max(threads);
    heads.div_ceil(op.heads / op.kv_heads)
}

/// The inputs of the kernel.
struct GradInputs<'a, S: Stored> {
    op: Attention,
    d_o: View<'a>,
    qkv: View<'a>,
    o: View<'a>,
    lse: &'a [S::Real],
    documents: Documents<'a>,
}

/// A query head of a sequence, and the bytes of its gradient.
struct QueryHead<'a> {
    sequence: usize,
    head: usize,
    /// For each token, the bytes of e columns of dqkv.
    target: Vec<&'a mut [u8]>,
}

/// The bytes of the gradients of a key/value head of a sequence: for each token, those of e columns of dqkv.
#[derive(Default)]
struct KeyHead<'a> {
    keys: Vec<&'a mut [u8]>,
    values: Vec<&'a mut [u8]>,
}

impl<S: Stored> GradInputs<'_, S> {
    fn run(&self, dqkv: &mut ViewMut<'_>) {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = self.op;
        let (tokens, _) = dqkv.ty.shape.rows_cols();
        let (groups, group) = (tokens / s * kv_heads, heads / kv_heads);
        let at_once = groups_at_once(&self.op, rayon::current_num_threads());
        let mut sums = Pooled::take(at_once.min(groups) * group * 2 * s * e);
        for first in (0..groups).step_by(at_once) {
            let batch = first..groups.min(first + at_once);
            let sums = &mut sums[..batch.len() * group * 2 * s * e];
            let (query_heads, key_heads) = self.targets(batch, dqkv);
            let tasks = query_heads.into_par_iter().zip(sums.par_chunks_exact_mut(2 * s * e));
            tasks.for_each(|(head, sums)| self.query_head(head, sums));
            let tasks = key_heads.into_par_iter().zip(sums.par_chunks_exact_mut(group * 2 * s * e));
            tasks.for_each(|(head, sums)| self.key_head(head, sums));
        }
    }

    /// The bytes of dqkv of these groups, which are counted over the key/value heads of all sequences.
    fn targets<'a>(
        &self,
        groups: Range<usize>,
        dqkv: &'a mut ViewMut<'_>,
    ) -> (Vec<QueryHead<'a>>, Vec<KeyHead<'a>>) {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = self.op;
        let group = heads / kv_heads;
        let query_head =
            |i: usize| QueryHead { sequence: i / heads, head: i % heads, target: Vec::with_capacity(s) };
        let mut query_heads: Vec<_> = (groups.start * group..groups.end * group).map(query_head).collect();
        let mut key_heads: Vec<KeyHead<'a>> = Vec::new();
        key_heads.resize_with(groups.len(), KeyHead::default);
        let (head_bytes, sequences) =
            (dqkv.ty.dtype.bytes(e), groups.start / kv_heads..groups.end.div_ceil(kv_heads));
        let rows = dqkv.bytes().chunks_exact_mut((heads + 2 * kv_heads) * head_bytes).enumerate();
        for (token, row) in rows.take(sequences.end * s).skip(sequences.start * s) {
            for (column, bytes) in row.chunks_exact_mut(head_bytes).enumerate() {
                let kv_head = if column < heads { column / group } else { (column - heads) % kv_heads };
                let index = token / s * kv_heads + kv_head;
                if !groups.contains(&index) {
                    continue;
                }
                let index = index - groups.start;
                match column {
                    c if c < heads => query_heads[index * group + c % group].target.push(bytes),
                    c if c < heads + kv_heads => key_heads[index].keys.push(bytes),
                    _ => key_heads[index].values.push(bytes),
                }
            }
        }
        (query_heads, key_heads)
    }

    /// Adds the sums of the query heads of a group, in order, and writes the gradients of their keys and
    /// values.
    fn key_head(&self, head: KeyHead<'_>, sums: &mut [S::Real]) {
        let Attention { seq_len: s, head_dim: e, .. } = self.op;
        let (first, others) = sums.split_at_mut(2 * s * e);
        others.chunks_exact(first.len()).for_each(|other| add_into(first, other));
        let (dk, dv) = first.split_at(s * e);
        store_rows::<S>(dk, e, head.keys);
        store_rows::<S>(dv, e, head.values);
    }

    /// Writes the gradient of a query head, and its contribution to those of the keys and values to `sums`.
    fn query_head(&self, task: QueryHead<'_>, sums: &mut [S::Real]) {
        let Attention { seq_len: s, heads, kv_heads, head_dim: e, .. } = self.op;
        let QueryHead { sequence, head, target } = task;
        let (kv_head, rows) = (head * kv_heads / heads, sequence * s..(sequence + 1) * s);
        let columns = |x, head: usize| Columns::<S::Real>::new(x, rows.clone(), head * e..(head + 1) * e);
        let data = Operands {
            sequence,
            queries: columns(self.qkv, head),
            keys: columns(self.qkv, heads + kv_head),
            d_o: columns(self.d_o, head),
            lse: &self.lse[(sequence * heads + head) * s..][..s],
        };
        sums.fill(S::Real::ZERO);
        let (dk, dv) = sums.split_at_mut(s * e);
        let tile = ROWS * TILE.min(s);
        let mut work = TaskWorkspace {
            keys_t: Pooled::take(e * s),
            values_t: Pooled::take(e * s),
            delta: Pooled::take(s),
            p: Pooled::take(tile),
            ds: Pooled::take(tile),
            dq: Pooled::zeros(s * e),
            dk,
            dv,
        };
        transpose(&data.keys, &mut work.keys_t);
        transpose(&columns(self.qkv, heads + kv_heads + kv_head), &mut work.values_t);
        row_dots(&data.d_o, &columns(self.o, head), e, &mut work.delta);
        for tile in (0..s).step_by(TILE) {
            for first in (tile..s).step_by(ROWS) {
                let queries = first..(first + ROWS).min(s);
                let start = self.documents.first_key_of_block(sequence, first, queries.len()).max(tile);
                let end = queries.end.min(tile + TILE);
                if start < end {
                    self.block(&mut work, &data, queries, start..end);
                }
            }
        }
        store_rows::<S>(&work.dq, e, target);
    }

    /// Adds the contribution of a block of queries and the keys of a tile that it sees to dq, dk and dv.
    fn block(
        &self,
        work: &mut TaskWorkspace<'_, S::Real>,
        data: &Operands<'_, S::Real>,
        queries: Range<usize>,
        keys: Range<usize>,
    ) {
        let Attention { seq_len: s, head_dim: e, scale, .. } = self.op;
        let scale = factor::<S::Real>(scale, e);
        let (m, n, first) = (queries.len(), keys.len(), queries.start);
        let (p, ds) = (&mut work.p[..m * n], &mut work.ds[..m * n]);
        let (q, d_o) = (data.queries.rows(queries.clone()), data.d_o.rows(queries.clone()));
        let k = data.keys.rows(keys.clone());
        let keys_t = Mat::strided(&work.keys_t[keys.start..], e, n, s);
        let values_t = Mat::strided(&work.values_t[keys.start..], e, n, s);
        gemm_single(scale, q, keys_t, MatMut::new(p, m, n), false);
        gemm_single(S::Real::ONE, d_o, values_t, MatMut::new(ds, m, n), false);
        let (lse, delta) = (&data.lse[first..], &work.delta[first..]);
        match Rounding::for_operands(S::DTYPE) {
            Rounding::None => scores_grad(p, ds, n, lse, delta, exact),
            Rounding::Bf16 => scores_grad(p, ds, n, lse, delta, round_bf16),
        }
        for (t, (p, ds)) in queries.zip(p.chunks_exact_mut(n).zip(ds.chunks_exact_mut(n))) {
            let start = self.documents.first_key(data.sequence, t).clamp(keys.start, keys.end) - keys.start;
            let end = (t + 1).min(keys.end) - keys.start;
            for row in [p, ds] {
                row[..start].fill(S::Real::ZERO);
                row[end..].fill(S::Real::ZERO);
            }
        }
        let (p, ds) = (Mat::new(p, m, n), Mat::new(ds, m, n));
        let dq = MatMut::new(&mut work.dq[first * e..], m, e);
        let dk = MatMut::new(&mut work.dk[keys.start * e..], n, e);
        let dv = MatMut::new(&mut work.dv[keys.start * e..], n, e);
        gemm_single(scale, ds, k, dq, true);
        gemm_single(scale, ds.t(), q, dk, true);
        gemm_single(S::Real::ONE, p.t(), d_o, dv, true);
    }
}

/// Operands of a query head: all tokens of its sequence.
struct Operands<'a, T: Real> {
    sequence: usize,
    queries: Columns<'a, T>,
    keys: Columns<'a, T>,
    d_o: Columns<'a, T>,
    lse: &'a [T],
}

/// Workspace of a task.
struct TaskWorkspace<'a, T: Real> {
    keys_t: Pooled<T>,
    values_t: Pooled<T>,
    delta: Pooled<T>,
    p: Pooled<T>,
    ds: Pooled<T>,
    dq: Pooled<T>,
    dk: &'a mut [T],
    dv: &'a mut [T],
}

/// Dot products of the rows of `a` and `b`, of e elements each.
fn row_dots<T: Real>(a: &Columns<'_, T>, b: &Columns<'_, T>, e: usize, dots: &mut [T]) {
    vectorized(
        #[inline(always)]
        || {
            for (row, sum) in dots.iter_mut().enumerate() {
                *sum = dot(&a.reals()[row * a.stride()..][..e], &b.reals()[row * b.stride()..][..e]);
            }
        },
    );
}

/// Replaces rows of n scores in `p` by probabilities and rows of dp in `ds` by ds, not yet divided by
/// sqrt(e); both are rounded.
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
