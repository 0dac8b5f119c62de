//! GEMMs of tensors in their stored type.
//!
//! f32 and f64 matrices are passed to the GEMM library whole. Small bf16 matrices are widened whole. Large
//! ones are multiplied in blocks: a task widens its blocks of both operands, sums in f32, and rounds its
//! block of the result once, so that bf16 needs memory for only a few blocks per thread.
//!
//! All of these sum [`DEPTH`] products at a time, so that an output depends neither on the blocks nor on the
//! number of rows. Only the product of one row with a matrix of weights, a [`gemv`], sums in another order.

use super::gemm::{Mat, MatMut, gemm, gemm_single};
use super::gemv::gemv;
use super::rows::for_row_blocks;
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::{
    DType, Pooled, Real, Reals, Stored, TensorType, View, ViewMut, vectorized, with_real, with_stored,
};

/// A matrix operand: a tensor, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct MatmulOperand<'a> {
    view: View<'a>,
    /// Rows of the stored matrix.
    rows: usize,
    cols: usize,
    transposed: bool,
}

/// The addend of a GEMM, c = a b + addend.
#[derive(Clone, Copy)]
pub(crate) enum Addend<'a> {
    /// None: c is assigned.
    None,
    /// The previous contents of c.
    Previous,
    /// One row, which is added to every row.
    Bias(View<'a>),
}

impl<'a> MatmulOperand<'a> {
    /// `view` as `rows` rows of `cols` elements.
    pub(crate) fn new(view: View<'a>, rows: usize, cols: usize) -> Self {
        assert_eq!(view.ty.numel(), rows * cols, "{} as {rows}x{cols}", view.ty);
        MatmulOperand { view, rows, cols, transposed: false }
    }

    /// The transpose.
    pub(crate) fn t(self) -> Self {
        MatmulOperand { transposed: !self.transposed, ..self }
    }

    /// Rows and columns of the operand.
    fn extents(&self) -> (usize, usize) {
        if self.transposed { (self.cols, self.rows) } else { (self.rows, self.cols) }
    }

    /// The operand, with its elements in the compute type.
    fn mat<'m, T: Real>(&self, reals: &'m [T]) -> Mat<'m, T> {
        let stored = Mat::new(reals, self.rows, self.cols);
        if self.transposed { stored.t() } else { stored }
    }
}

/// c = a b, plus `addend`.
pub(crate) fn matmul(a: MatmulOperand<'_>, b: MatmulOperand<'_>, c: &mut ViewMut<'_>, addend: Addend<'_>) {
    let ((m, k), (_, n)) = (a.extents(), b.extents());
    let in_blocks = a.view.ty.dtype == DType::BF16 && (m * k).max(k * n).max(m * n) > WHOLE;
    multiply(a, b, c, addend, in_blocks);
}

/// [`matmul`] for callers that run several at a time, each of few rows; the bits are the same. bf16 is always
/// multiplied in blocks, so that no thread waits for others while it holds widened operands. A right operand
/// that is stored transposed is multiplied in blocks too, because the library copies it slowly.
pub(crate) fn matmul_of_group(
    a: MatmulOperand<'_>,
    b: MatmulOperand<'_>,
    c: &mut ViewMut<'_>,
    addend: Addend<'_>,
) {
    let in_blocks = a.view.ty.dtype == DType::BF16 || b.transposed;
    multiply(a, b, c, addend, in_blocks);
}

fn multiply(
    a: MatmulOperand<'_>,
    b: MatmulOperand<'_>,
    c: &mut ViewMut<'_>,
    addend: Addend<'_>,
    in_blocks: bool,
) {
    let ((m, k), (b_rows, n)) = (a.extents(), b.extents());
    assert!(k == b_rows && c.ty.numel() == m * n, "{m}x{k} times {b_rows}x{n} into {}", c.ty);
    if m == 1 && k > 0 && b.transposed && !matches!(addend, Addend::Previous) {
        return with_stored!(b.view.ty.dtype, S => one_row::<S>(a, b, c, addend));
    }
    match in_blocks {
        true => with_stored!(a.view.ty.dtype, S => multiply_blocks::<S>(a, b, c, addend)),
        false => with_real!(a.view.ty.dtype, T => whole::<T>(a, b, c, addend)),
    }
}

fn one_row<S: Stored>(x: MatmulOperand<'_>, w: MatmulOperand<'_>, y: &mut ViewMut<'_>, addend: Addend<'_>) {
    let bias = bias::<S::Real>(addend);
    let weights = w.view.stored::<S>().expect("the type it was chosen by");
    gemv(&x.view.reals::<S::Real>(), weights, bias.as_deref(), &mut y.fresh::<S::Real>());
}

