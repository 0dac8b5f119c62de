//! CPU kernel of [`Retile`].

use super::Retile;
use crate::quantize::{Matrix, dequantized};
use rayon::prelude::*;
use xtrain_tensor::{CpuKernel, DType, Scaling, TILE, TensorType, View, ViewMut};

impl CpuKernel for Retile {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (tokens, width) = inputs[0].ty.shape.rows_cols();
        let (_, top_k) = inputs[3].ty.shape.rows_cols();
        let of_tokens = inputs[0].bytes();
        let scales = inputs[1].reals::<f32>();
        let sources = inputs[2].ints();
        let token = |source: i32| usize::try_from(source).ok().map(|copy| copy / top_k);
        let [q, inv_scale, transposed, transposed_inv_scale] = outputs else { unreachable!("four outputs") };
        q.bytes().par_chunks_mut(width).zip(sources).for_each(|(row, &source)| match token(source) {
            Some(token) => row.copy_from_slice(&of_tokens[token * width..][..width]),
            None => row.fill(0),
        });
        let mut of_rows = inv_scale.fresh::<f32>();
        for (of_rows, of_tokens) in of_rows.chunks_exact_mut(sources.len()).zip(scales.chunks_exact(tokens)) {
            for (to, &source) in of_rows.iter_mut().zip(sources) {
                *to = token(source).map_or(1.0, |token| of_tokens[token]);
            }
        }
        drop(of_rows);
        let rows = dequantized(q.view(), inv_scale.view(), Scaling::Tile);
        let ty = TensorType::new(DType::F32, [sources.len(), width]);
        let view = View::new(ty, bytemuck::cast_slice(&rows[..]));
        Retile::TRANSPOSED.cast(Matrix { view, transposed: true }, None, transposed, transposed_inv_scale);
    }

    /// The rows in f32, and scales and amaxes of tiles.
    fn work_bytes(&self, inputs: &[TensorType], _: usize) -> usize {
        let (rows, width) = (inputs[2].numel(), inputs[0].shape[1]);
        let tiles = rows * width.div_ceil(TILE) + 2 * width * rows.div_ceil(TILE);
        size_of::<f32>() * (rows * width + tiles)
    }
}
