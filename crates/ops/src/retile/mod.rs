//! Rows that are cast already, by experts, in the two layouts of FP8 GEMMs.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::matrix;
use crate::on_gpu::OnGpu;
use crate::permute::copies;
use crate::quantize::{Layouts, Quantize};
use crate::ragged::{MAX_ROWS, TILE_M};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// `(q_td, inv_scale f32[ceil(d/128), t], sources_c i32, rows_tk i32) -> (q_cd, inv_scale
/// f32[ceil(d/128), c], q_dc, inv_scale f32[ceil(c/128), d])`: permutes E4M3 rows by experts
/// ([`Permute`](crate::permute::Permute)), then casts the restored rows to the transposed layout. Both
/// layouts have tile scales. `rows` gives k alone.
///
/// * Row-major, a row has the numbers and scales of its token: tiles along a row are the token's own.
/// * Transposed, 128 rows share a power of two, that of their amax. If the scales of tokens are powers of two
///   as well, a number changes its exponent alone. It is exact if it stays a normal number, down to at least
///   2^-13.8 of the amax, and rounded to nearest even below.
///
/// Rows without a token are zeros with a scale of 1. t tokens, k experts of a token, d the width, c the rows
/// by experts, at most 65,535 tiles of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Retile;

const _: () =
    assert!(MAX_ROWS / TILE_M <= u16::MAX as usize && TILE_M == TILE, "a grid has 65,535 blocks in y");

impl Retile {
    /// The cast of the transposed layout.
    const TRANSPOSED: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::Transposed);
}

impl Op for Retile {
    fn name(&self) -> &'static str {
        "retile"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("retile", inputs, 4)?;
        let [q, inv_scale, sources, rows] = [0, 1, 2, 3].map(|n| inputs[n]);
        let (tokens, width) = matrix("q", q)?;
        OpError::ensure(q.dtype == DType::E4M3 && q.numel() > 0, || {
            format!("q must be e4m3 that is not empty, not {q}")
        })?;
        let of_tiles =
            |[rows, cols]: [usize; 2]| TensorType::new(DType::F32, Scaling::Tile.shape(rows, cols));
        let expected = of_tiles([tokens, width]);
        OpError::ensure(inv_scale == expected, || {
            format!("the scales of {TILE} neighbours of {q} must be {expected}, not {inv_scale}")
        })?;
        let [of, _] = copies(sources, rows)?;
        OpError::ensure(of == tokens, || format!("rows must be those of {tokens} tokens, not {rows}"))?;
        let ragged = sources.numel();
        OpError::ensure(ragged > 0, || "there must be at least 1 row by experts, not 0".into())?;
        OpError::ensure(ragged <= MAX_ROWS, || {
            format!(
                "retile launches blocks for up to {MAX_ROWS} rows by experts, and {ragged} are too many: use smaller \
                 micro-batches or fewer ranks"
            )
        })?;
        let layouts = [[ragged, width], [width, ragged]];
        Ok(layouts.into_iter().flat_map(|shape| [TensorType::new(q.dtype, shape), of_tiles(shape)]).collect())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// A gather from tensors that are saved.
    fn is_cheap(&self, _: usize) -> bool {
        true
    }
}

impl OnGpu for Retile {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
