//! The cut of a parameter by rows among ranks.

use std::ops::Range;
use xtrain_rank::Groups;
use xtrain_tensor::{Shape, TensorType};

/// The cut of a tensor by rows among the ranks of a group.
///
/// A tensor is cut along its first dimension into as many pieces as there are ranks. All pieces have the same
/// rows, so the last ones may end after the tensor, or lie after it: their rows there are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShard {
    /// The ranks.
    pub groups: Groups,
    /// The rank of the first piece. Piece i belongs to the rank `(first + i) % n` of the n of a group.
    pub first: usize,
    /// Rows of a piece, padding included.
    pub piece_rows: usize,
    /// Rows of the tensor.
    pub rows: usize,
}

/// The ranks that share a parameter. All ranks of the run are `parts.size * shard.groups.size *
/// replicas.size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParameterCut {
    /// Ranks that compute with different parts of the parameter: its rows in as many equal runs. Experts may
    /// be cut so; of other parameters each rank computes with the whole.
    pub parts: Groups,
    /// The cut of a part among the ranks that compute with it.
    pub shard: RowShard,
    /// Ranks that have equal rows.
    pub replicas: Groups,
}

impl ParameterCut {
    /// Rows of the parameter.
    pub const fn rows(&self) -> usize {
        self.parts.size * self.shard.rows
    }

    /// The rows of the parameter that `rank` of the run computes with.
    pub fn part_of(&self, rank: usize) -> Range<usize> {
        let begin = self.parts.place(rank) * self.shard.rows;
        begin..begin + self.shard.rows
    }

    /// The rows of the parameter that `rank` of the run holds, if each has its rows alone; empty if its piece
    /// is all padding.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        let (begin, rows) = (self.part_of(rank).start, self.shard.rows_of(rank));
        begin + rows.start..begin + rows.end
    }
}

impl RowShard {
    /// The rows of the tensor that `rank` of the run holds; empty if its piece is all padding.
    pub fn rows_of(&self, rank: usize) -> Range<usize> {
        let n = self.groups.size;
        let begin = (self.groups.place(rank) + n - self.first) % n * self.piece_rows;
        let end = begin + self.piece_rows;
        begin.min(self.rows)..end.min(self.rows)
    }

    /// The type of a piece of a tensor.
    pub fn piece(&self, whole: TensorType) -> TensorType {
        with_rows(whole, self.piece_rows)
    }

    /// The type of the tensor of a piece.
    pub fn whole(&self, piece: TensorType) -> TensorType {
        with_rows(piece, self.rows)
    }
}

