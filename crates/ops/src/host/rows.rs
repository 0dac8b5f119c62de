//! Loops over rows on all cores, cut by shape alone.

use rayon::prelude::*;
use xtrain_tensor::Real;

/// Elements below which a loop stays on one thread.
const SERIAL_BELOW: usize = 16 * 1024;

/// How many rows of `cols` elements make a task worth a thread's while.
fn rows_per_task(cols: usize) -> usize {
    (SERIAL_BELOW / 2).div_ceil(cols.max(1)).max(1)
}

/// Runs `f(first row, rows)` over blocks of rows of `out`, in parallel; `cols` elements a row.
pub(crate) fn for_row_blocks<T: Real>(out: &mut [T], cols: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let block = rows_per_task(cols);
    if out.len() <= SERIAL_BELOW {
        return out.chunks_mut(block * cols).enumerate().for_each(|(i, rows)| f(i * block, rows));
    }
    out.par_chunks_mut(block * cols).enumerate().for_each(|(i, rows)| f(i * block, rows));
}

/// The same over two outputs that have as many rows.
pub(crate) fn for_row_blocks2<T: Real>(
    a: &mut [T],
    a_cols: usize,
    b: &mut [T],
    b_cols: usize,
    f: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) {
    let block = rows_per_task(a_cols.max(b_cols));
    if a.len().max(b.len()) <= SERIAL_BELOW {
        let pairs = a.chunks_mut(block * a_cols).zip(b.chunks_mut(block * b_cols));
        return pairs.enumerate().for_each(|(i, (a, b))| f(i * block, a, b));
    }
    let pairs = a.par_chunks_mut(block * a_cols).zip(b.par_chunks_mut(block * b_cols));
    pairs.enumerate().for_each(|(i, (a, b))| f(i * block, a, b));
}

/// Sums over rows: `f(row, partial)` adds a row's contribution to a partial sum of `width` elements. Rows are cut into blocks of
/// fixed size whose partial sums are added in order, so the result does not depend on the number of threads.
pub(crate) fn sum_over_rows<T: Real>(
    rows: usize,
    width: usize,
    f: impl Fn(usize, &mut [T]) + Sync,
) -> Vec<T> {
    let block = 64;
    let partials: Vec<Vec<T>> = (0..rows.div_ceil(block))
        .into_par_iter()
        .map(|b| {
            let mut partial = vec![T::ZERO; width];
            (b * block..rows.min((b + 1) * block)).for_each(|row| f(row, &mut partial));
            partial
        })
        .collect();
    let mut total = vec![T::ZERO; width];
    for partial in &partials {
        add_into(&mut total, partial);
    }
    total
}

/// `to += from`.
pub(crate) fn add_into<T: Real>(to: &mut [T], from: &[T]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += *f;
    }
}

/// Writes `from` to `to`, or adds it.
pub(crate) fn store<T: Real>(to: &mut [T], from: &[T], accumulate: bool) {
    match accumulate {
        true => add_into(to, from),
        false => to.copy_from_slice(from),
    }
}
