//! The matrices whose updates ranks exchange together, so that each rank has all rows of one of them.

use super::Updated;
use std::collections::HashMap;
use xtrain_program::{RowShard, Tracer};
use xtrain_rank::{Groups, Rank};
use xtrain_tensor::TensorType;

/// Some matrices of one shape, at most as many as ranks exchange their rows. Each rank orthogonalises one.
/// Without an exchange it is one matrix, or the rows of it that a rank has, in whole parts.
pub(super) struct MatrixExchange<'a> {
    /// The matrices. The rank at the place n of its group has the rows of the n-th.
    pub(super) matrices: Vec<Updated<'a>>,
    /// The ranks.
    pub(super) groups: Groups,
    /// Rows of the parts of a matrix, or of the rows of it that the ranks have.
    pub(super) parts: Vec<usize>,
    /// The place of the rank that has the first rows of this rank's matrix.
    pub(super) first: usize,
}

/// Everything in which the matrices of an exchange are equal.
#[derive(Clone, PartialEq, Eq, Hash)]
struct MatrixKind {
    /// The rows of a rank, with their padding.
    piece: TensorType,
    groups: Groups,
    parts: Vec<usize>,
}

/// The exchanges of these matrices, in the order of the first matrix of each, and of their `rank`.
///
/// Their number is that of matrices of a shape over the ranks, rounded up. Each rank computes in each, so a
/// step takes equally long on all, whatever rows they have.
pub(super) fn exchanges<'a>(t: &Tracer, matrices: &[Updated<'a>], rank: Rank) -> Vec<MatrixExchange<'a>> {
    let mut exchanges: Vec<MatrixExchange<'a>> = Vec::new();
    let mut open: HashMap<MatrixKind, usize> = HashMap::new();
    for matrix in matrices {
        let piece = t.ty(matrix.parameter.master);
        let parts = matrix.spec.parts.of_expert();
        let (groups, rows) = ranks_of_whole_parts(piece, matrix.parameter.shard, parts.iter().sum());
        let first = match matrix.parameter.shard {
            Some(shard) if groups == shard.groups => shard.first,
            _ => 0,
        };
        let parts = parts.iter().copied().cycle().scan(0, |end, part| {
            *end += part;
            (*end <= rows).then_some(part)
        });
        let kind = MatrixKind { piece, groups, parts: parts.collect() };
        let at = *open.entry(kind.clone()).or_insert_with(|| {
            let MatrixKind { groups, parts, .. } = kind.clone();
            exchanges.push(MatrixExchange { matrices: Vec::new(), groups, parts, first: 0 });
            exchanges.len() - 1
        });
        let exchange = &mut exchanges[at];
        if exchange.matrices.len() == groups.place(rank.index) {
            exchange.first = first;
        }
        exchange.matrices.push(*matrix);
        if exchange.matrices.len() == groups.size {
            open.remove(&kind);
        }
    }
    exchanges
}

/// The fewest neighbouring ranks that together have whole repetitions of the parts, each of so many rows, and
/// the rows that they have without padding. Ranks with whole experts are alone.
fn ranks_of_whole_parts(piece: TensorType, shard: Option<RowShard>, repetition: usize) -> (Groups, usize) {
    let Some(shard) = shard else { return (Groups::world(1), piece.shape[0]) };
    let (n, each) = (shard.groups.size, shard.piece_rows);
    let has_whole_parts = |size: &usize| n.is_multiple_of(*size) && (size * each).is_multiple_of(repetition);
    match (1..n).find(has_whole_parts).filter(|_| shard.rows == n * each) {
        Some(size) => (Groups { size, ..shard.groups }, size * each),
        None => (shard.groups, shard.rows),
    }
}
