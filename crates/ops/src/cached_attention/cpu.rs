//! CPU kernel of [`CachedAttention`]: rows are written as they are stored, then one task a query head of a sequence.

use super::CachedAttention;
use crate::attention::block::{Block, ROWS, Rounding};
use crate::host::gemm::Mat;
use rayon::prelude::*;
use std::borrow::Cow;
use std::ops::Range;
use xtrain_tensor::{CpuKernel, Real, TensorType, View, ViewMut, with_real};

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
        let rounding = Rounding::of(inputs[0].ty.dtype);
        with_real!(inputs[0].ty.dtype, T => {
            let queries = inputs[0].reals::<T>();
            let (keys, values) = (rows_in_use::<T>(k_cache, positions), rows_in_use::<T>(v_cache, positions));
            let attend = Attend { op: self, positions, queries: &queries, keys: &keys, values: &values, rounding };
            attend.run(new, &mut o.reals::<T>());
        });
    }
}

impl CachedAttention {
    /// Copies the columns from head `first` on, as many as the cache has, to the cache's rows.
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

/// By sequence, its cache's rows up to the last position that is asked for.
fn rows_in_use<'a, T: Real>(cache: &'a mut ViewMut<'_>, positions: &[i32]) -> Vec<Cow<'a, [T]>> {
    let [sequences, capacity, width] = *cache.ty.shape else { unreachable!("infer checked the rank") };
    let (dtype, row_bytes) = (cache.ty.dtype, cache.ty.dtype.bytes(width));
    let bytes: &'a [u8] = cache.bytes();
    let tokens = positions.len() / sequences;
    let by_sequence = positions.par_chunks_exact(tokens).zip(bytes.par_chunks_exact(capacity * row_bytes));
    by_sequence
        .map(|(positions, bytes)| {
            let rows = positions.iter().max().map_or(0, |&p| p as usize + 1);
            View::new(TensorType::new(dtype, [rows, width]), &bytes[..rows * row_bytes]).reals()
        })
        .collect()
}

struct Attend<'a, T: Real> {
    op: &'a CachedAttention,
    positions: &'a [i32],
    queries: &'a [T],
    keys: &'a [Cow<'a, [T]>],
    values: &'a [Cow<'a, [T]>],
    rounding: Rounding,
}

impl<T: Real> Attend<'_, T> {
    fn run(&self, new_tokens: usize, o: &mut [T]) {
        let CachedAttention { heads, head_dim: e, .. } = *self.op;
        // What each task writes: e columns of every token of its sequence.
        let mut targets: Vec<Vec<&mut [T]>> = Vec::new();
        targets.resize_with(self.keys.len() * heads, || Vec::with_capacity(new_tokens));
        for (i, columns) in o.chunks_exact_mut(e).enumerate() {
            targets[i / heads / new_tokens * heads + i % heads].push(columns);
        }
        targets.into_par_iter().enumerate().for_each(|(task, mut target)| {
            self.head(task / heads, task % heads, &mut target);
        });
    }

    /// A query head of a sequence.
    fn head(&self, sequence: usize, head: usize, target: &mut [&mut [T]]) {
        let CachedAttention { heads, kv_heads, head_dim: e } = *self.op;
        let (width, cache_width) = ((heads + 2 * kv_heads) * e, kv_heads * e);
        let first_token = sequence * target.len();
        let positions = &self.positions[first_token..][..target.len()];
        let column = head * kv_heads / heads * e;
        let (keys, values) = (&self.keys[sequence][column..], &self.values[sequence][column..]);
        let mut scores = vec![T::ZERO; ROWS.min(positions.len()) * self.keys[sequence].len() / cache_width];
        let (mut out, mut lse) = (vec![T::ZERO; ROWS * e], [T::ZERO; ROWS]);
        for run in runs(positions) {
            let (m, first) = (run.len(), positions[run.start] as usize);
            let n = first + m;
            let block = Block {
                queries: Mat::strided(
                    &self.queries[(first_token + run.start) * width + head * e..],
                    m,
                    e,
                    width,
                ),
                keys_t: Mat::strided(keys, n, e, cache_width).t(),
                values: Mat::strided(values, n, e, cache_width),
                rounding: self.rounding,
            };
            block.attend(|i| 0..first + i + 1, &mut scores, &mut out, e, &mut lse);
            for (to, from) in target[run].iter_mut().zip(out.chunks_exact(e)) {
                to.copy_from_slice(from);
            }
        }
    }
}

/// Cuts tokens into runs of consecutive positions, none longer than a block. The rows up to a run's last position are then
/// all written, by earlier tokens or by the run itself: a product over them meets nothing else.
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
