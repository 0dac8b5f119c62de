//! CPU kernels of [`Quantize`] and [`Dequantize`]: one pass over the rows for amaxes, one for the cast.

use super::{CastSource, Dequantize, Given, Quantize, SAVE};
use crate::host::amax::magnitude;
use crate::host::math::vectorized;
use crate::host::rows::rows_per_task;
use crate::tail;
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
        let (source_inputs, given) = inputs.split_at(self.source.inputs());
        let types: Vec<TensorType> = inputs.iter().map(|view| view.ty).collect();
        let (rows, cols) = self.source.extents(&types);
        let written_rows = match self.source {
            CastSource::Permute if self.tail.is_undefined() => tail::written_sources(inputs[1]),
            source => source.weights().map_or(rows, |n| tail::written_rows(self.tail, inputs[n + 1], rows)),
        };
        let (outputs, further) = outputs.split_at_mut(self.amax() + 1);
        let dweights = further.first_mut().filter(|_| self.source.has_dweights());
        let dweights = dweights.map(|dweights| dweights.slice_mut(0..dweights.ty.numel()));
        let mut computed = self.source.compute(source_inputs, dweights);
        if let Some(value) = &mut computed {
            // Zeros, so that no amax depends on the tail.
            let from = value.ty().dtype.bytes(written_rows * cols);
            value.bytes_mut()[from..].fill(0);
        }
        let x = computed.as_ref().map_or(inputs[0], |value| View::new(value.ty(), value.bytes()));
        let given_scale = self.given.scale().map(|n| given[n].scalar::<f32>());
        let given_amaxes = self.given.amax().map(|n| given[n].reals::<f32>().to_vec());
        let scale_of_amax =
            |amax: &f32| cast_scale(self.format, f32::from_bits(magnitude(*amax)), self.pow2_scales);
        let given_scales = given_amaxes.as_ref().map(|amaxes| amaxes.iter().map(scale_of_amax).collect());
        // A scale of 0 means "not set".
        let scales = given_scale.filter(|&scale| scale != 0.0).map(|scale| vec![scale]).or(given_scales);
        if matches!(self.source, CastSource::SwigluSaving { .. }) {
            save(inputs[0], further);
        }
        let Some((amax, casts)) = outputs.split_last_mut() else { unreachable!("amax is always written") };
        let layouts = [false, true].into_iter().zip(self.layouts.written());
        let written = layouts.filter_map(|(transposed, is_written)| is_written.then_some(transposed));
        let mut largest = 0;
        for (transposed, pair) in written.zip(casts.chunks_exact_mut(2)) {
            let [q, inv_scale] = pair else { unreachable!("pairs") };
            largest = self.cast(Matrix { view: x, transposed }, scales.as_deref(), q, inv_scale);
        }
        let largest = match (self.given, given_amaxes.as_deref()) {
            (Given::Amax, Some(&[amax])) if self.scaling == Scaling::Tensor => magnitude(amax),
            (Given::Amax, _) => 0,
            _ => largest,
        };
        let accumulates = amax.accumulate;
        let before = if accumulates { magnitude(amax.reals::<f32>()[0]) } else { 0 };
        amax.reals::<f32>()[0] = f32::from_bits(largest.max(before));
        let ragged = outputs.iter_mut().chain(further).enumerate();
        for (n, output) in ragged.filter(|_| written_rows < rows) {
            if let Some((axis, of_index)) = self.ragged_axis(n) {
                tail::fill(output, axis, written_rows.div_ceil(of_index));
            }
        }
    }

    /// Gate and up if they are restored, the value that the op computes, the amaxes of regions, partial
    /// amaxes, and scales.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (rows, cols) = self.source.extents(inputs);
        let dtype = self.source.dtype(inputs);
        let restored = self.source.restored().map_or(0, |q| dtype.bytes(inputs[q].numel()));
        let value = if self.source == CastSource::Input { 0 } else { dtype.bytes(rows * cols) };
        let of_layout = |rows: usize, cols: usize| {
            let (high, wide) = self.scaling.region(rows, cols);
            2 * size_of::<f32>() * rows.div_ceil(high.min(TILE)) * cols.div_ceil(wide)
        };
        restored + value + of_layout(rows, cols).max(of_layout(cols, rows))
    }
}

/// Saves a tensor by the cast [`SAVE`]; `copy` is the numbers and the scales.
pub(crate) fn save(x: View<'_>, copy: &mut [ViewMut<'_>]) {
    let [q, inv_scale] = copy else { unreachable!("numbers and scales") };
    SAVE.cast(Matrix { view: x, transposed: false }, None, q, inv_scale);
}

