//! The cut of a parameter by rows among ranks.

use crate::Group;
use std::ops::Range;

/// The cut of a parameter by rows among the ranks of a group.
///
/// A parameter is cut along its first dimension into as many pieces as there are ranks. All pieces have the
/// same rows, so the last ones may end after the parameter, or lie after it: their rows there are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShard {
    /// The ranks.
    pub group: Group,
    /// The rank of the first piece. Piece i belongs to the rank `(first + i) % n` of n.
    pub first: usize,
    /// Rows of a piece, padding included.
    pub piece_rows: usize,
    /// Rows of the parameter.
    pub rows: usize,
}

impl RowShard {
    /// The rows of the parameter that `rank` holds; empty if its piece is all padding.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        let n = self.group.size();
        let begin = (rank + n - self.first) % n * self.piece_rows;
        let end = begin + self.piece_rows;
        begin.min(self.rows)..end.min(self.rows)
    }
}

/// A parameter to cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Its rows: its first extent.
    pub rows: usize,
    /// Elements of a row.
    pub row_elements: usize,
    /// Rows that one piece holds together.
    pub unit: usize,
}

/// The cuts of these parameters among the ranks of `group`.
///
/// Every piece has `ceil(units / n)` units. Parameters whose units the ranks cannot share equally start at
/// different ranks: each, from the largest on, where the ranks of its pieces hold least so far.
pub fn cut(parameters: &[Rows], group: Group) -> Vec<RowShard> {
    let n = group.size();
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&p| std::cmp::Reverse(parameters[p].rows * parameters[p].row_elements));
    let mut cuts = vec![RowShard { group, first: 0, piece_rows: 0, rows: 0 }; parameters.len()];
    let mut elements_of = vec![0usize; n];
    for p in order {
        let Rows { rows, row_elements, unit } = parameters[p];
        let piece_rows = rows.div_ceil(unit).div_ceil(n) * unit;
        let starting_at = |first| RowShard { group, first, piece_rows, rows };
        let held = |shard: &RowShard, rank| shard.rows_of(rank).len() * row_elements;
        // With the least sum of products, the squares of the sums add up to the least.
        let load = |first: &usize| -> u128 {
            let shard = starting_at(*first);
            (0..n).map(|rank| held(&shard, rank) as u128 * elements_of[rank] as u128).sum()
        };
        let is_even = rows == n * piece_rows;
        let first = if is_even { 0 } else { (0..n).min_by_key(load).unwrap_or(0) };
        cuts[p] = starting_at(first);
        for (rank, elements) in elements_of.iter_mut().enumerate() {
            *elements += held(&cuts[p], rank);
        }
    }
    cuts
}
