//! Rows of tensors, and the pieces of rows that have a checksum each.
//!
//! Rows are slices along dimension 0. A tensor without dimensions is one row, and so is one in a packed
//! format, whose rows need not be whole bytes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::TensorSpec;
use crate::error::{CheckpointError, Result};
use crate::tensor_file::StoredDtype;
use xtrain_tensor::DType;

/// Size of pieces of small tensors: large enough that a disk reads one at its full speed.
const MIN_PIECE_BYTES: usize = 4 << 20;

/// Maximum size of a piece with more than one row.
const MAX_PIECE_BYTES: usize = 64 << 20;

/// Pieces of a tensor between the two limits. A reader of a part of the rows reads up to two pieces of which
/// it needs a part, so this bounds what it reads in addition.
const PIECES: usize = 64;

/// Consecutive rows of a tensor in one file, and the hash of their bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Piece {
    /// Index of the file.
    pub(super) file: usize,
    #[serde(with = "bounds")]
    pub(super) rows: Range<usize>,
    #[serde(with = "super::hex")]
    pub(super) xxh3: u64,
}

impl TensorSpec {
    /// Number of rows: the size of dimension 0, or 1 for a scalar or a packed format.
    pub fn rows(&self) -> usize {
        if self.is_divisible() { self.shape[0] } else { 1 }
    }

    /// Size of a row in bytes. The size of the tensor must not overflow.
    pub fn row_bytes(&self) -> usize {
        self.bytes().unwrap_or(0) / self.rows().max(1)
    }

    /// Size of the tensor in bytes; `None` if it overflows.
    pub(crate) fn bytes(&self) -> Option<usize> {
        let numel = self.shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))?;
        numel.checked_mul(self.dtype.bits())?;
        Some(self.dtype.bytes(numel))
    }

    fn is_divisible(&self) -> bool {
        !self.shape.is_empty() && self.dtype.bits().is_multiple_of(8)
    }

    /// The pieces of `rows`, in order, of which none is empty. Their sizes depend on the tensor alone, so
    /// that all writers cut it alike.
    pub(super) fn pieces(&self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
        let piece_bytes = (self.bytes().unwrap_or(0) / PIECES).clamp(MIN_PIECE_BYTES, MAX_PIECE_BYTES);
        let piece_rows = match self.row_bytes() {
            0 => self.rows().max(1),
            row_bytes => (piece_bytes / row_bytes).max(1),
        };
        let end = rows.end;
        rows.step_by(piece_rows).map(move |start| start..end.min(start.saturating_add(piece_rows)))
    }

    /// Type and shape of `rows` rows in a safetensors file. Packed formats are stored as bytes.
    pub(super) fn stored(&self, rows: usize) -> (StoredDtype, Vec<usize>) {
        let dtype = match self.dtype {
            DType::F64 => StoredDtype::F64,
            DType::F32 => StoredDtype::F32,
            DType::BF16 => StoredDtype::BF16,
            DType::E4M3 => StoredDtype::F8_E4M3,
            DType::E5M2 => StoredDtype::F8_E5M2,
            DType::E5M6 => return (StoredDtype::U8, vec![self.bytes().unwrap_or(0)]),
            DType::U8 => StoredDtype::U8,
            DType::I32 => StoredDtype::I32,
            DType::U32 => StoredDtype::U32,
        };
        let mut shape = self.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = rows;
        }
        (dtype, shape)
    }

    /// The tensor and these rows of it, for errors. All rows are not worth a mention.
    pub(super) fn place(&self, rows: &Range<usize>) -> String {
        let name = &self.name;
        match rows.len() {
            _ if *rows == (0..self.rows()) => format!("tensor '{name}'"),
            1 => format!("tensor '{name}', row {}", rows.start),
            _ => format!("tensor '{name}', rows {} to {}", rows.start, rows.end.saturating_sub(1)),
        }
    }
}

/// Checks that tensors have these rows; otherwise it is a bug of the caller.
pub(super) fn check_rows(tensors: &[TensorSpec], rows: &[Range<usize>]) -> Result<()> {
    if tensors.len() != rows.len() {
        let problem = format!("rows of {} tensors, but there are {}", rows.len(), tensors.len());
        return Err(CheckpointError::Internal(problem));
    }
    let mut pairs = tensors.iter().zip(rows);
    match pairs.find(|(spec, rows)| rows.start > rows.end || rows.end > spec.rows()) {
        None => Ok(()),
        Some((TensorSpec { name, .. }, Range { start, end })) => {
            Err(CheckpointError::Internal(format!("tensor '{name}' has no rows {start} to {end}")))
        }
    }
}

/// Serialization of a range as `[start, end]`.
mod bounds {
    use std::ops::Range;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(range: &Range<usize>, out: S) -> Result<S::Ok, S::Error> {
        (range.start, range.end).serialize(out)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(parser: D) -> Result<Range<usize>, D::Error> {
        let (start, end) = Deserialize::deserialize(parser)?;
        Ok(start..end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn spec(dtype: DType, shape: &[usize]) -> TensorSpec {
        TensorSpec { name: "t".to_string(), dtype, shape: shape.to_vec() }
    }

    #[test]
    fn rows_are_slices_along_the_first_dimension() {
        let rows = |dtype, shape: &[usize]| {
            let spec = spec(dtype, shape);
            (spec.rows(), spec.row_bytes())
        };
        assert_eq!(rows(DType::F32, &[3, 5, 2]), (3, 40));
        assert_eq!(rows(DType::BF16, &[7]), (7, 2));
        assert_eq!(rows(DType::U32, &[]), (1, 4));
        assert_eq!(rows(DType::F32, &[0, usize::MAX, 3]), (0, 0));
        assert_eq!(rows(DType::F32, &[5, 0]), (5, 0));
        assert_eq!(rows(DType::E5M6, &[4, 3]), (1, 18));
    }

    #[test]
    fn pieces_hold_a_64th_of_a_tensor_but_4_to_64_mib() {
        let first = |shape: &[usize]| {
            let spec = spec(DType::F32, shape);
            let piece = spec.pieces(0..spec.rows()).next().unwrap();
            piece.len() * spec.row_bytes()
        };
        assert_eq!(first(&[4096, 4096]), 4 << 20);
        assert_eq!(first(&[1 << 15, 1 << 14]), 32 << 20);
        assert_eq!(first(&[1 << 18, 1 << 14]), 64 << 20);
        assert_eq!(first(&[3, 1 << 26]), 256 << 20, "one row at least");
        let empty = spec(DType::F32, &[usize::MAX, 0]);
        assert_eq!(empty.pieces(0..usize::MAX).count(), 1);
        assert_eq!(empty.pieces(4..4).count(), 0);
    }

    proptest! {
        #[test]
        fn pieces_cover_the_rows_in_order(start in 0usize..5000, len in 0usize..5000, columns in 1usize..20_000) {
            let spec = spec(DType::F64, &[10_000, columns]);
            let mut next = start;
            for piece in spec.pieces(start..start + len) {
                prop_assert!(piece.start == next && !piece.is_empty());
                next = piece.end;
            }
            prop_assert_eq!(next, start + len);
        }
    }
}
