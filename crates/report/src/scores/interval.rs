//! The score of a task with its 95% interval: Wilson's for accuracy, Student's t for other means, and
//! cluster-robust errors where rows are not independent.

use super::items::{Clusters, ItemScores};
use super::student::{NORMAL_95, t_95};
use serde::Serialize;

/// A 95% confidence interval, in the unit of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Interval {
    pub(super) fn around(center: f64, half_width: f64) -> Self {
        Self { low: center - half_width, high: center + half_width }
    }

    /// The part in which means of shares lie.
    fn within_shares(self) -> Self {
        Self { low: self.low.max(0.0), high: self.high.min(1.0) }
    }

    /// Half of its width.
    pub fn half_width(&self) -> f64 {
        0.5 * (self.high - self.low)
    }

    /// The interval in points, hundredths of the score's unit.
    pub fn in_points(&self) -> Self {
        Self { low: 100.0 * self.low, high: 100.0 * self.high }
    }

    /// True if all of it lies between -`limit` and `limit`.
    pub(super) fn is_within(&self, limit: f64) -> bool {
        self.low >= -limit && self.high <= limit
    }

    /// True if all of it lies below -`limit` or above `limit`.
    pub(super) fn is_beyond(&self, limit: f64) -> bool {
        self.high < -limit || self.low > limit
    }
}

/// Wilson's interval of a proportion p, `right` of n `rows`, without continuity correction (Wilson, JASA 22,
/// 1927; Brown, Cai and DasGupta, Statistical Science 16, 2001):
/// `(p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n)`.
///
/// `None` without rows, or if more are right than there are.
pub fn wilson(right: u64, rows: u64) -> Option<Interval> {
    if rows == 0 || right > rows {
        return None;
    }
    let (k, n, z2) = (right as f64, rows as f64, NORMAL_95 * NORMAL_95);
    let center = (k + 0.5 * z2) / (n + z2);
    let half_width = NORMAL_95 / (n + z2) * (k * (n - k) / n + 0.25 * z2).sqrt();
    let Interval { low, high } = Interval::around(center, half_width);
    // The ends are exact: rounding leaves no -1e-17.
    let low = if right == 0 { 0.0 } else { low };
    Some(Interval { low, high: if right == rows { 1.0 } else { high } })
}

/// Squared standard error of a mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MeanError {
    pub(super) variance: f64,
    /// Degrees of freedom of the variance.
    pub(super) degrees: f64,
}

impl MeanError {
    /// The error of the mean of `values`; `None` for fewer than two rows, or than two clusters.
    ///
    /// Without clusters `Σ (x - mean)² / (n (n - 1))`. With m clusters the sums of deviations of each cluster
    /// are independent, not those of rows: `m / (m - 1) Σ_g (Σ_{i in g} (x_i - mean))² / n²`, m - 1 degrees
    /// (Miller, arXiv 2411.00640; Cameron and Miller, Journal of Human Resources 50, 2015).
    pub(super) fn of_mean(values: &[f64], clusters: Option<&Clusters>) -> Option<Self> {
        let n = values.len() as f64;
        let mean = mean(values);
        let deviations = values.iter().map(|value| value - mean);
        let (units, squares): (usize, f64) = match clusters {
            None => (values.len(), deviations.map(|d| d * d).sum()),
            Some(clusters) => {
                (clusters.count, clusters.sums(deviations).into_iter().map(|sum| sum * sum).sum())
            }
        };
        let degrees = units.checked_sub(1).filter(|degrees| *degrees > 0)? as f64;
        Some(Self { variance: units as f64 / degrees * squares / (n * n), degrees })
    }

    /// The error of a sum of independent estimates, each times a weight. Degrees of freedom are Welch's and
    /// Satterthwaite's (Biometrics Bulletin 2, 1946): `(Σ v)² / Σ (v² / degrees)`. Those of an estimate
    /// without variance have no weight.
    pub(super) fn of_sum(parts: impl Iterator<Item = (f64, Self)>) -> Self {
        let (mut variance, mut squares) = (0.0, 0.0);
        for (weight, part) in parts {
            let of_part = weight * weight * part.variance;
            variance += of_part;
            squares += of_part * of_part / part.degrees;
        }
        let degrees = if squares > 0.0 { variance * variance / squares } else { f64::INFINITY };
        Self { variance, degrees }
    }