impl Quantize {
    /// Writes the elements and scales of one layout, with these scales of its regions if they are given;
    /// returns the bits of the amax.
    pub(crate) fn cast(
        &self,
        x: Matrix<'_>,
        scales: Option<&[f32]>,
        q: &mut ViewMut<'_>,
        inv_scale: &mut ViewMut<'_>,
    ) -> u32 {
        let (rows, cols) = x.extents();
        let regions = Regions::new(self.scaling, rows, cols);
        let amaxes = regions.amaxes(&x);
        let scale_of_amax = |&amax: &f32| cast_scale(self.format, amax, self.pow2_scales);
        let scales: Vec<f32> = match scales {
            Some(scales) => scales.to_vec(),
            None => amaxes.iter().map(scale_of_amax).collect(),
        };
        regions.write_inverses(&scales, &mut inv_scale.reals::<f32>());

        let high = even_rows_per_task(cols);
        let tasks: Vec<(usize, ViewMut<'_>)> = q.chunks(high * cols).enumerate().collect();
        tasks.into_par_iter().for_each(|(task, mut q)| {
            let first = task * high;
            let mut scaled = Pooled::take(q.ty.numel());
            x.rows(first..first + q.ty.numel() / cols, &mut scaled);
            vectorized(
                #[inline(always)]
                || {
                    regions.multiply(first, &mut scaled, &scales);
                    narrow(self.format, &scaled, q.bytes());
                },
            );
        });
        amaxes.iter().map(|amax| amax.to_bits()).max().unwrap_or(0)
    }
}

impl CpuKernel for Dequantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (rows, cols) = inputs[0].ty.shape.rows_cols();
        let high = even_rows_per_task(cols);
        let scales = inputs[1].reals::<f32>();
        let tasks: Vec<(usize, ViewMut<'_>)> = outputs[0].chunks(high * cols).enumerate().collect();
        let regions = Regions::new(self.scaling, rows, cols);
        let inverses = regions.gather(&scales);
        tasks.into_par_iter().for_each(|(task, mut out)| {
            let start = task * high * cols;
            let q = inputs[0].slice(start..start + out.ty.numel());
            restore(&q, &regions, task * high, &inverses, &mut out.fresh::<f32>());
        });
    }
}

/// Restores whole rows of FP8 by the inverse scales of all regions; `first` is the first row.
fn restore(q: &View<'_>, regions: &Regions, first: usize, inverses: &[f32], to: &mut [f32]) {
    vectorized(
        #[inline(always)]
        || {
            widen(q.ty.dtype, q.bytes(), to);
            regions.multiply(first, to, inverses);
        },
    );
}

/// The numbers that a matrix of FP8 represents.
pub(crate) fn dequantized(q: View<'_>, inv_scale: View<'_>, scaling: Scaling) -> Pooled<f32> {
    let (rows, cols) = q.ty.shape.rows_cols();
    let regions = Regions::new(scaling, rows, cols);
    let inverses = regions.gather(&inv_scale.reals::<f32>());
    let mut all = Pooled::take(rows * cols);
    let high = rows_per_task(cols);
    all.par_chunks_mut(high * cols).enumerate().for_each(|(task, to)| {
        let start = task * high * cols;
        restore(&q.slice(start..start + to.len()), &regions, task * high, &inverses, to);
    });
    all
}

/// The matrix to cast, or its transpose.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) view: View<'a>,
    pub(crate) transposed: bool,
}

impl Matrix<'_> {
    /// Rows and columns.
    pub(super) fn extents(&self) -> (usize, usize) {
        let (rows, cols) = self.view.ty.shape.rows_cols();
        if self.transposed { (cols, rows) } else { (rows, cols) }
    }

    /// Writes these rows, widened, to `to`.
    fn rows(&self, rows: Range<usize>, to: &mut [f32]) {
        if !self.transposed {
            return self.view.rows(rows).widen_into(to);
        }
        let (high, wide) = self.view.ty.shape.rows_cols();
        let mut column = Pooled::take(rows.len());
        for row in 0..high {
            self.view.slice(row * wide + rows.start..row * wide + rows.end).widen_into(&mut column);
            to[row..].iter_mut().step_by(high).zip(column.iter()).for_each(|(to, from)| *to = *from);
        }
    }
}

/// The regions of one matrix.
pub(super) struct Regions {
    rows: usize,
    cols: usize,
    /// Rows and columns of a region.
    high: usize,
    wide: usize,
    /// Regions in a row of regions.
    across: usize,
    /// Strides of scales: to the region below, and to the region on the right.
    strides: (usize, usize),
}

impl Regions {
    pub(super) fn new(scaling: Scaling, rows: usize, cols: usize) -> Self {
        let (high, wide) = scaling.region(rows, cols);
        Regions { rows, cols, high, wide, across: cols.div_ceil(wide), strides: scaling.steps(rows, cols) }
    }

    /// The index of the scale of the n-th region.
    fn scale_index(&self, n: usize) -> usize {
        n / self.across * self.strides.0 + n % self.across * self.strides.1
    }

    /// Writes the reciprocals of the scales, and zeros for scales that belong to no region.
    fn write_inverses(&self, scales: &[f32], to: &mut [f32]) {
        to.fill(0.0);
        scales.iter().enumerate().for_each(|(n, scale)| to[self.scale_index(n)] = 1.0 / scale);
    }

    /// The numbers of all regions in their order.
    fn gather(&self, from: &[f32]) -> Vec<f32> {
        (0..self.rows.div_ceil(self.high) * self.across).map(|n| from[self.scale_index(n)]).collect()
    }

    /// The amaxes of all regions.
    pub(super) fn amaxes(&self, x: &Matrix<'_>) -> Vec<f32> {
        // A task reduces a row of regions of at most a tile's height. Higher regions are reduced from such
        // rows.
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

    /// Raises the amaxes of a row of regions to those of one row of elements.
    #[inline(always)]
    fn row_amax(&self, row: &[f32], bits: &mut [u32]) {
        for (b, piece) in bits.iter_mut().zip(row.chunks(self.wide)) {
            *b = piece.iter().fold(*b, |b, &x| magnitude(x).max(b));
        }
    }

    /// Multiplies whole rows by the factors of their regions; `first` is the first row.
    #[inline(always)]
    fn multiply(&self, first: usize, elements: &mut [f32], factors: &[f32]) {
        for (n, row) in elements.chunks_exact_mut(self.cols).enumerate() {
            let factors = &factors[(first + n) / self.high * self.across..][..self.across];
            for (piece, &factor) in row.chunks_mut(self.wide).zip(factors) {
                piece.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}
