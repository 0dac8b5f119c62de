//! CPU kernels of [`Quantize`] and [`Dequantize`]: one pass over the rows for amax, one for the cast.

use super::{Dequantize, Granularity, Quantize};
use crate::host::math::vectorized;
use crate::host::rows::rows_per_task;
use crate::quantize::granularity::TILE;
use rayon::prelude::*;
use xtrain_tensor::formats::{max_finite, narrow, widen};
use xtrain_tensor::{CpuKernel, Pooled, View, ViewMut};

/// Rows that a task casts: an even number, so that two tasks share no byte of a packed format.
fn even_rows_per_task(cols: usize) -> usize {
    rows_per_task(cols).next_multiple_of(2)
}

impl CpuKernel for Quantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let x = inputs[0];
        let (rows, cols) = x.ty.shape.rows_cols();
        let regions = Regions::new(self.granularity, rows, cols);
        let [q, inv_scale, amax] = outputs else { unreachable!("three outputs") };

        let mut amax = amax.reals::<f32>();
        amax.copy_from_slice(&regions.amax(&x));
        let scale: Vec<f32> = amax.iter().map(|&amax| self.scale(amax)).collect();
        inv_scale.reals::<f32>().iter_mut().zip(&scale).for_each(|(inv, scale)| *inv = 1.0 / scale);

        let high = even_rows_per_task(cols);
        let tasks: Vec<(usize, ViewMut<'_>)> = q.chunks(high * cols).enumerate().collect();
        tasks.into_par_iter().for_each(|(task, mut q)| {
            let at = task * high * cols;
            let mut scaled = Pooled::take(q.ty.numel());
            x.slice(at..at + q.ty.numel()).widen_into(&mut scaled);
            vectorized(
                #[inline(always)]
                || {
                    regions.multiply(task * high, &mut scaled, &scale);
                    narrow(self.format, &scaled, q.bytes());
                },
            );
        });
    }
}

impl Quantize {
    /// The scale of a region.
    fn scale(&self, amax: f32) -> f32 {
        if amax == 0.0 || !amax.is_finite() {
            return 1.0;
        }
        let scale = (max_finite(self.format) / amax).min(f32::MAX);
        if self.pow2_scales { f32::from_bits(scale.to_bits() & 0xFF80_0000) } else { scale }
    }
}

impl CpuKernel for Dequantize {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (rows, cols) = inputs[0].ty.shape.rows_cols();
        let granularity = Granularity::of_scales([inputs[1].ty.shape[0], inputs[1].ty.shape[1]], rows, cols);
        let regions = Regions::new(granularity.expect("infer knew the shape of the scales"), rows, cols);
        let inv_scale = inputs[1].reals::<f32>();
        let high = even_rows_per_task(cols);
        let tasks: Vec<(usize, ViewMut<'_>)> = outputs[0].chunks(high * cols).enumerate().collect();
        tasks.into_par_iter().for_each(|(task, mut out)| {
            let at = task * high * cols;
            let q = inputs[0].slice(at..at + out.ty.numel());
            let mut out = out.fresh::<f32>();
            vectorized(
                #[inline(always)]
                || {
                    widen(q.ty.dtype, q.bytes(), &mut out);
                    regions.multiply(task * high, &mut out, &inv_scale);
                },
            );
        });
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
}

impl Regions {
    fn new(granularity: Granularity, rows: usize, cols: usize) -> Self {
        let (high, wide) = granularity.region(rows, cols);
        Regions { rows, cols, high, wide, across: cols.div_ceil(wide) }
    }

    /// The amax of every region. Bits of magnitudes are compared as integers: that orders numbers as they are, and NaNs above all.
    fn amax(&self, x: &View<'_>) -> Vec<f32> {
        // Rows of regions that are no higher than a tile are made by one task each; higher ones are put together from tiles.
        let high = self.high.min(TILE);
        let mut bits = vec![0u32; self.rows.div_ceil(high) * self.across];
        bits.par_chunks_mut(self.across).enumerate().for_each(|(n, bits)| {
            for row in n * high..self.rows.min((n + 1) * high) {
                let row = x.slice(row * self.cols..(row + 1) * self.cols).reals::<f32>();
                vectorized(
                    #[inline(always)]
                    || self.row_amax(&row, bits),
                );
            }
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
        let magnitude = |x: f32| x.to_bits() & 0x7FFF_FFFF;
        if self.wide == 1 {
            bits.iter_mut().zip(row).for_each(|(b, &x)| *b = magnitude(x).max(*b));
        } else {
            for (b, piece) in bits.iter_mut().zip(row.chunks(self.wide)) {
                *b = piece.iter().fold(*b, |b, &x| magnitude(x).max(b));
            }
        }
    }

    /// Multiplies whole rows, of which `first` is the first, by the numbers of their regions.
    #[inline(always)]
    fn multiply(&self, first: usize, elements: &mut [f32], by: &[f32]) {
        for (n, row) in elements.chunks_exact_mut(self.cols).enumerate() {
            let by = &by[(first + n) / self.high * self.across..][..self.across];
            if self.wide == 1 {
                row.iter_mut().zip(by).for_each(|(x, &by)| *x *= by);
            } else {
                for (piece, &by) in row.chunks_mut(self.wide).zip(by) {
                    piece.iter_mut().for_each(|x| *x *= by);
                }
            }
        }
    }
}
