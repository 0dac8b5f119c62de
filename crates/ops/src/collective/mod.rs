//! Collectives: all-gather, all-to-all and reduce-scatter of tensors that are cut by rows among the ranks of
//! a group, and messages from one rank to another.
//!
//! They have no kernels; engines move the data ([`xtrain_program::Collective`]). A piece has a fixed number
//! of rows, because the program is the same on every rank. If the pieces have more rows than the tensor, the
//! rows after the last are padding: zeros where they are received, and dropped where the tensor is gathered.
//! An op names no rank. `first`, the rank of the first piece, differs by tensor, so that the pieces of
//! tensors with few rows spread over all ranks.

mod all_gather;
mod all_to_all;
mod message;
mod reduce_scatter;
#[cfg(test)]
mod tests;

pub use all_gather::AllGather;
pub use all_to_all::AllToAll;
pub use message::{Receive, Send, SendReceive};
pub use reduce_scatter::ReduceScatter;

use xtrain_program::{Groups, OpError};
use xtrain_tensor::{Shape, TensorType};

/// The extents of `ty` after the first.
///
/// # Errors
/// If `ty` has no rows, or its rows end within a byte.
fn row(op: &str, ty: TensorType) -> Result<Shape, OpError> {
    let Some((_, row)) = ty.shape.split_first() else {
        return Err(OpError(format!("{op} cuts tensors by rows, and {ty} has none")));
    };
    let row = Shape::new(row);
    OpError::ensure((row.numel() * ty.dtype.bits()).is_multiple_of(8), || {
        format!("{op} moves whole bytes, and a row of {ty} ends within one")
    })?;
    Ok(row)
}

/// Checks that pieces of `piece_rows` rows, the first of which belongs to the rank `first`, hold `rows` rows.
fn check_pieces(groups: Groups, first: usize, piece_rows: usize, rows: usize) -> Result<(), OpError> {
    let size = groups.size;
    OpError::ensure(first < size, || format!("the first piece belongs to rank {first} of {size}"))?;
    OpError::ensure(rows <= size * piece_rows, || {
        format!("{size} pieces of {piece_rows} rows cannot hold {rows} rows")
    })
}