    pub(super) fn half_width(&self) -> f64 {
        t_95(self.degrees) * self.variance.sqrt()
    }
}

/// The mean of some values; NaN without values.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Number of rows with score 1, if all scores are 0 or 1.
pub(super) fn right_rows(scores: &[f64]) -> Option<u64> {
    let is_answer = |score: &f64| *score == 0.0 || *score == 1.0;
    scores.iter().all(is_answer).then(|| scores.iter().filter(|score| **score == 1.0).count() as u64)
}

/// The mean score of a task's rows, with its errors and interval.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskScore {
    /// Number of rows.
    pub rows: usize,
    /// Number of clusters, if rows have clusters.
    pub clusters: Option<usize>,
    /// Mean score.
    pub mean: f64,
    /// Sample standard deviation / sqrt(rows), as lm-eval's stderr, whether or not rows have clusters; `None`
    /// for one row.
    pub standard_error: Option<f64>,
    /// Cluster-robust standard error, if rows have at least two clusters.
    pub cluster_error: Option<f64>,
    /// The interval to show. For scores 0 and 1 without clusters [`wilson`], otherwise [`TaskScore::t`], cut
    /// to [0, 1] if all scores are there. In clusters that are all right or all wrong it is Wilson's for as
    /// many rows as clusters.
    pub interval: Option<Interval>,
    /// Wilson's interval, if all scores are 0 or 1 and rows have no clusters.
    pub wilson: Option<Interval>,
    /// Mean ± t standard errors (cluster-robust ones if rows have clusters), with rows - 1 or clusters - 1
    /// degrees. It is not cut to [0, 1], and has no width if all scores are equal. `None` for one row, or
    /// one cluster.
    pub t: Option<Interval>,
    #[serde(skip)]
    error: Option<MeanError>,
}

impl TaskScore {
    /// The score of these rows; `None` without rows.
    pub fn new(scores: &ItemScores) -> Option<Self> {
        (scores.rows() > 0).then(|| Self::of_rows(scores.scores(), scores.clusters().as_ref()))
    }

    /// The score of these rows, of which there is at least one.
    fn of_rows(values: &[f64], clusters: Option<&Clusters>) -> Self {
        let rows = values.len();
        let mean = mean(values);
        let of_rows = MeanError::of_mean(values, None);
        let error = MeanError::of_mean(values, clusters);
        let t = error.map(|error| Interval::around(mean, error.half_width()));
        let right = right_rows(values);
        let are_shares = values.iter().all(|value| (0.0..=1.0).contains(value));
        let of_answers = right.and_then(|right| match clusters.map(|clusters| clusters.count as u64) {
            None => wilson(right, rows as u64),
            Some(clusters) if right == 0 => wilson(0, clusters),
            Some(clusters) if right == rows as u64 => wilson(clusters, clusters),
            Some(_) => None,
        });
        Self {
            rows,
            clusters: clusters.map(|clusters| clusters.count),
            mean,
            standard_error: of_rows.map(|error| error.variance.sqrt()),
            cluster_error: error.filter(|_| clusters.is_some()).map(|error| error.variance.sqrt()),
            interval: of_answers.or(if are_shares { t.map(Interval::within_shares) } else { t }),
            wilson: of_answers.filter(|_| clusters.is_none()),
            t,
            error,
        }
    }

    /// The error of the mean for sums over tasks. Where all rows are right or all wrong, it is that of
    /// [`TaskScore::interval`], because a variance of 0 would claim certainty.
    pub(super) fn error(&self) -> Option<MeanError> {
        let of_interval = |interval: Interval| MeanError {
            variance: (interval.half_width() / NORMAL_95).powi(2),
            degrees: f64::INFINITY,
        };
        match (self.error, self.interval) {
            (Some(error), _) if error.variance > 0.0 => Some(error),
            (error, Some(interval)) if interval.half_width() > 0.0 && error.is_some() => {
                Some(of_interval(interval))
            }
            (error, _) => error,
        }
    }
}

#[cfg(test)]
#[path = "interval_tests.rs"]
mod tests;
