//! CPU kernels of [`Quantize`] and [`Dequantize`]: one pass over the rows for amax, one for the cast.

use super::{CastSource, Dequantize, Given, Quantize, SAVE};
use crate::host::math::vectorized;
use crate::host::rows::rows_per_task;
use rayon::prelude::*;
use std::ops::Range;
use xtrain_tensor::formats::{cast_scale, narrow, widen};
use xtrain_tensor::{CpuKernel, Pooled, Scaling, TILE, TensorType, View, ViewMut};

/// Rows that a task casts: an even number, so that two tasks share no byte of a packed format.
fn even_rows_per_task(cols: usize) -> usize {
    rows_per_task(cols).next_multiple_of(2)
}

impl CpuKernel for Quantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (own, given) = inputs.split_at(self.source.inputs());
        let given = given.first().map(View::scalar::<f32>);
        let made = self.source.make(own);
        let x = made.as_ref().map_or(inputs[0], |made| View::new(made.ty(), made.bytes()));
        let given_as = |kind| given.filter(|_| self.given == kind);
        let measured = given_as(Given::Amax);
        let given =
            given_as(Given::Scale).filter(|&scale| scale != 0.0).or(measured
                .map(|amax| cast_scale(self.format, f32::from_bits(magnitude(amax)), self.pow2_scales)));
        let (outputs, copy) = outputs.split_at_mut(self.amax() + 1);
        if self.source == CastSource::SwigluSaving {
            keep(inputs[0], copy);
        }
        let Some((amax, made)) = outputs.split_last_mut() else { unreachable!("amax is always made") };
        let sides = [false, true].into_iter().zip(self.layouts.written()).filter(|(_, is_made)| *is_made);
        let mut largest = 0;
        for ((transposed, _), pair) in sides.zip(made.chunks_exact_mut(2)) {
            let [q, inv_scale] = pair else { unreachable!("pairs") };
            largest = self.side(Matrix { view: x, transposed }, given, q, inv_scale);
        }
        let largest = measured.map_or(largest, magnitude);
        let is_added = amax.accumulate;
        let amax = &mut amax.reals::<f32>()[0];
        let held = if is_added { magnitude(*amax) } else { 0 };
        *amax = f32::from_bits(largest.max(held));
    }

    /// The regions' maxima, partial maxima, and scales.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (rows, cols) = self.source.extents(inputs);
        let made = if self.source == CastSource::Input { 0 } else { inputs[0].dtype.bytes(rows * cols) };
        let side = |rows: usize, cols: usize| {
            let (high, wide) = self.scaling.region(rows, cols);
            2 * size_of::<f32>() * rows.div_ceil(high.min(TILE)) * cols.div_ceil(wide)
        };
        made + side(rows, cols).max(side(cols, rows))
    }
}

/// Saves a tensor in these numbers and scales.
pub(crate) fn keep(x: View<'_>, copy: &mut [ViewMut<'_>]) {
    let [q, inv_scale] = copy else { unreachable!("numbers and scales") };
    SAVE.side(Matrix { view: x, transposed: false }, None, q, inv_scale);
}

impl Quantize {
    /// One layout: its elements and scales; returns the bits of amax.
    fn side(
        &self,
        x: Matrix<'_>,
        given: Option<f32>,
        q: &mut ViewMut<'_>,
        inv_scale: &mut ViewMut<'_>,
    ) -> u32 {
        let (rows, cols) = x.extents();
        let regions = Regions::new(self.scaling, rows, cols);
        let amax = regions.amax(&x);
        let made = |&amax: &f32| cast_scale(self.format, amax, self.pow2_scales);
        let scale: Vec<f32> = amax.iter().map(|amax| given.unwrap_or_else(|| made(amax))).collect();
        regions.lay_out(&scale, &mut inv_scale.reals::<f32>());

        let high = even_rows_per_task(cols);
        let tasks: Vec<(usize, ViewMut<'_>)> = q.chunks(high * cols).enumerate().collect();
        tasks.into_par_iter().for_each(|(task, mut q)| {
            let first = task * high;
            let mut scaled = Pooled::take(q.ty.numel());
            x.rows(first..first + q.ty.numel() / cols, &mut scaled);
            vectorized(
                #[inline(always)]
                || {
                    regions.multiply(first, &mut scaled, &scale);
                    narrow(self.format, &scaled, q.bytes());
                },
            );
        });
        amax.iter().map(|amax| amax.to_bits()).max().unwrap_or(0)
    }
}

impl CpuKernel for Dequantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (rows, cols) = inputs[0].ty.shape.rows_cols();
        let high = even_rows_per_task(cols);
        let scales = inputs[1].reals::<f32>();
        let tasks: Vec<(usize, ViewMut<'_>)> = outputs[0].chunks(high * cols).enumerate().collect();
        let regions = Regions::new(self.scaling, rows, cols);
        let by = regions.gather(&scales);
        tasks.into_par_iter().for_each(|(task, mut out)| {
            let at = task * high * cols;
            let q = inputs[0].slice(at..at + out.ty.numel());
            restore(&q, &regions, task * high, &by, &mut out.fresh::<f32>());
        });
    }
}

/// Whole rows of FP8 as the numbers that they represent; `first` is the first row.
fn restore(q: &View<'_>, regions: &Regions, first: usize, by: &[f32], to: &mut [f32]) {
    vectorized(
        #[inline(always)]
        || {
            widen(q.ty.dtype, q.bytes(), to);
            regions.multiply(first, to, by);
        },
    );
}

