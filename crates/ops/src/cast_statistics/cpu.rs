//! The CPU kernel of [`CastStatistics`]: blocks of rows in parallel, their sums added in order.

use super::CastStatistics;
use crate::host::rows::rows_per_task;
use crate::quantize::dequantized;
use rayon::prelude::*;
use xtrain_tensor::formats::{max_finite, overflow};
use xtrain_tensor::{CpuKernel, Pooled, TensorType, View, ViewMut};

/// The statistics of some rows.
#[derive(Default)]
struct StatisticSums {
    counts: [u32; 4],
    amax: f32,
    squares: f64,
    errors: f64,
}

impl CpuKernel for CastStatistics {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (x, q) = (inputs[0], inputs[1]);
        let (rows, cols) = x.ty.shape.rows_cols();
        let (high, wide) = q.ty.shape.rows_cols();
        let scales = inputs[2].reals::<f32>();
        let restored = dequantized(q, inputs[2], self.scaling);
        let ((region_high, region_wide), (down, across)) =
            (self.scaling.region(high, wide), self.scaling.steps(high, wide));
        let (largest, overflow) = (max_finite(q.ty.dtype), overflow(q.ty.dtype));
        let add_row = |row: usize, elements: &[f32], sums: &mut StatisticSums| {
            for (col, &x) in elements.iter().enumerate() {
                let (i, j) = if self.transposed { (col, row) } else { (row, col) };
                let inv_scale = scales[i / region_high * down + j / region_wide * across];
                let restored = restored[i * wide + j];
                if !x.is_finite() {
                    sums.counts[3] += 1;
                    continue;
                }
                sums.counts[0] += u32::from(x != 0.0);
                sums.counts[1] += u32::from(x != 0.0 && restored == 0.0);
                let is_largest = restored.abs() >= largest * inv_scale;
                sums.counts[2] += u32::from(is_largest && x.abs() >= overflow * inv_scale);
                sums.amax = sums.amax.max(x.abs());
                sums.squares += f64::from(x) * f64::from(x);
                let error = f64::from(x) - f64::from(restored);
                sums.errors += error * error;
            }
        };
        let block = rows_per_task(cols);
        let firsts: Vec<usize> = (0..rows).step_by(block).collect();
        let block_sums = |&first: &usize| {
            let rows = first..rows.min(first + block);
            let mut elements = Pooled::take(rows.len() * cols);
            x.rows(rows.clone()).widen_into(&mut elements);
            let mut sums = StatisticSums::default();
            rows.zip(elements.chunks_exact(cols))
                .for_each(|(row, elements)| add_row(row, elements, &mut sums));
            sums
        };
        let parts: Vec<StatisticSums> = firsts.par_iter().map(block_sums).collect();
        let mut all = StatisticSums::default();
        for part in &parts {
            all.counts.iter_mut().zip(part.counts).for_each(|(all, part)| *all += part);
            all.amax = all.amax.max(part.amax);
            all.squares += part.squares;
            all.errors += part.errors;
        }
        outputs[0].counters().copy_from_slice(&all.counts);
        outputs[1].store(&[all.amax, all.squares.sqrt() as f32, all.errors.sqrt() as f32]);
    }

    /// The restored numbers and the sums of the blocks.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (rows, cols) = inputs[0].shape.rows_cols();
        rows * cols * size_of::<f32>() + rows.div_ceil(rows_per_task(cols)) * size_of::<StatisticSums>()
    }
}