fn bias<T: Real>(addend: Addend<'_>) -> Option<Pooled<T>> {
    let Addend::Bias(view) = addend else { return None };
    let mut bias = Pooled::take(view.ty.numel());
    view.widen_into(&mut bias);
    Some(bias)
}

fn whole<T: Real>(a: MatmulOperand<'_>, b: MatmulOperand<'_>, c: &mut ViewMut<'_>, addend: Addend<'_>) {
    let ((m, k), (_, n)) = (a.extents(), b.extents());
    let (a_reals, b_reals) = (a.view.reals::<T>(), b.view.reals::<T>());
    if let Some(bias) = bias::<T>(addend) {
        for_row_blocks(m, [&mut *c], |_, [mut c]| {
            c.fresh::<T>().chunks_exact_mut(n).for_each(|row| row.copy_from_slice(&bias));
        });
    }
    let adds = !matches!(addend, Addend::None);
    let mut c = if adds { c.reals::<T>() } else { c.fresh::<T>() };
    if k == 0 && !adds {
        c.fill(T::ZERO);
    }
    let (a, b) = (a.mat(&a_reals), b.mat(&b_reals));
    for rows in cuts(m, TALL, 1) {
        let (a, c) = (a.t().cols_in(rows.clone()).t(), &mut c[rows.start * n..rows.end * n]);
        let mut accumulate = adds;
        for depth in cuts(k, DEPTH, 1) {
            let (a, b) = (a.cols_in(depth.clone()), b.t().cols_in(depth).t());
            gemm(T::ONE, a, b, MatMut::new(c, rows.len(), n), accumulate);
            accumulate = true;
        }
    }
}

/// Products that are summed before the sum is added to the result. The library would split no sum as short as
/// this, on any machine.
pub(crate) const DEPTH: usize = 512;

/// Maximum number of rows of the left operand that the library multiplies at a time: it copies [`DEPTH`]
/// columns of all of them, which for the gradient of a large vocabulary would be hundreds of MiB.
const TALL: usize = 8192;

/// Maximum number of elements of a bf16 operand or result that is widened whole.
const WHOLE: usize = 1 << 20;

/// Maximum number of rows and columns in a block of the result. The library's kernels compute [`ROW_UNIT`]
/// rows and [`COL_UNIT`] columns at a time.
const ROWS: usize = 768;
const COLS: usize = 256;
const ROW_UNIT: usize = 6;
const COL_UNIT: usize = 16;

/// Upper bound of the bytes that GEMMs on this number of threads use besides their operands: `times` of them,
/// of these extents, `[m, n, k]`, several at a time. Operands of 8 bits are dequantized by their op.
///
/// The library copies at most `DEPTH` columns of `TALL` rows of the left operand of a GEMM, and as many
/// of a narrow right one. A thread multiplies a block at a time, whose buffers it keeps. A small bf16 GEMM
/// widens all that it reads and writes.
pub fn gemm_work_bytes([m, n, k]: [usize; 3], operands: DType, times: usize, threads: usize) -> usize {
    const NARROW: usize = 512;
    let reals = |elements: usize| size_of::<f32>() * elements;
    let pooled = |elements: usize| reals(elements.next_power_of_two());
    let depth = k.min(DEPTH);
    let copies = reals(depth * (m.min(TALL) + n.min(NARROW)));
    let block = pooled(ROWS * COLS) + pooled(ROWS * DEPTH) + pooled(DEPTH * COLS) + reals(DEPTH * ROWS);
    let at_once = times.min(threads);
    match operands {
        DType::BF16 if (m * k).max(k * n).max(m * n) <= WHOLE && times == 1 => {
            copies + pooled(m * k) + pooled(k * n) + pooled(m * n)
        }
        DType::BF16 => threads * block,
        _ if times > 1 => at_once * copies + threads * block,
        _ => copies,
    }
}

/// Elements of a result that the library computes as dot products, in another order, if the inner extent of
/// both operands is contiguous. These are left to it, so that copies change no bit.
const DOTS: usize = 16 * 16;

