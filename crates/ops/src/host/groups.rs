//! Loops over the experts of a ragged tensor ([`crate::dispatch`]), several at a time.

use super::matmul::Addend;
use crate::tail::{self, written_rows};
use rayon::prelude::*;
use std::ops::Range;
use xtrain_program::Tail;
use xtrain_tensor::{TensorType, View, ViewMut};

/// Runs `f(rows, dw of the expert, addend)` for each expert; when accumulating, skips experts without rows.
pub(crate) fn for_each_gradient(
    starts: &[i32],
    dw: &mut ViewMut<'_>,
    f: impl Fn(Range<usize>, &mut ViewMut<'_>, Addend<'_>) + Sync,
) {
    let numbers = dw.ty.numel() / (starts.len() - 1);
    let groups: Vec<_> = groups(starts).zip(dw.chunks(numbers.max(1))).collect();
    groups.into_par_iter().for_each(|(rows, mut dw_oi)| {
        let addend = if dw_oi.accumulate { Addend::Previous } else { Addend::None };
        if !rows.is_empty() || !dw_oi.accumulate {
            f(rows, &mut dw_oi, addend);
        }
    });
}

/// Runs `f(expert, rows, their part of y)` for each expert with rows, and writes zeros after the last group,
/// up to a tail that is undefined.
pub(crate) fn for_each_group(
    starts: View<'_>,
    y: &mut ViewMut<'_>,
    tail: Tail,
    f: impl Fn(usize, Range<usize>, &mut ViewMut<'_>) + Sync,
) {
    let (dtype, (y_rows, cols)) = (y.ty.dtype, y.ty.shape.rows_cols());
    let written = written_rows(tail, starts, y_rows);
    tail::fill(y, 0, written);
    let starts = starts.ints();
    let mut rest = &mut y.bytes()[..dtype.bytes(written * cols)];
    let mut parts = Vec::with_capacity(starts.len() - 1);
    for (e, rows) in groups(starts).enumerate().filter(|(_, rows)| !rows.is_empty()) {
        let (part, after) = rest.split_at_mut(dtype.bytes(rows.len() * cols));
        parts.push((e, rows, part));
        rest = after;
    }
    rest.fill(0);
    parts.into_par_iter().for_each(|(e, rows, part)| {
        let ty = TensorType::new(dtype, [rows.len(), cols]);
        f(e, rows, &mut ViewMut::new(ty, part, false));
    });
}

/// The rows of each expert.
fn groups(starts: &[i32]) -> impl Iterator<Item = Range<usize>> {
    starts.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
}
