//! Range of an axis: all values, unless a few of them would flatten the rest.

use super::axis::{Axis, Scale};
use super::thin::Point;

/// The axis for the finite values of `curves`; `None` if there are none.
///
/// Where the highest hundredth of a curve (but not its first value: a loss begins high) is further from the
/// rest than half the rest's height, the axis ends below it; [`outside`] counts what is left out. The axis is
/// logarithmic where the rest spans more than a factor of `log_above` and nothing is negative.
pub(super) fn axis_of(curves: &[&[Point]], log_above: f64) -> Option<Axis> {
    let range = Range::from_curves(curves)?;
    if range.low >= 0.0
        && let Some(lowest) = lowest_positive(curves)
        && range.core / lowest > log_above
    {
        // A logarithmic axis has room for spikes, up to a point.
        let high = if range.high < 100.0 * range.core { range.high } else { range.core };
        return Some(Axis::log(lowest / 1.15, high * 1.15));
    }
    let high = range.without_spikes();
    let pad = (high - range.low) * 0.05;
    // A quantity without negative values gets no negative axis.
    let floor = if range.low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
    Some(Axis::linear((range.low - pad).max(floor), high + pad, 5))
}

/// A linear axis that has zero on it.
pub(super) fn axis_from_zero(curves: &[&[Point]]) -> Option<Axis> {
    let range = Range::from_curves(curves)?;
    let (low, high) = (range.low.min(0.0), range.without_spikes().max(0.0));
    let pad = (high - low) * 0.06;
    Some(Axis::linear(if low < 0.0 { low - pad } else { low }, high + pad, 4))
}

/// Finite values of `curves` that lie outside of `axis`.
pub(super) fn outside(curves: &[&[Point]], axis: &Axis) -> usize {
    let inside =
        |value: f64| value >= axis.low && value <= axis.high && (axis.scale == Scale::Linear || value > 0.0);
    let values = curves.iter().flat_map(|curve| curve.iter().map(|point| point.1));
    values.filter(|&value| value.is_finite() && !inside(value)).count()
}

/// Range of the finite values of some curves.
struct Range {
    low: f64,
    high: f64,
    /// The highest of the curves' first values and of their other values without the highest hundredth.
    core: f64,
}

impl Range {
    fn from_curves(curves: &[&[Point]]) -> Option<Self> {
        let mut range = Self { low: f64::INFINITY, high: f64::NEG_INFINITY, core: f64::NEG_INFINITY };
        for curve in curves {
            let mut values = finite(curve);
            let Some(&first) = values.first() else { continue };
            // Among few values none counts as a spike; among some, the highest may.
            let spikes = if values.len() < 20 { 0 } else { (values.len() / 100).max(1) };
            let at = values.len() - 1 - spikes;
            let (_, &mut upper, _) = values.select_nth_unstable_by(at, f64::total_cmp);
            range.low = values.iter().fold(range.low, |low, &value| low.min(value));
            range.high = values.iter().fold(range.high, |high, &value| high.max(value));
            range.core = range.core.max(upper).max(first);
        }
        (range.low <= range.high).then_some(range)
    }

    fn without_spikes(&self) -> f64 {
        let spiked = self.core > self.low && self.high - self.core > 0.5 * (self.core - self.low);
        if spiked { self.core } else { self.high }
    }
}

/// The lowest positive value, after the lowest thousandth is ignored.
fn lowest_positive(curves: &[&[Point]]) -> Option<f64> {
    let mut values: Vec<f64> =
        curves.iter().flat_map(|curve| finite(curve)).filter(|&value| value > 0.0).collect();
    let at = values.len() / 1000;
    (!values.is_empty()).then(|| *values.select_nth_unstable_by(at, f64::total_cmp).1)
}

fn finite(curve: &[Point]) -> Vec<f64> {
    curve.iter().map(|point| point.1).filter(|value| value.is_finite()).collect()
}