fn multiply_blocks<S: Stored>(
    a: MatmulOperand<'_>,
    b: MatmulOperand<'_>,
    c: &mut ViewMut<'_>,
    addend: Addend<'_>,
) {
    let ((m, k), (_, n)) = (a.extents(), b.extents());
    let bias = bias::<S::Real>(addend);
    let blocks = cut(c, cuts(m, ROWS, ROW_UNIT).collect(), cuts(n, COLS, COL_UNIT).collect());
    blocks.into_par_iter().for_each(|block| {
        let (rows, cols) = (block.rows.clone(), block.cols.clone());
        let mut sums = Pooled::take(rows.len() * cols.len());
        match &bias {
            Some(bias) => {
                sums.chunks_exact_mut(cols.len()).for_each(|row| row.copy_from_slice(&bias[cols.clone()]));
            }
            None if matches!(addend, Addend::Previous) => block.read(&mut sums),
            None if k == 0 => sums.fill(S::Real::ZERO),
            None => {}
        }
        let transposes = b.transposed && rows.len() > 1 && rows.len() * cols.len() > DOTS;
        let mut accumulate = !matches!(addend, Addend::None);
        for depth in cuts(k, DEPTH, 1) {
            let a = a.block::<S>(rows.clone(), depth.clone());
            let b = match transposes {
                true => b.transposed_block::<S>(depth, cols.clone()),
                false => b.block::<S>(depth, cols.clone()),
            };
            let sums = MatMut::new(&mut sums, rows.len(), cols.len());
            gemm_single(S::Real::ONE, a.mat(), b.mat(), sums, accumulate);
            accumulate = true;
        }
        block.write(&sums);
    });
}

/// A block of the result.
struct Block<'a> {
    rows: Range<usize>,
    cols: Range<usize>,
    dtype: DType,
    /// Bytes of each row.
    target: Vec<&'a mut [u8]>,
}

impl Block<'_> {
    fn read<T: Real>(&self, to: &mut [T]) {
        for (to, bytes) in to.chunks_exact_mut(self.cols.len()).zip(&self.target) {
            View::new(TensorType::new(self.dtype, [self.cols.len()]), bytes).widen_into(to);
        }
    }

    fn write<T: Real>(self, from: &[T]) {
        for (from, bytes) in from.chunks_exact(self.cols.len()).zip(self.target) {
            ViewMut::new(TensorType::new(self.dtype, [self.cols.len()]), bytes, false).write(from);
        }
    }
}

/// Splits `c` into blocks of these rows and columns.
fn cut<'a>(c: &'a mut ViewMut<'_>, rows: Vec<Range<usize>>, cols: Vec<Range<usize>>) -> Vec<Block<'a>> {
    let dtype = c.ty.dtype;
    let width = cols.last().map_or(0, |cols| cols.end);
    let mut lines = c.bytes().chunks_exact_mut(dtype.bytes(width).max(1));
    let mut blocks: Vec<Block<'a>> = Vec::with_capacity(rows.len() * cols.len());
    for rows in rows {
        let first = blocks.len();
        let empty = |cols: &Range<usize>| Block {
            rows: rows.clone(),
            cols: cols.clone(),
            dtype,
            target: Vec::with_capacity(rows.len()),
        };
        blocks.extend(cols.iter().map(empty));
        for mut line in lines.by_ref().take(rows.len()) {
            for block in &mut blocks[first..] {
                let (part, rest) = line.split_at_mut(dtype.bytes(block.cols.len()));
                block.target.push(part);
                line = rest;
            }
        }
    }
    blocks
}

/// 0..n split into the fewest ranges of at most `max_len`, of about equal length. They start at multiples of
/// `unit`, which divides `max_len`.
fn cuts(n: usize, max_len: usize, unit: usize) -> impl Iterator<Item = Range<usize>> {
    let (units, count) = (n.div_ceil(unit), n.div_ceil(max_len));
    let start = move |i: usize| (i * units / count * unit).min(n);
    (0..count).map(move |i| start(i)..start(i + 1))
}

/// A block of an operand, in the compute type.
struct OperandBlock<'a, T: Real> {
    reals: Reals<'a, T>,
    /// Rows of the stored block.
    rows: usize,
    cols: usize,
    row_stride: usize,
    transposed: bool,
}

