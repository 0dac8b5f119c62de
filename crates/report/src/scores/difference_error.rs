//! The error of a difference of runs that were evaluated on the same rows: rows and seeds are crossed.
//!
//! ```text
//! difference of a seed on a row = mean + seed + row + rest       (all independent)
//! variance of the mean over S seeds and N rows = V(seed) / S + V(row) / N + V(rest) / S N
//! ```
//!
//! Differences of seeds show the first and the last term, each row's mean over seeds the second and the last.

use super::interval::{MeanError, mean};
use super::items::Clusters;
use super::student::{deviation_bias, t_of_power};

/// Errors of a difference.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct DifferenceError {
    /// Over rows, for these seeds alone.
    pub(super) rows: Option<MeanError>,
    /// The last term, which both errors contain; 0 for one seed.
    pub(super) residual: f64,
    /// Over seeds, for these rows alone; `None` for one seed.
    pub(super) seeds: Option<MeanError>,
}

impl DifferenceError {
    /// The variance of the rest, in the mean over these runs' rows: of rows or, with clusters, of their sums.
    pub(super) fn residual(runs: &[&[f64]], clusters: Option<&Clusters>) -> f64 {
        let (seeds, rows) = (runs.len() as f64, runs.first().map_or(0, |rows| rows.len()));
        let of_runs: Vec<f64> = runs.iter().map(|rows| mean(rows)).collect();
        let whole = mean(&of_runs);
        let of_rows: Vec<f64> =
            (0..rows).map(|row| runs.iter().map(|run| run[row]).sum::<f64>() / seeds).collect();
        let mut sum = 0.0;
        let mut degrees = 0.0;
        for (run, of_run) in runs.iter().zip(&of_runs) {
            // A run's error holds the rest alone after means of rows and of the run are subtracted.
            let rest: Vec<f64> =
                run.iter().zip(&of_rows).map(|(score, of_row)| score - of_row - of_run + whole).collect();
            if let Some(error) = MeanError::of_mean(&rest, clusters) {
                sum += error.variance;
                degrees = seeds - 1.0;
            }
        }
        if degrees > 0.0 { sum / (seeds * degrees) } else { 0.0 }
    }

    /// The error over seeds and rows: that of seeds, and that of rows without the rest, which is in both.
    fn of_both(&self) -> Option<MeanError> {
        let seeds = self.seeds?;
        let rows = self.rows.map(|rows| MeanError { variance: self.of_rows_alone(), ..rows });
        Some(MeanError::of_sum([Some(seeds), rows].into_iter().flatten().map(|part| (1.0, part))))
    }

    fn of_rows_alone(&self) -> f64 {
        self.rows.map_or(0.0, |rows| (rows.variance - self.residual).max(0.0))
    }

    /// Half width of the 95% interval: the wider of that over seeds and rows and that over rows.
    pub(super) fn half_width(&self) -> Option<f64> {
        self.widest(MeanError::half_width)
    }

    /// Distance between a limit and a true difference, so that the interval stays on one side of the limit
    /// in 80% of all samples.
    pub(super) fn half_width_of_power(&self) -> Option<f64> {
        self.widest(|error| t_of_power(error.degrees) * error.variance.sqrt())
    }

    /// Errors without the bias of a standard deviation of few values, as a forecast needs them.
    pub(super) fn unbiased(&self) -> Self {
        let unbias = |error: MeanError| MeanError {
            variance: error.variance / deviation_bias(error.degrees).powi(2),
            ..error
        };
        Self { rows: self.rows.map(unbias), seeds: self.seeds.map(unbias), ..*self }
    }

    fn widest(&self, width: impl Fn(&MeanError) -> f64) -> Option<f64> {
        let of_rows = width(&self.rows?);
        Some(self.of_both().map_or(of_rows, |both| width(&both).max(of_rows)))
    }

    /// The error with `seeds` instead of `present` seeds on each side, at least two of both.
    pub(super) fn with_seeds(&self, seeds: usize, present: usize) -> Self {
        let ratio = present as f64 / seeds as f64;
        let degrees = (seeds - 1) as f64 / (present - 1) as f64;
        let residual = self.residual * ratio;
        let variance =
            self.of_rows_alone() + self.rows.map_or(0.0, |rows| rows.variance.min(self.residual)) * ratio;
        Self {
            rows: self.rows.map(|rows| MeanError { variance, ..rows }),
            residual,
            seeds: self.seeds.map(|seeds| MeanError {
                variance: seeds.variance * ratio,
                degrees: seeds.degrees * degrees,
            }),
        }
    }

    /// The error with `times` as many rows.
    pub(super) fn with_rows(&self, times: f64) -> Self {
        let of_seeds = |seeds: MeanError| {
            let rest = seeds.variance.min(self.residual);
            MeanError { variance: seeds.variance - rest + rest / times, ..seeds }
        };
        Self {
            rows: self.rows.map(|rows| MeanError { variance: rows.variance / times, ..rows }),
            residual: self.residual / times,
            seeds: self.seeds.map(of_seeds),
        }
    }

    /// The error of `seeds` pairs, if that of one pair has no part that all seeds share: the least that they
    /// could have.
    pub(super) fn of_one_pair_with_seeds(&self, seeds: usize) -> Self {
        let of_many =
            |rows: MeanError, degrees: f64| MeanError { variance: rows.variance / seeds as f64, degrees };
        Self {
            rows: self.rows.map(|rows| of_many(rows, rows.degrees)),
            residual: self.rows.map_or(0.0, |rows| rows.variance / seeds as f64),
            seeds: self.rows.map(|rows| of_many(rows, (seeds - 1) as f64)),
        }
    }
}
