//! CPU kernel of [`CachedAttention`]: copies the new rows to the caches, then runs one task for each query
//! head of a sequence.

use super::CachedAttention;
use crate::attention::block::{Block, ROWS, factor};
use crate::attention::columns::Columns;
use crate::host::gemv::{ROWS_AT_ONCE, dots};
use crate::host::math::{Rounding, dot, exponentials, max, vectorized};
use crate::host::rows::store_rows;
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, Pooled, Real, Stored, TensorType, View, ViewMut, with_stored};

/// Maximum length of a run of queries that is computed one query at a time from the stored cache. For longer
/// runs, widening the cache and GEMMs of blocks are faster.
const MAX_SINGLE_QUERIES: usize = 4;

/// Number of multiplications of queries with keys below which all heads are computed on the calling thread.
const SERIAL_BELOW: usize = 16 * 1024;

impl CpuKernel for CachedAttention {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [o, k_cache, v_cache] = outputs else { unreachable!("three outputs") };
        let (sequences, capacity) = (k_cache.ty.shape[0], k_cache.ty.shape[1]);
        let positions = inputs[1].ints();
        for (token, p) in positions.iter().enumerate() {
            assert!(
                (0..capacity as i64).contains(&(*p).into()),
                "position {p} of token {token} is outside the cache, which has {capacity} rows"
            );
        }
        let new = positions.len() / sequences;
        self.write(inputs[0], self.heads, positions, new, k_cache);
        self.write(inputs[0], self.heads + self.kv_heads, positions, new, v_cache);
        let (queries, keys, values) = (inputs[0], k_cache.view(), v_cache.view());
        let attend = Attend { op: self, positions, new, capacity, queries, keys, values };
        with_stored!(o.ty.dtype, S => attend.run::<S>(o));
    }

    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let (tokens, capacity, dtype) = (inputs[1].numel(), inputs[2].shape[1], inputs[2].dtype);
        let new = tokens / inputs[2].shape[0];
        dtype.compute().bytes(threads * (2 * new * self.head_dim + capacity * (2 * self.head_dim + ROWS)))
    }
}

impl CachedAttention {
    /// Copies the columns of qkv from head `first` on to the rows of `cache`.
    fn write(
        &self,
        qkv: View<'_>,
        first: usize,
        positions: &[i32],
        new_tokens: usize,
        cache: &mut ViewMut<'_>,
    ) {
        let (dtype, capacity, width) = (cache.ty.dtype, cache.ty.shape[1], cache.ty.shape[2]);
        let row_bytes = dtype.bytes(width);
        let token_bytes = dtype.bytes((self.heads + 2 * self.kv_heads) * self.head_dim);
        for (token, &position) in positions.iter().enumerate() {
            let from = &qkv.bytes()[token * token_bytes + dtype.bytes(first * self.head_dim)..];
            let row = token / new_tokens * capacity + position as usize;
            cache.bytes()[row * row_bytes..][..row_bytes].copy_from_slice(&from[..row_bytes]);
        }
    }
}

/// The operands of the kernel.
struct Attend<'a> {
    op: &'a CachedAttention,
    positions: &'a [i32],
    /// Number of new tokens of each sequence.
    new: usize,
    capacity: usize,
    queries: View<'a>,
    keys: View<'a>,
    values: View<'a>,
}