/// `ty` with another number of rows.
fn with_rows(ty: TensorType, rows: usize) -> TensorType {
    TensorType { shape: Shape::new(&[&[rows], &ty.shape[1..]].concat()), ..ty }
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

impl Rows {
    /// The number of units, of which the last may have fewer rows.
    pub const fn units(&self) -> usize {
        self.rows.div_ceil(self.unit)
    }
}

/// The cuts of these parameters among the ranks of `group`.
///
/// Every piece has `ceil(units / n)` units. A parameter that divides equally starts at rank 0. The others
/// start at different ranks: each, from the largest on, where the ranks of its pieces hold least so far.
pub fn cut(parameters: &[Rows], groups: Groups) -> Vec<RowShard> {
    let n = groups.size;
    let mut order: Vec<usize> = (0..parameters.len()).collect();
    order.sort_by_key(|&p| std::cmp::Reverse(parameters[p].rows * parameters[p].row_elements));
    let mut cuts = vec![RowShard { groups, first: 0, piece_rows: 0, rows: 0 }; parameters.len()];
    let mut elements_of = vec![0usize; n];
    for p in order {
        let Rows { rows, row_elements, unit } = parameters[p];
        let piece_rows = parameters[p].units().div_ceil(n) * unit;
        cuts[p] = RowShard { groups, first: 0, piece_rows, rows };
        if rows == n * piece_rows {
            // All ranks hold equally much of it, so it makes no difference to the others.
            continue;
        }
        // Pieces without padding, and the elements of the piece after them.
        let (full, rest) = (rows / piece_rows, rows % piece_rows * row_elements);
        let twice = elements_of.iter().chain(&elements_of);
        let sums = twice.scan(0, |sum, &elements| {
            *sum += elements as u128;
            Some(*sum)
        });
        let sums: Vec<u128> = std::iter::once(0).chain(sums).collect();
        // With the least sum of products, the squares of the sums add up to the least.
        let load = |first: &usize| -> u128 {
            let of_full = (piece_rows * row_elements) as u128 * (sums[first + full] - sums[*first]);
            of_full + rest as u128 * elements_of[(first + full) % n] as u128
        };
        cuts[p].first = (0..n).min_by_key(load).unwrap_or(0);
        for (rank, elements) in elements_of.iter_mut().enumerate() {
            *elements += cuts[p].rows_of(rank).len() * row_elements;
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parameters() -> impl Strategy<Value = Vec<Rows>> {
        let unit = prop_oneof![Just(1usize), Just(4), Just(128)];
        let parameter = (1usize..1000, 1usize..50, unit).prop_map(|(rows, row_elements, unit)| Rows {
            rows,
            row_elements,
            unit,
        });
        prop::collection::vec(parameter, 1..20)
    }

    proptest! {
        #[test]
        fn ranks_have_all_rows_once_in_whole_units(parameters in parameters(), n in 1usize..9) {
            let cuts = cut(&parameters, Groups::world(n));
            for (cut, parameter) in cuts.iter().zip(&parameters) {
                prop_assert!(cut.first < n && cut.piece_rows.is_multiple_of(parameter.unit));
                prop_assert!(n * cut.piece_rows >= parameter.rows);
                // No rank could do with a unit less.
                prop_assert!(n * (cut.piece_rows - parameter.unit) < parameter.rows);
                let mut end = 0;
                for piece in 0..n {
                    let rows = cut.rows_of((cut.first + piece) % n);
                    prop_assert!(rows.start == end && rows.len() <= cut.piece_rows);
                    prop_assert!(rows.start.is_multiple_of(parameter.unit) || rows.is_empty());
                    end = rows.end;
                }
                prop_assert_eq!(end, parameter.rows);
            }
        }

        #[test]
        fn a_parameter_starts_where_ranks_hold_least(parameters in parameters(), n in 1usize..9) {
            let cuts = cut(&parameters, Groups::world(n));
            let mut order: Vec<usize> = (0..parameters.len()).collect();
            order.sort_by_key(|&p| std::cmp::Reverse(parameters[p].rows * parameters[p].row_elements));
            let mut held = vec![0; n];
            for p in order {
                let of = |first, rank| {
                    RowShard { first, ..cuts[p] }.rows_of(rank).len() * parameters[p].row_elements
                };
                let load = |first: &usize| -> usize { (0..n).map(|rank| of(*first, rank) * held[rank]).sum() };
                let is_even = cuts[p].rows == n * cuts[p].piece_rows;
                let first = if is_even { Some(0) } else { (0..n).min_by_key(load) };
                prop_assert_eq!(Some(cuts[p].first), first);
                held = (0..n).map(|rank| held[rank] + of(cuts[p].first, rank)).collect();
            }
        }

        #[test]
        fn ranks_hold_almost_equally_much(parameters in parameters(), n in 1usize..9) {
            let cuts = cut(&parameters, Groups::world(n));
            let held = |rank: usize| -> usize {
                let of = |(cut, parameter): (&RowShard, &Rows)| cut.rows_of(rank).len() * parameter.row_elements;
                cuts.iter().zip(&parameters).map(of).sum()
            };
            let held: Vec<usize> = (0..n).map(held).collect();
            let (most, fewest) = (held.iter().max().copied(), held.iter().min().copied());
            let pieces = cuts.iter().zip(&parameters).map(|(cut, p)| cut.piece_rows * p.row_elements);
            let largest = pieces.max().unwrap_or(0);
            prop_assert!(most <= fewest.map(|fewest| fewest + 2 * largest), "{held:?}, pieces up to {largest}");
        }

        #[test]
        fn a_parameter_that_divides_equally_starts_at_the_first_rank(n in 1usize..9, each in 1usize..5) {
            let even = Rows { rows: n * each * 4, row_elements: 3, unit: 4 };
            let uneven = Rows { rows: 5, row_elements: 1000, unit: 4 };
            let cuts = cut(&[even, uneven, even], Groups::world(n));
            prop_assert_eq!([cuts[0].first, cuts[2].first], [0, 0]);
        }

        #[test]
        fn parameters_of_one_unit_are_spread_evenly(n in 2usize..9, each in 1usize..5) {
            let one = Rows { rows: 100, row_elements: 3, unit: 128 };
            let cuts = cut(&vec![one; n * each], Groups::world(n));
            for rank in 0..n {
                let held = cuts.iter().filter(|cut| !cut.rows_of(rank).is_empty()).count();
                prop_assert_eq!(held, each);
            }
        }
    }
}