impl<'a> MatmulOperand<'a> {
    /// These rows and columns of an operand that is stored as `S`.
    fn block<S: Stored>(&self, rows: Range<usize>, cols: Range<usize>) -> OperandBlock<'a, S::Real> {
        let (rows, cols) = if self.transposed { (cols, rows) } else { (rows, cols) };
        let (reals, row_stride) = match self.view.stored::<S::Real>() {
            Some(stored) => (Reals::Stored(&stored[rows.start * self.cols + cols.start..]), self.cols),
            None => (Reals::Widened(self.widened::<S>(rows.clone(), cols.clone())), cols.len()),
        };
        let transposed = self.transposed;
        OperandBlock { reals, rows: rows.len(), cols: cols.len(), row_stride, transposed }
    }

    /// These rows and columns of the stored matrix, widened.
    fn widened<S: Stored>(&self, rows: Range<usize>, cols: Range<usize>) -> Pooled<S::Real> {
        let stored = self.view.stored::<S>().expect("the type it was chosen by");
        let mut reals = Pooled::take(rows.len() * cols.len());
        vectorized(
            #[inline(always)]
            || {
                for (row, to) in rows.zip(reals.chunks_exact_mut(cols.len())) {
                    let from = &stored[row * self.cols..][cols.clone()];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to = from.real());
                }
            },
        );
        reals
    }

    /// These rows and columns of an operand whose transpose is stored as `S`, copied to rows: the library
    /// copies an operand of contiguous columns more slowly.
    fn transposed_block<S: Stored>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> OperandBlock<'a, S::Real> {
        let stored = self.view.stored::<S>().expect("the type it was chosen by");
        let mut reals = Pooled::take(rows.len() * cols.len());
        let (width, whole_rows, whole_cols) =
            (cols.len(), rows.len() / COL_UNIT * COL_UNIT, cols.len() / COL_UNIT * COL_UNIT);
        let column = |col: usize| &stored[(cols.start + col) * self.cols..][rows.clone()];
        vectorized(
            #[inline(always)]
            || {
                for col in (0..whole_cols).step_by(COL_UNIT) {
                    for row in (0..whole_rows).step_by(COL_UNIT) {
                        let tile: [[S; COL_UNIT]; COL_UNIT] = std::array::from_fn(|n| {
                            column(col + n)[row..row + COL_UNIT].try_into().expect("as many elements")
                        });
                        let lines = reals[row * width..].chunks_exact_mut(width).take(COL_UNIT);
                        for (n, to) in lines.enumerate() {
                            let to = to[col..col + COL_UNIT].iter_mut();
                            to.zip(&tile).for_each(|(to, column)| *to = column[n].real());
                        }
                    }
                }
                for col in 0..width {
                    for row in if col < whole_cols { whole_rows } else { 0 }..rows.len() {
                        reals[row * width + col] = column(col)[row].real();
                    }
                }
            },
        );
        let (rows, cols) = (rows.len(), cols.len());
        OperandBlock { reals: Reals::Widened(reals), rows, cols, row_stride: cols, transposed: false }
    }
}

