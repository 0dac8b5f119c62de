//! The groups of rows of a ragged tensor ([`crate::dispatch`]), one for each expert.

use crate::tail;
use xtrain_cuda::Header;
use xtrain_program::Tail;
use xtrain_tensor::TensorType;

/// How the rows of a ragged tensor are divided among experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Groups {
    /// E, the number of experts.
    pub experts: usize,
    /// The multiple at which the rows of an expert begin.
    pub align: usize,
    /// Rows that belong to tokens: tokens times experts per token. They determine the cost alone.
    pub live_rows: usize,
}

impl Groups {
    /// Bytes of the rows of tokens in a ragged tensor of so many rows.
    pub(crate) fn bytes(&self, ty: TensorType, rows: usize) -> f64 {
        tail::bytes(ty, rows, Tail::Undefined { live_rows: self.live_rows })
    }
}

/// Rows and columns of an output that a block of the kernels for all GPUs computes.
pub(crate) const TILE: usize = 64;

/// Device code of the kernels for all GPUs that finds the rows of a block; after that of tails.
pub(crate) const GROUPS: Header =
    Header::new("groups.cuh", include_str!("groups.cuh")).with_constants(&[&[("TILE", TILE as i64)]]);

/// Slots of row tiles: those of all groups, and those of the rows after them (`groups.cuh`).
pub(crate) fn slots(rows: usize, experts: usize) -> usize {
    rows / TILE + experts + 1
}
