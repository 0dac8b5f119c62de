//! FP8 copies of parameters of which ranks gather 8-bit numbers.
//!
//! Each rank casts its rows, with the scales that the cast of the whole would have: delayed scales are known,
//! those of rows and blocks depend on these rows alone, and those of the tensor and of columns come from the
//! amaxes of all ranks ([`crate::refresh`]). So the copies have the bits of one process. Numbers are gathered
//! row-major, and transposed for the GEMMs that read the other layout; only scales by columns are of other
//! numbers than scales by rows.

use super::ShardOps;
use crate::{Op, Program, Quantized, QuantizedRows, RowShard, ValueId};
use std::sync::Arc;
use xtrain_tensor::{Scaling, Shape, TILE, TensorType};

/// The origin of a value that instances read as a part of an FP8 copy.
pub(super) enum CopySource {
    /// Scales that every rank computes.
    Held(ValueId),
    /// The rows of all ranks.
    Gathered(RankRows),
    /// Their transpose.
    Transposed(RankRows, Arc<dyn Op>),
}

/// Rows of this rank.
#[derive(Clone, Copy)]
pub(super) struct RankRows {
    pub(super) piece: ValueId,
    pub(super) cut: RowShard,
    /// The type of all rows.
    pub(super) whole: TensorType,
}

/// The casts of this rank's rows that replace the cast of the whole.
#[derive(Default)]
pub(super) struct Cut {
    pub(super) rows: Vec<QuantizedRows>,
    /// The values of the copies with their sources.
    pub(super) sources: Vec<(ValueId, CopySource)>,
}

/// True if ranks can gather the 8-bit numbers of these copies. Scales of tiles are not cut by rows.
pub(super) fn is_possible(copies: &Quantized) -> bool {
    copies.quantization.scaling != Scaling::Tile
}

/// Replaces the cast of a whole parameter with casts of rows. `piece_of` returns the value for the rows, of
/// this type, of a value of the copies.
pub(super) fn cut(
    program: &mut Program,
    copies: &Quantized,
    cut: RowShard,
    ops: &dyn ShardOps,
    piece_of: impl Fn(&mut Program, ValueId, TensorType) -> ValueId,
) -> Cut {
    let scaling = copies.quantization.scaling;
    let written = [false, true].into_iter().zip(copies.layouts).filter(|(_, is_written)| *is_written);
    let mut out = Cut::default();
    let mut of_rows: Option<[RankRows; 2]> = None;
    for ((transposed, _), &[numbers, scales]) in written.zip(copies.values.as_chunks::<2>().0) {
        let ty = program.ty(numbers);
        let (rows, cols) = ty.shape.rows_cols();
        let (rows, cols) = if transposed { (cols, rows) } else { (rows, cols) };
        let whole = TensorType { shape: Shape::new(&[rows, cols]), ..ty };
        let whole_scales = TensorType { shape: Shape::new(&scaling.shape(rows, cols)), ..program.ty(scales) };
        let by_column = transposed && scaling == Scaling::Row;
        let is_held = scaling == Scaling::Tensor || by_column;
        let [of_numbers, of_scales] = match of_rows.filter(|_| !by_column) {
            Some(earlier) => earlier,
            None => {
                let scale_cut = match scaling {
                    Scaling::Block => by_blocks(cut),
                    Scaling::Tensor | Scaling::Row | Scaling::Tile => cut,
                };
                let mut rows_of = |value, cut: RowShard, whole| {
                    let piece = piece_of(program, value, cut.piece(whole));
                    RankRows { piece, cut, whole }
                };
                let numbers = rows_of(numbers, cut, whole);
                let scales = match is_held {
                    true => RankRows { piece: scales, cut: scale_cut, whole: whole_scales },
                    false => rows_of(scales, scale_cut, whole_scales),
                };
                out.rows.push(QuantizedRows {
                    quantization: copies.quantization,
                    by_column,
                    origin: copies.origin.clone(),
                    numbers: numbers.piece,
                    scales: scales.piece,
                    delayed: copies.delayed.clone(),
                });
                [numbers, scales]
            }
        };
        of_rows = Some([of_numbers, of_scales]);
        out.sources.push((
            numbers,
            match transposed {
                true => CopySource::Transposed(of_numbers, ops.transpose_bytes()),
                false => CopySource::Gathered(of_numbers),
            },
        ));
        out.sources.push((
            scales,
            match (is_held, transposed) {
                (true, _) => CopySource::Held(of_scales.piece),
                (false, true) => CopySource::Transposed(of_scales, ops.transpose_block_scales(cols)),
                (false, false) => CopySource::Gathered(of_scales),
            },
        ));
    }
    out
}

/// The cut of scales by blocks of a parameter that is cut so. Its units are whole blocks.
fn by_blocks(cut: RowShard) -> RowShard {
    RowShard { piece_rows: cut.piece_rows / TILE, rows: cut.rows.div_ceil(TILE), ..cut }
}
