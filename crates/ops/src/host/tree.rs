//! Sums as a binary tree over their operands, in which some may be absent.

use super::math::vectorized;
use super::rows::add_into;
use xtrain_tensor::{Pooled, Real, View};

/// The sum of `count` leaves from `first` on: that of the largest power of two before the last leaf, and that
/// of the others, each a tree again. An absent leaf is left out, and not added as 0; None if all are absent.
pub(crate) fn sum<T: Real>(
    leaf: &impl Fn(usize) -> Option<Pooled<T>>,
    first: usize,
    count: usize,
) -> Option<Pooled<T>> {
    if count == 1 {
        return leaf(first);
    }
    let half = count.next_power_of_two() / 2;
    plus(sum(leaf, first, half), sum(leaf, first + half, count - half))
}

/// An operand: the n-th row of x, widened.
pub(crate) fn row<T: Real>(x: View<'_>, n: usize) -> Pooled<T> {
    let mut values = Pooled::take(x.ty.shape.rows_cols().1);
    x.rows(n..n + 1).widen_into(&mut values);
    values
}

/// Writes the sum of two operands, of which any may be absent; zeros if both are.
pub(crate) fn write_sum<T: Real>(to: &mut [T], left: Option<Pooled<T>>, right: Option<Pooled<T>>) {
    match plus(left, right) {
        Some(sum) => to.copy_from_slice(&sum),
        None => to.fill(T::ZERO),
    }
}

/// The sum of two operands, of which any may be absent.
pub(crate) fn plus<T: Real>(left: Option<Pooled<T>>, right: Option<Pooled<T>>) -> Option<Pooled<T>> {
    match (left, right) {
        (Some(mut left), Some(right)) => {
            vectorized(
                #[inline(always)]
                || add_into(&mut left, &right),
            );
            Some(left)
        }
        (left, right) => left.or(right),
    }
}
