//! The mean over several tasks of scores above chance.

use super::interval::{Interval, MeanError, TaskScore};
use super::items::ScoreError;
use serde::Serialize;

/// The mean over tasks of `(score - chance) / (1 - chance)`: 0 is chance, 1 is all right (CORE's centred
/// accuracy, arXiv 2406.11794).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CentredMean {
    /// Number of tasks.
    pub tasks: usize,
    /// Mean of the centred scores.
    pub mean: f64,
    /// Standard error of the mean. Tasks are independent and fixed: it holds the chance of rows, not that of
    /// the choice of tasks. `None` if a task has a single row or cluster.
    pub standard_error: Option<f64>,
    /// Mean ± t standard errors, with Satterthwaite's degrees of freedom.
    pub interval: Option<Interval>,
}

impl CentredMean {
    /// The mean of these tasks, each with its chance level; `None` without tasks.
    ///
    /// # Errors
    ///
    /// A chance level outside of [0, 1).
    pub fn new(tasks: &[(TaskScore, f64)]) -> Result<Option<Self>, ScoreError> {
        let mut mean = 0.0;
        let mut parts = Vec::with_capacity(tasks.len());
        for (score, chance) in tasks {
            let weight = weight(*chance, tasks.len())?;
            mean += weight * (score.mean - chance);
            parts.push(score.error().map(|error| (weight, error)));
        }
        let parts: Option<Vec<_>> = parts.into_iter().collect();
        let error = parts.map(|parts| MeanError::of_sum(parts.into_iter()));
        Ok((!tasks.is_empty()).then(|| Self {
            tasks: tasks.len(),
            mean,
            standard_error: error.map(|error| error.variance.sqrt()),
            interval: error.map(|error| Interval::around(mean, error.half_width())),
        }))
    }
}

/// Weight of a task's score in the centred mean of `tasks` tasks.
pub(super) fn weight(chance: f64, tasks: usize) -> Result<f64, ScoreError> {
    match (0.0..1.0).contains(&chance) {
        true => Ok(1.0 / (1.0 - chance) / tasks as f64),
        false => Err(ScoreError::Chance { chance: chance.to_string() }),
    }
}