impl Attend<'_> {
    fn run<S: Stored>(&self, o: &mut ViewMut<'_>) {
        let CachedAttention { heads, head_dim: e, .. } = *self.op;
        // For each task, the bytes that it writes: e columns of each token of its sequence.
        let mut targets: Vec<Vec<&mut [u8]>> = Vec::new();
        targets.resize_with(self.positions.len() / self.new.max(1) * heads, || Vec::with_capacity(self.new));
        let dtype = o.ty.dtype;
        for (i, columns) in o.bytes().chunks_exact_mut(dtype.bytes(e)).enumerate() {
            targets[i / heads / self.new * heads + i % heads].push(columns);
        }
        let task = |(task, target): (usize, Vec<&mut [u8]>)| {
            self.head::<S>(task / heads, task % heads, target);
        };
        let products: usize = self.positions.iter().map(|&p| heads * (p as usize + 1)).sum();
        match products * e < SERIAL_BELOW {
            true => targets.into_iter().enumerate().for_each(task),
            false => targets.into_par_iter().enumerate().for_each(task),
        }
    }

    /// Computes a query head of a sequence.
    fn head<S: Stored>(&self, sequence: usize, head: usize, target: Vec<&mut [u8]>) {
        let CachedAttention { heads, kv_heads, head_dim: e, .. } = *self.op;
        let tokens = sequence * self.new..(sequence + 1) * self.new;
        let positions = &self.positions[tokens.clone()];
        let queries = Columns::<S::Real>::new(self.queries, tokens, head * e..(head + 1) * e);
        let column = head * kv_heads / heads * e;
        let cache = Cache {
            rows: sequence * self.capacity..(sequence + 1) * self.capacity,
            columns: column..column + e,
            width: kv_heads * e,
        };
        let mut out = Pooled::take(self.new * e);
        for run in runs(positions) {
            let n = positions[run.end - 1] as usize + 1;
            let out = &mut out[run.start * e..run.end * e];
            match run.len() <= MAX_SINGLE_QUERIES {
                true => self.one_by_one::<S>(&queries, run, &cache, n, out),
                false => self.block::<S>(&queries, run, &cache, n, out),
            }
        }
        store_rows::<S>(&out, e, target);
    }

    /// Computes a run of queries as a block. The last query sees n keys.
    fn block<S: Stored>(
        &self,
        queries: &Columns<'_, S::Real>,
        run: Range<usize>,
        cache: &Cache,
        n: usize,
        out: &mut [S::Real],
    ) {
        let (m, e) = (run.len(), self.op.head_dim);
        let rows = cache.rows.start..cache.rows.start + n;
        let keys = Columns::new(self.keys, rows.clone(), cache.columns.clone());
        let values = Columns::new(self.values, rows, cache.columns.clone());
        let block = Block {
            queries: queries.rows(run),
            keys_t: keys.rows(0..n).t(),
            values: values.rows(0..n),
            scale: factor(self.op.scale, e),
            rounding: Rounding::for_operands(S::DTYPE),
        };
        let (mut scores, mut lse) = (Pooled::take(m * n), [S::Real::ZERO; ROWS]);
        block.attend(|i| 0..n - m + i + 1, &mut scores, out, e, &mut lse);
    }

    /// Computes a run of queries one at a time, from the cache in its stored type. The last query sees n
    /// keys.
    fn one_by_one<S: Stored>(
        &self,
        queries: &Columns<'_, S::Real>,
        run: Range<usize>,
        cache: &Cache,
        n: usize,
        out: &mut [S::Real],
    ) {
        let (m, e) = (run.len(), self.op.head_dim);
        let scale = factor(self.op.scale, e);
        let [keys, values] = [self.keys, self.values].map(|cached| {
            let stored = cached.stored::<S>().expect("caches have the queries' type");
            &stored[cache.rows.start * cache.width + cache.columns.start..]
        });
        let mut scores = Pooled::take(n);
        for (i, (query, out)) in run.zip(out.chunks_exact_mut(e)).enumerate() {
            let query = &queries.reals()[query * queries.stride()..][..e];
            let scores = &mut scores[..n - m + i + 1];
            vectorized(
                #[inline(always)]
                || attend(query, scale, keys, values, cache.width, scores, out),
            );
        }
    }
}

/// The part of the caches that a task reads.
struct Cache {
    /// Rows of the sequence.
    rows: Range<usize>,
    /// Columns of the head.
    columns: Range<usize>,
    /// Number of columns of a row.
    width: usize,
}

/// out = softmax(scale query K^T) V over `scores.len()` rows of the caches, which are `width` elements
/// apart.
#[inline(always)]
fn attend<S: Stored>(
    query: &[S::Real],
    scale: S::Real,
    keys: &[S],
    values: &[S],
    width: usize,
    scores: &mut [S::Real],
    out: &mut [S::Real],
) {
    let e = query.len();
    let key = |row: usize| &keys[row * width..][..e];
    let (quads, rest) = scores.as_chunks_mut::<ROWS_AT_ONCE>();
    let first = quads.len() * ROWS_AT_ONCE;
    for (n, scores) in quads.iter_mut().enumerate() {
        *scores = dots(query, std::array::from_fn(|k| key(n * ROWS_AT_ONCE + k))).map(|x| x * scale);
    }
    for (n, score) in rest.iter_mut().enumerate() {
        *score = dot(query, key(first + n)) * scale;
    }
    let max_score = max(scores);
    let sum = exponentials(scores, max_score, Rounding::for_operands(S::DTYPE));
    out.fill(S::Real::ZERO);
    for (p, row) in scores.iter().zip(values.chunks(width)) {
        for (out, value) in out.iter_mut().zip(&row[..e]) {
            *out += *p * value.real();
        }
    }
    let inverse = S::Real::ONE / sum;
    out.iter_mut().for_each(|x| *x *= inverse);
}

/// Runs of tokens with consecutive positions, none longer than a block. All cache rows up to the last
/// position of a run have been written, by earlier tokens or by the run, so a GEMM over them reads no other
/// rows.
fn runs(positions: &[i32]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (i, p) in positions.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if positions[i - 1] + 1 == *p && run.len() < ROWS => run.end = i + 1,
            _ => runs.push(i..i + 1),
        }
    }
    runs
}
