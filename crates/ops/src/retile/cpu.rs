//! CPU kernel of [`Retile`].

use super::Retile;
use crate::quantize::{Matrix, dequantized};
use crate::tail;
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, DType, Scaling, TILE, TensorType, View, ViewMut};

impl CpuKernel for Retile {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (_, width) = inputs[0].ty.shape.rows_cols();
        let (_, top_k) = inputs[2].ty.shape.rows_cols();
        let sources = inputs[1].ints();
        let tokens: Vec<Option<usize>> =
            sources.iter().map(|&source| usize::try_from(source).ok().map(|copy| copy / top_k)).collect();
        let rows = rows_of(inputs[0].bytes(), &tokens, width);
        let scales = inputs.get(Retile::SCALES).map(|scales| scales_of(scales, &tokens, width));
        let [is_row_major, is_transposed] = self.layouts.written();
        let (row_major, transposed) =
            outputs.split_at_mut(if is_row_major { self.outputs_of_layout() } else { 0 });
        if let [q, inv_scale @ ..] = row_major {
            q.bytes().copy_from_slice(&rows);
            if let (Some(scales), [inv_scale]) = (&scales, inv_scale) {
                inv_scale.fresh::<f32>().copy_from_slice(scales);
            }
        }
        match (transposed, scales) {
            ([q, inv_scale], Some(scales)) if is_transposed => {
                let of = [tokens.len(), width];
                let q_of_rows = View::new(TensorType::new(DType::E4M3, of), &rows);
                let shape = Scaling::Tile.shape(tokens.len(), width);
                let inverses = View::new(TensorType::new(DType::F32, shape), bytemuck::cast_slice(&scales));
                let restored = dequantized(q_of_rows, inverses, Scaling::Tile);
                let view = View::new(TensorType::new(DType::F32, of), bytemuck::cast_slice(&restored[..]));
                Retile::TRANSPOSED.cast(Matrix { view, transposed: true }, None, q, inv_scale);
            }
            ([q], None) => {
                q.bytes().par_chunks_mut(tokens.len()).enumerate().for_each(|(column, to)| {
                    to.iter_mut().zip(rows.chunks_exact(width)).for_each(|(to, row)| *to = row[column]);
                });
            }
            _ => {}
        }
        if self.tail.is_undefined() {
            let written = tail::written_sources(inputs[1]);
            for (n, output) in outputs.iter_mut().enumerate() {
                let (axis, rows) = self.ragged_axis(n);
                tail::fill(output, axis, written.div_ceil(rows));
            }
        }
    }

    /// The numbers of rows; with scales those too, the rows in f32, and scales and amaxes of tiles.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (rows, width) = (inputs[1].numel(), inputs[0].shape[1]);
        let numbers = rows * width + size_of::<Option<usize>>() * rows;
        if !self.is_scaled() {
            return numbers;
        }
        let tiles = 2 * rows * width.div_ceil(TILE) + 2 * width * rows.div_ceil(TILE);
        numbers + size_of::<f32>() * (rows * width + tiles)
    }
}

/// The numbers of the tokens of rows of this width; zeros for rows without a token.
fn rows_of(numbers: &[u8], tokens: &[Option<usize>], width: usize) -> Vec<u8> {
    let mut rows = vec![0; tokens.len() * width];
    rows.par_chunks_mut(width).zip(tokens).for_each(|(row, token)| {
        if let Some(token) = token {
            row.copy_from_slice(&numbers[token * width..][..width]);
        }
    });
    rows
}

/// The scales of rows by tiles, from those of the tokens of ranks; 1 for rows without a token.
fn scales_of(scales: &View<'_>, tokens: &[Option<usize>], width: usize) -> Vec<f32> {
    let (_, of_rank) = scales.ty.shape.rows_cols();
    let (scales, tiles) = (scales.reals::<f32>(), width.div_ceil(TILE));
    let scale =
        |tile: usize, token: usize| scales[(token / of_rank * tiles + tile) * of_rank + token % of_rank];
    let of_tile = |tile: usize| tokens.iter().map(move |token| (tile, *token));
    (0..tiles).flat_map(of_tile).map(|(tile, token)| token.map_or(1.0, |token| scale(tile, token))).collect()
}
