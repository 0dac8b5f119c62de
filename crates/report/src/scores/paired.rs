//! The difference of two models on the same rows.

use super::binomial::{McNemar, mcnemar_p};
use super::interval::{Interval, MeanError, mean, right_rows};
use super::items::{Clusters, ItemScores, ScoreError};
use super::student::NORMAL_95;
use serde::Serialize;

/// Discordant rows in each direction below which Student's interval of a difference of accuracies is too
/// narrow.
const FEW: u64 = 5;

/// The difference of the mean scores of two models on the same rows, in the unit of the scores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairedDifference {
    /// Number of rows.
    pub rows: usize,
    /// Number of clusters, if rows have clusters.
    pub clusters: Option<usize>,
    /// Mean score of the reference.
    pub reference: f64,
    /// Mean score of the candidate.
    pub candidate: f64,
    /// Candidate minus reference: negative if the candidate is worse, for a metric of which more is better.
    pub difference: f64,
    /// Standard error of the difference of a row's scores, cluster-robust if rows have clusters; `None` for
    /// one row or cluster.
    pub standard_error: Option<f64>,
    /// 95% interval of the difference. Difference ± t standard errors; with fewer than five discordant rows
    /// in a direction, for scores 0 and 1 without clusters, that of [`bonett_price`]. Where no row differs,
    /// and scores lie in [0, 1], it is Bonett and Price's for as many rows as there are rows or clusters. It
    /// has no width if other scores differ by the same on each row.
    pub interval: Option<Interval>,
    /// Discordant rows and their exact test, if all scores are 0 or 1.
    pub mcnemar: Option<McNemar>,
    #[serde(skip)]
    pub(super) error: Option<MeanError>,
}

/// The 95% interval of a difference of two paired proportions, for few discordant rows: the normal interval
/// after adding one discordant row in each direction (Bonett and Price, Journal of Educational and Behavioral
/// Statistics 37, 2012).
///
/// `None` without rows, or if more are discordant than there are.
pub fn bonett_price(only_reference: u64, only_candidate: u64, rows: u64) -> Option<Interval> {
    if rows == 0 || only_reference.checked_add(only_candidate).is_none_or(|discordant| discordant > rows) {
        return None;
    }
    let n = rows as f64 + 2.0;
    let (reference, candidate) = ((only_reference as f64 + 1.0) / n, (only_candidate as f64 + 1.0) / n);
    let difference = candidate - reference;
    let variance = (reference + candidate - difference * difference) / n;
    Some(Interval::around(difference, NORMAL_95 * variance.sqrt()))
}

impl PairedDifference {
    /// The difference of `candidate` and `reference`, rows paired by their ids; `None` without rows.
    ///
    /// # Errors
    ///
    /// Different rows or clusters.
    pub fn new(reference: &ItemScores, candidate: &ItemScores) -> Result<Option<Self>, ScoreError> {
        let other = reference.aligned(candidate)?;
        let clusters = reference.clusters();
        Ok((reference.rows() > 0).then(|| Self::of_rows(reference.scores(), &other, clusters.as_ref())))
    }

    /// The difference of these rows, of which there is at least one.
    pub(super) fn of_rows(reference: &[f64], candidate: &[f64], clusters: Option<&Clusters>) -> Self {
        let rows = reference.len();
        let differences: Vec<f64> = reference.iter().zip(candidate).map(|(own, other)| other - own).collect();
        let difference = mean(&differences);
        let count = |sign: f64| differences.iter().filter(|difference| **difference == sign).count() as u64;
        let are_answers = right_rows(reference).is_some() && right_rows(candidate).is_some();
        let mcnemar = are_answers.then(|| {
            let (only_reference, only_candidate) = (count(-1.0), count(1.0));
            McNemar { only_reference, only_candidate, p: mcnemar_p(only_reference, only_candidate) }
        });
        let are_shares = || reference.iter().chain(candidate).all(|score| (0.0..=1.0).contains(score));
        let units = clusters.map_or(rows, |clusters| clusters.count) as u64;
        let adjusted = match mcnemar {
            _ if count(0.0) == rows as u64 && are_shares() => bonett_price(0, 0, units),
            Some(McNemar { only_reference, only_candidate, .. })
                if clusters.is_none() && only_reference.min(only_candidate) < FEW =>
            {
                bonett_price(only_reference, only_candidate, units)
            }
            _ => None,
        };
        let of_values = MeanError::of_mean(&differences, clusters);
        let of_interval = |interval: Interval| {
            let degrees = f64::INFINITY;
            MeanError { variance: (interval.half_width() / NORMAL_95).powi(2), degrees }
        };
        Self {
            rows,
            clusters: clusters.map(|clusters| clusters.count),
            reference: mean(reference),
            candidate: mean(candidate),
            difference,
            standard_error: of_values.map(|error| error.variance.sqrt()),
            interval: adjusted.or(of_values.map(|error| Interval::around(difference, error.half_width()))),
            mcnemar,
            error: adjusted.map(of_interval).or(of_values),
        }
    }
}

#[cfg(test)]
#[path = "paired_tests.rs"]
mod tests;
