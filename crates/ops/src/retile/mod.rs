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
use crate::tail;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Cost, Op, OpError, Operand, RaggedOp, Rebuild, Source, Tail};
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// `(q_td, sources_c i32, rows_tk i32[, inv_scale f32[p*ceil(d/128), t/p]]) -> (q_cd[, inv_scale
/// f32[ceil(d/128), c]]), (q_dc[, inv_scale f32[ceil(c/128), d]])`: permutes FP8 rows by experts
/// ([`Permute`](crate::permute::Permute)) into the [`Layouts`] of GEMMs. `rows` gives k alone. With one scale
/// for the tensor there are no scales here, and numbers are moved unchanged. With tiles, which are E4M3:
///
/// * The scales are those of p ranks, one after the other, each with t/p tokens.
/// * Row-major, a row has the numbers and scales of its token: tiles along a row are the token's own.
/// * Transposed, 128 rows share a power of two, that of their amax. If the scales of tokens are powers of two
///   as well, a number changes its exponent alone. It is exact if it stays a normal number, down to at least
///   2^-13.8 of the amax, and rounded to nearest even below.
///
/// Rows without a token are zeros with a scale of 1. t tokens, k experts of a token, d the width, c the rows
/// by experts, at most 65,535 tiles of 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Retile {
    /// The elements that share a scale: a tile or the tensor.
    pub scaling: Scaling,
    /// The layouts of the result.
    pub layouts: Layouts,
    /// The tails of all outputs.
    pub tail: Tail,
}

const _: () =
    assert!(MAX_ROWS / TILE_M <= u16::MAX as usize && TILE_M == TILE, "a grid has 65,535 blocks in y");

impl Retile {
    /// The cast of the transposed layout.
    const TRANSPOSED: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::Transposed);
    /// The index of the input with the scales.
    const SCALES: usize = 3;

    /// True if each tile has a scale.
    fn is_scaled(self) -> bool {
        self.scaling == Scaling::Tile
    }

    /// The axis along which an output is ragged, and the rows by experts for each index of that axis.
    fn ragged_axis(self, output: usize) -> (usize, usize) {
        let of_layout = self.outputs_of_layout();
        let transposed = !self.layouts.written()[0] || output >= of_layout;
        match (output % of_layout == 1, transposed) {
            (false, false) => (0, 1),
            (true, true) => (0, TILE),
            _ => (1, 1),
        }
    }

    /// Outputs of a layout: numbers and, if there are any, scales.
    fn outputs_of_layout(self) -> usize {
        1 + usize::from(self.is_scaled())
    }

    /// Checks the scales of the tokens `q`.
    fn check_scales(q: TensorType, inv_scale: TensorType) -> Result<(), OpError> {
        let (tokens, width) = q.shape.rows_cols();
        let tiles = width.div_ceil(TILE);
        let is_of_ranks = |rows: usize, of_rank: usize| {
            rows > 0 && rows.is_multiple_of(tiles) && rows / tiles * of_rank == tokens
        };
        let fits = matches!(*inv_scale.shape, [rows, of_rank] if is_of_ranks(rows, of_rank));
        OpError::ensure(inv_scale.dtype == DType::F32 && fits, || {
            format!(
                "the scales of {TILE} neighbours of {q} must be f32[{tiles}, {tokens}], or those of ranks with equally many \
                 tokens, not {inv_scale}"
            )
        })
    }
}

impl Op for Retile {
    fn name(&self) -> &'static str {
        "retile"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("retile", inputs, Retile::SCALES + usize::from(self.is_scaled()))?;
        let [q, sources, rows] = [0, 1, 2].map(|n| inputs[n]);
        let (tokens, width) = matrix("q", q)?;
        OpError::ensure(matches!(self.scaling, Scaling::Tile | Scaling::Tensor), || {
            format!("retile takes scales of tiles or of the tensor, not of {:?}", self.scaling)
        })?;
        let is_taken = q.dtype == DType::E4M3 || q.dtype == DType::E5M2 && !self.is_scaled();
        OpError::ensure(is_taken && q.numel() > 0, || {
            let or = if self.is_scaled() { "" } else { " or e5m2" };
            format!("q must be e4m3{or} that is not empty, not {q}")
        })?;
        if let Some(&inv_scale) = inputs.get(Retile::SCALES) {
            Retile::check_scales(q, inv_scale)?;
        }
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
        let shapes = [[ragged, width], [width, ragged]].into_iter().zip(self.layouts.written());
        let written = shapes.filter_map(|(shape, is_written)| is_written.then_some(shape));
        let of_layout = |[rows, cols]: [usize; 2]| {
            let scales = TensorType::new(DType::F32, self.scaling.shape(rows, cols));
            [TensorType::new(q.dtype, [rows, cols]), scales].into_iter().take(self.outputs_of_layout())
        };
        Ok(written.flat_map(of_layout).collect())
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let read: f64 = inputs.iter().map(|ty| ty.bytes() as f64).sum();
        let rows = inputs[1].numel();
        Cost::of_bytes(read + outputs.iter().map(|ty| tail::bytes(*ty, rows, self.tail)).sum::<f64>())
    }

    /// The transpose, which the backward reads: a gather from numbers that are saved.
    fn is_cheap(&self, output: usize) -> bool {
        self.layouts == Layouts::Both && output >= self.outputs_of_layout()
    }

    /// The layouts that are not saved.
    fn rebuild(&self, saved: &[bool]) -> Rebuild {
        let of_layout = self.outputs_of_layout();
        let first_of = |layout: usize| saved.get(layout * of_layout).copied();
        let (layouts, outputs) = match (self.layouts, first_of(0), first_of(1)) {
            (Layouts::Both, Some(true), Some(false)) => (Layouts::Transposed, of_layout..2 * of_layout),
            (Layouts::Both, Some(false), Some(true)) => (Layouts::RowMajor, 0..of_layout),
            _ => (self.layouts, 0..saved.len()),
        };
        let inputs = (0..Retile::SCALES + usize::from(self.is_scaled())).map(Source::Input).collect();
        let op = Arc::new(Retile { layouts, ..*self });
        Rebuild::By { op, inputs, outputs: outputs.collect() }
    }
}

impl RaggedOp for Retile {
    fn tail(&self, _: usize) -> Option<Tail> {
        Some(self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        Some(Arc::new(Retile { tail, ..*self }))
    }
}

impl OnGpu for Retile {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