/// A matrix of FP8 as the numbers that it represents.
pub(crate) fn dequantized(q: View<'_>, inv_scale: View<'_>, scaling: Scaling) -> Pooled<f32> {
    let (rows, cols) = q.ty.shape.rows_cols();
    let regions = Regions::new(scaling, rows, cols);
    let by = regions.gather(&inv_scale.reals::<f32>());
    let mut all = Pooled::take(rows * cols);
    let high = rows_per_task(cols);
    all.par_chunks_mut(high * cols).enumerate().for_each(|(task, to)| {
        let at = task * high * cols;
        restore(&q.slice(at..at + to.len()), &regions, task * high, &by, to);
    });
    all
}

/// The matrix to cast, or its transpose.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    view: View<'a>,
    transposed: bool,
}

impl Matrix<'_> {
    /// Rows and columns.
    fn extents(&self) -> (usize, usize) {
        let (rows, cols) = self.view.ty.shape.rows_cols();
        if self.transposed { (cols, rows) } else { (rows, cols) }
    }

    /// These rows, widened.
    fn rows(&self, rows: Range<usize>, to: &mut [f32]) {
        if !self.transposed {
            return self.view.rows(rows).widen_into(to);
        }
        let (high, wide) = self.view.ty.shape.rows_cols();
        let mut piece = Pooled::take(rows.len());
        for row in 0..high {
            self.view.slice(row * wide + rows.start..row * wide + rows.end).widen_into(&mut piece);
            to[row..].iter_mut().step_by(high).zip(piece.iter()).for_each(|(to, from)| *to = *from);
        }
    }
}

/// The regions of one matrix.
struct Regions {
    rows: usize,
    cols: usize,
    /// Extents of a region.
    high: usize,
    wide: usize,
    /// Regions side by side.
    across: usize,
    /// From one region's scale to that of the one below, and of the one beside it.
    steps: (usize, usize),
}

/// Magnitudes are compared as integers: that orders numbers, and puts NaNs above all.
fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// The amax of a tensor of f32 or bf16.
pub(crate) fn largest_magnitude(x: View<'_>) -> f32 {
    let pieces: Vec<_> = x.chunks(1 << 16).collect();
    let of = |piece: View<'_>| piece.reals::<f32>().iter().fold(0, |most, &x| magnitude(x).max(most));
    f32::from_bits(pieces.into_par_iter().map(of).max().unwrap_or(0))
}

impl Regions {
    fn new(scaling: Scaling, rows: usize, cols: usize) -> Self {
        let (high, wide) = scaling.region(rows, cols);
        Regions { rows, cols, high, wide, across: cols.div_ceil(wide), steps: scaling.steps(rows, cols) }
    }

    /// The place of the scale of the n-th region.
    fn place(&self, n: usize) -> usize {
        n / self.across * self.steps.0 + n % self.across * self.steps.1
    }

    /// Writes the reciprocals of the scales to their places, and zeros between them.
    fn lay_out(&self, scales: &[f32], to: &mut [f32]) {
        to.fill(0.0);
        scales.iter().enumerate().for_each(|(n, scale)| to[self.place(n)] = 1.0 / scale);
    }

    /// The number of each region, read from its place.
    fn gather(&self, from: &[f32]) -> Vec<f32> {
        (0..self.rows.div_ceil(self.high) * self.across).map(|n| from[self.place(n)]).collect()
    }

    /// The amax of every region.
    fn amax(&self, x: &Matrix<'_>) -> Vec<f32> {
        // A task computes a row of regions no higher than a tile; higher ones are reduced from tiles.
        let high = self.high.min(TILE);
        let mut bits = vec![0u32; self.rows.div_ceil(high) * self.across];
        bits.par_chunks_mut(self.across).enumerate().for_each(|(n, bits)| {
            let rows = n * high..self.rows.min((n + 1) * high);
            let mut elements = Pooled::take(rows.len() * self.cols);
            x.rows(rows, &mut elements);
            vectorized(
                #[inline(always)]
                || elements.chunks_exact(self.cols).for_each(|row| self.row_amax(row, bits)),
            );
        });
        if self.high > high {
            let (first, rest) = bits.split_at_mut(self.across);
            for tile in rest.chunks_exact(self.across) {
                first.iter_mut().zip(tile).for_each(|(a, &b)| *a = b.max(*a));
            }
            bits.truncate(self.across);
        }
        bits.into_iter().map(f32::from_bits).collect()
    }

    /// Raises the maxima of a row of regions to those of one row of elements.
    #[inline(always)]
    fn row_amax(&self, row: &[f32], bits: &mut [u32]) {
        for (b, piece) in bits.iter_mut().zip(row.chunks(self.wide)) {
            *b = piece.iter().fold(*b, |b, &x| magnitude(x).max(b));
        }
    }

    /// Multiplies whole rows by the numbers of their regions; `first` is the first row.
    #[inline(always)]
    fn multiply(&self, first: usize, elements: &mut [f32], by: &[f32]) {
        for (n, row) in elements.chunks_exact_mut(self.cols).enumerate() {
            let by = &by[(first + n) / self.high * self.across..][..self.across];
            for (piece, &by) in row.chunks_mut(self.wide).zip(by) {
                piece.iter_mut().for_each(|x| *x *= by);
            }
        }
    }
}
