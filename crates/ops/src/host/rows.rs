//! Parallel loops over rows, split by shape alone.
//!
//! A task gets its part of each output and opens the same rows of the inputs. bf16 is widened and rounded one
//! task at a time, in a core's cache.

use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{DType, Pooled, Real, Stored, ViewMut, vectorized};

/// Number of elements up to which a loop runs on the calling thread.
pub(crate) const SERIAL_BELOW: usize = 16 * 1024;

/// Rows of a task in [`sum_over_rows`].
const SUMMED_ROWS: usize = 64;

/// Rows of `cols` elements in a task: enough to outweigh the cost of starting one.
pub(crate) fn rows_per_task(cols: usize) -> usize {
    (SERIAL_BELOW / 2).div_ceil(cols.max(1)).max(1)
}

/// Runs `f(rows, parts of the outputs)` over blocks of rows. Each of `outputs` has `rows` rows.
pub(crate) fn for_row_blocks<const N: usize>(
    rows: usize,
    outputs: [&mut ViewMut<'_>; N],
    f: impl Fn(Range<usize>, [ViewMut<'_>; N]) + Sync,
) {
    let elements = outputs.iter().map(|o| o.ty.numel()).max().unwrap_or(0);
    let blocks = cut(rows, rows_per_task(elements / rows.max(1)), outputs);
    match elements <= SERIAL_BELOW {
        true => blocks.into_iter().for_each(|(rows, outputs)| f(rows, outputs)),
        false => blocks.into_par_iter().for_each(|(rows, outputs)| f(rows, outputs)),
    }
}

/// A sum over rows of `width` elements, computed together with outputs.
///
/// `f(rows, parts of the outputs, partial)` writes its part of the outputs and adds a block of rows to its
/// partial sum. Blocks have a fixed size, and their partial sums are added in order.
pub(crate) fn sum_over_rows<T: Real, const N: usize>(
    rows: usize,
    width: usize,
    outputs: [&mut ViewMut<'_>; N],
    f: impl Fn(Range<usize>, [ViewMut<'_>; N], &mut [T]) + Sync,
) -> Pooled<T> {
    let blocks = cut(rows, SUMMED_ROWS, outputs);
    let mut total = Pooled::zeros(width);
    if width == 0 {
        return total;
    }
    let mut partials = Pooled::zeros(blocks.len() * width);
    let tasks: Vec<_> = blocks.into_iter().zip(partials.chunks_exact_mut(width)).collect();
    tasks.into_par_iter().for_each(|((rows, outputs), partial)| f(rows, outputs, partial));
    partials.chunks_exact(width).for_each(|partial| add_into(&mut total, partial));
    total
}

/// Bytes of the partial sums of [`sum_over_rows`].
pub(crate) fn sum_bytes(rows: usize, width: usize, dtype: DType) -> usize {
    dtype.compute().bytes(rows.div_ceil(SUMMED_ROWS) * width)
}

/// Blocks of at most `block` rows, with their parts of the outputs.
fn cut<'a, const N: usize>(
    rows: usize,
    block: usize,
    outputs: [&'a mut ViewMut<'_>; N],
) -> Vec<(Range<usize>, [ViewMut<'a>; N])> {
    let mut parts = outputs.map(|output| {
        let cols = output.ty.numel() / rows.max(1);
        output.chunks(block * cols.max(1))
    });
    let blocks = (0..rows).step_by(block).map(|first| first..rows.min(first + block));
    blocks.map_while(|rows| Some((rows, next_of_each(&mut parts)?))).collect()
}

/// The next item of each iterator, or `None` if one has ended.
fn next_of_each<I: Iterator, const N: usize>(iterators: &mut [I; N]) -> Option<[I::Item; N]> {
    let items: Vec<I::Item> = iterators.iter_mut().map_while(Iterator::next).collect();
    items.try_into().ok()
}

/// Rounds rows of `width` elements into `targets`, the bytes of one row each.
pub(crate) fn store_rows<'a, S: Stored>(
    rows: &[S::Real],
    width: usize,
    targets: impl IntoIterator<Item = &'a mut [u8]>,
) {
    let mut targets = targets.into_iter();
    vectorized(
        #[inline(always)]
        || {
            for (row, target) in rows.chunks_exact(width).zip(&mut targets) {
                let target: &mut [S] = bytemuck::cast_slice_mut(target);
                target.iter_mut().zip(row).for_each(|(t, x)| *t = S::of_real(*x));
            }
        },
    );
}

/// `to += from`.
#[inline(always)]
pub(crate) fn add_into<T: Real>(to: &mut [T], from: &[T]) {
    for (t, f) in to.iter_mut().zip(from) {
        *t += *f;
    }
}
