//! The tail of a ragged tensor ([`crate::dispatch`]): the tiles of 128 rows after the one in which the last
//! group ends. The first tile is never in the tail.
//!
//! So a row is in the tail with all rows of its tile, which casts and their scales are made of, and a cast
//! with one scale for the tensor always has rows, also if no expert has a token.

use xtrain_cuda::{CudaTensor, DevicePtr, Header};
use xtrain_program::{Cost, Tail};
use xtrain_tensor::{TILE, TensorType, View, ViewMut};

/// Device code that finds the tail.
pub(crate) const TAIL: Header = Header::new("tail.cuh", include_str!("tail.cuh"))
    .with_constants(&[&[("TAIL_TILE", TILE as i64), ("TAIL_SOURCE", TAIL_SOURCE as i64)]]);

/// The source of a row without a copy of a token.
pub(crate) const NO_SOURCE: i32 = -1;
/// The source of a row in the tail.
pub(crate) const TAIL_SOURCE: i32 = -2;

/// The first row of the tail, if the last group ends before row `end`.
pub(crate) fn first_row(end: usize) -> usize {
    end.max(1).next_multiple_of(TILE)
}

/// Rows that an op with this tail writes, of a tensor with `rows` rows whose groups have these `starts`.
pub(crate) fn written_rows(tail: Tail, starts: View<'_>, rows: usize) -> usize {
    let end = starts.ints().last().map_or(0, |end| *end as usize);
    if tail.is_undefined() { first_row(end).min(rows) } else { rows }
}

/// The first row of the tail, from the sources of rows.
pub(crate) fn written_sources(sources: View<'_>) -> usize {
    sources.ints().partition_point(|source| *source != TAIL_SOURCE)
}

/// The first rows of a type.
fn head(ty: TensorType, rows: usize) -> TensorType {
    match *ty.shape {
        [_] => TensorType::new(ty.dtype, [rows]),
        _ => TensorType::new(ty.dtype, [rows, ty.shape.rows_cols().1]),
    }
}

/// Runs a kernel that computes row by row in the rows that its op writes. All operands are ragged, but for
/// the input `starts`, which is there if the tail is undefined.
pub(crate) fn by_written_rows(
    tail: Tail,
    starts: usize,
    inputs: &[View<'_>],
    outputs: &mut [ViewMut<'_>],
    kernel: impl FnOnce(&[View<'_>], &mut [ViewMut<'_>]),
) {
    if !tail.is_undefined() {
        return kernel(inputs, outputs);
    }
    let rows = written_rows(tail, inputs[starts], outputs[0].ty.shape[0]);
    let mut written_inputs = inputs.to_vec();
    for view in written_inputs.iter_mut().enumerate().filter_map(|(n, view)| (n != starts).then_some(view)) {
        let (ty, bytes) = (head(view.ty, rows), view.bytes());
        // An input that is in an output has no bytes.
        *view = if bytes.is_empty() { View::in_output(ty) } else { View::new(ty, &bytes[..ty.bytes()]) };
    }
    let mut written = Vec::with_capacity(outputs.len());
    for view in outputs.iter_mut() {
        let ty = head(view.ty, rows);
        written.push(ViewMut::new(ty, &mut view.bytes()[..ty.bytes()], false));
    }
    kernel(&written_inputs, &mut written);
    outputs.iter_mut().for_each(|output| fill(output, 0, rows));
}

/// Fills a tensor with NaNs from an index of its rows (axis 0) or of its columns (axis 1) on: nothing may
/// depend on an undefined tail.
pub(crate) fn fill(tensor: &mut ViewMut<'_>, axis: usize, first: usize) {
    let dtype = tensor.ty.dtype;
    let cols = if tensor.ty.shape.len() == 1 { 1 } else { tensor.ty.shape.rows_cols().1 };
    let [row_bytes, from] = match axis {
        0 => [tensor.ty.bytes(), dtype.bytes(first * cols)],
        _ => [dtype.bytes(cols), dtype.bytes(first)],
    };
    let from = from.min(row_bytes);
    tensor.bytes().chunks_exact_mut(row_bytes.max(1)).for_each(|row| row[from..].fill(0xFF));
}

/// The place of the end of the last group for the device code, if the tail is undefined; null otherwise.
pub(crate) fn end_of_groups(tail: Tail, starts: Option<&CudaTensor>) -> DevicePtr {
    match starts {
        Some(starts) if tail.is_undefined() => starts.place.offset(starts.ty.bytes() - size_of::<i32>()),
        _ => DevicePtr(0),
    }
}

/// Bytes that an op reads or writes of a ragged tensor of so many rows.
pub(crate) fn bytes(ty: TensorType, rows: usize, tail: Tail) -> f64 {
    ty.bytes() as f64 * share(rows, tail)
}

/// The cost of an op whose operands are all ragged tensors of so many rows.
pub(crate) fn cost(mut cost: Cost, rows: usize, tail: Tail) -> Cost {
    cost.kernels.iter_mut().for_each(|kernel| kernel.bytes *= share(rows, tail));
    cost
}

/// The share of rows that are not expected in the tail.
fn share(rows: usize, tail: Tail) -> f64 {
    match tail {
        Tail::Zeros => 1.0,
        Tail::Undefined { live_rows } => live_rows.min(rows) as f64 / rows.max(1) as f64,
    }
}