impl<T: Real> OperandBlock<'_, T> {
    fn mat(&self) -> Mat<'_, T> {
        let stored = Mat::strided(&self.reals, self.rows, self.cols, self.row_stride);
        if self.transposed { stored.t() } else { stored }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::{on_threads, seed};
    use crate::run_op::normal;
    use xtrain_tensor::HostTensor;

    /// a b, plus a bias or, if `accumulate`, the contents of c. An operand whose flag is true is stored
    /// transposed.
    fn computed(
        [a, b]: [&HostTensor; 2],
        [a_t, b_t]: [bool; 2],
        bias: Option<&HostTensor>,
        mut c: HostTensor,
        accumulate: bool,
    ) -> HostTensor {
        fn operand(x: &HostTensor, transposed: bool) -> MatmulOperand<'_> {
            let (rows, cols) = x.ty().shape.rows_cols();
            let stored = MatmulOperand::new(View::new(x.ty(), x.bytes()), rows, cols);
            if transposed { stored.t() } else { stored }
        }
        let bias = bias.map(|bias| Addend::Bias(View::new(bias.ty(), bias.bytes())));
        let addend = bias.unwrap_or(if accumulate { Addend::Previous } else { Addend::None });
        let ty = c.ty();
        matmul(operand(a, a_t), operand(b, b_t), &mut ViewMut::new(ty, c.bytes_mut(), accumulate), addend);
        c
    }

    fn transposed(x: &HostTensor) -> HostTensor {
        let ((rows, cols), values) = (x.ty().shape.rows_cols(), x.to_f64());
        let values: Vec<f64> = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
        HostTensor::from_f64(TensorType::new(x.ty().dtype, [cols, rows]), &values)
    }

    fn in_f64(a: &HostTensor, b: &HostTensor) -> Vec<f64> {
        let ((m, k), (_, n)) = (a.ty().shape.rows_cols(), b.ty().shape.rows_cols());
        let (a, b) = (a.to_f64(), b.to_f64());
        let element = |i: usize| (0..k).map(|l| a[i / n * k + l] * b[l * n + i % n]).sum();
        (0..m * n).map(element).collect()
    }

    /// (m, k, n): with one row, small, and with several blocks in each direction.
    const SIZES: [(usize, usize, usize); 6] =
        [(7, 5, 3), (1, 300, 130), (65, 513, 33), (129, 256, 1), (1601, 17, 670), (13, 1100, 1000)];

    #[test]
    fn bf16_is_summed_in_f32_and_rounded_once() {
        for (m, k, n) in SIZES {
            let (a, b) = (normal(DType::BF16, [m, k], 1.0, seed()), normal(DType::BF16, [k, n], 1.0, seed()));
            let exact = in_f64(&a, &b);
            let empty = |dtype| {
                let mut c = HostTensor::zeros(TensorType::new(dtype, [m, n]));
                c.bytes_mut().fill(0xFF);
                c
            };
            let (a_stored, b_stored) = (transposed(&a), transposed(&b));
            for [a_t, b_t] in [[false, false], [true, false], [false, true]] {
                let operands = [if a_t { &a_stored } else { &a }, if b_t { &b_stored } else { &b }];
                let wide = computed(operands, [a_t, b_t], None, empty(DType::F32), false);
                let bar = 1e-6 * (k as f64).sqrt() + 1e-7;
                for (found, exact) in wide.to_f64().iter().zip(&exact) {
                    assert!(
                        (found - exact).abs() < bar * (1.0 + exact.abs()),
                        "{m}x{k}x{n}: {found}, {exact}"
                    );
                }
                let narrow = computed(operands, [a_t, b_t], None, empty(DType::BF16), false);
                let rounded = HostTensor::from_f64(narrow.ty(), &wide.to_f64());
                assert!(narrow.bytes() == rounded.bytes(), "{m}x{k}x{n}");
                let added = computed(operands, [a_t, b_t], None, wide.clone(), true);
                for (found, exact) in added.to_f64().iter().zip(&exact) {
                    assert!((found - 2.0 * exact).abs() < 3.0 * bar * (1.0 + exact.abs()), "{m}x{k}x{n}");
                }
            }
            let bias = normal(DType::BF16, [n], 1.0, seed());
            let found =
                computed([&a, &b_stored], [false, true], Some(&bias), empty(DType::F32), false).to_f64();
            let bias = bias.to_f64();
            for (i, (found, exact)) in found.iter().zip(&exact).enumerate() {
                assert!((found - exact - bias[i % n]).abs() < 1e-4, "{m}x{k}x{n}");
            }
        }
    }

    /// More rows than are multiplied at a time.
    #[test]
    fn other_rows_change_no_bit_of_an_f32_gemm() {
        let (m, k, n) = (2 * TALL + 77, 600, 9);
        let (a, b) = (normal(DType::F32, [m, k], 1.0, seed()), normal(DType::F32, [k, n], 1.0, seed()));
        let product = |a: &HostTensor| {
            let c = HostTensor::zeros(TensorType::new(DType::F32, [a.ty().shape[0], n]));
            computed([a, &b], [false; 2], None, c, false).to_f64()
        };
        let whole = product(&a);
        for rows in [0..40, 5400..5700, TALL - 20..TALL + 300, m - 50..m] {
            let part = &a.to_f64()[rows.start * k..rows.end * k];
            let part = HostTensor::from_f64(TensorType::new(DType::F32, [rows.len(), k]), part);
            assert!(product(&part) == whole[rows.start * n..rows.end * n], "rows {rows:?}");
        }
    }

    #[test]
    fn neither_threads_nor_other_rows_change_a_bit_of_a_bf16_gemm() {
        // The whole is multiplied in blocks; its parts are widened whole.
        let (m, k, n) = (1600, 700, 70);
        let (a, b) = (normal(DType::BF16, [m, k], 1.0, seed()), normal(DType::BF16, [n, k], 1.0, seed()));
        let held = normal(DType::F32, [m, n], 1.0, seed());
        let added = |a: &HostTensor, first: usize| {
            let rows = a.ty().shape[0];
            let held = &held.to_f64()[first * n..(first + rows) * n];
            let c = HostTensor::from_f64(TensorType::new(DType::F32, [rows, n]), held);
            computed([a, &b], [false, true], None, c, true).to_f64()
        };
        let whole = on_threads(1, || added(&a, 0));
        assert!(on_threads(3, || added(&a, 0)) == whole);
        for rows in [10..33, 100..105, 171..1300] {
            let part = &a.to_f64()[rows.start * k..rows.end * k];
            let part = HostTensor::from_f64(TensorType::new(DType::BF16, [rows.len(), k]), part);
            assert!(added(&part, rows.start) == whole[rows.start * n..rows.end * n], "rows {rows:?}");
        }
    }
}
