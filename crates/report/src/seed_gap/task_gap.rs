//! Differences of scores of tasks as figures.

use crate::scores::{Interval, Pairing, SeedDifference, TaskVerdict, Variation};
use serde::Serialize;

/// The difference of a score, and its verdict.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ScoreGap {
    /// Number of rows, of all tasks together.
    pub rows: usize,
    /// Mean score of the compared seeds of these runs.
    pub score: f64,
    /// Mean score of the compared seeds of the baseline.
    pub baseline_score: f64,
    /// Runs that are subtracted from each other.
    pub pairing: Pairing,
    /// Number of seeds of these runs that are compared.
    pub seeds: usize,
    /// Number of seeds of the baseline that are compared.
    pub baseline_seeds: usize,
    /// The verdict. Its difference is `score` - `baseline_score` in points, also where less is better.
    pub verdict: TaskVerdict,
}

/// A task whose scores are compared with those of the baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskGap {
    /// Its name.
    pub task: String,
    /// The hash of everything in it that changes numbers.
    pub hash: String,
    /// The version of the rules by which rows are scored.
    pub protocol: u32,
    /// Examples before each question.
    pub shots: u64,
    /// The name of the metric.
    pub metric: String,
    /// True if the lower score is the better one.
    pub lower_is_better: bool,
    /// The metric's mean for a model that guesses.
    pub chance: f64,
    /// Number of clusters, if rows have clusters.
    pub clusters: Option<usize>,
    /// True if it counts in the mean of the tasks: its metric is a share, and it is the first of its name.
    pub in_mean: bool,
    /// The baseline's runs that have scores.
    pub baseline_runs: Vec<RunScore>,
    /// The compared runs that have scores.
    pub runs: Vec<RunScore>,
    /// The difference.
    #[serde(flatten)]
    pub gap: ScoreGap,
}

/// The score of a run on a task.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunScore {
    /// The run's name.
    pub run: String,
    /// Its seed, if known.
    pub seed: Option<u64>,
    /// The checkpoints over which the score is averaged.
    pub steps: Vec<u64>,
    /// The precision of the evaluation.
    pub precision: &'static str,
    /// Mean score of the rows.
    pub score: f64,
}

/// The mean over tasks of `(score - chance) / (1 - chance)`: 0 is chance, 1 is all right.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskMean {
    /// Number of tasks.
    pub tasks: usize,
    /// The difference of the means.
    #[serde(flatten)]
    pub gap: ScoreGap,
}

impl ScoreGap {
    /// The verdict on `difference`. Scores of which less is better are negated in it.
    pub(super) fn new(difference: &SeedDifference, margin_points: f64, lower_is_better: bool) -> Self {
        let mut verdict = TaskVerdict::new(difference, Variation::Seeds, margin_points);
        let sign = if lower_is_better { -1.0 } else { 1.0 };
        verdict.difference_points *= sign;
        if let Some(interval) = verdict.interval_points.as_mut().filter(|_| lower_is_better) {
            *interval = Interval { low: -interval.high, high: -interval.low };
        }
        Self {
            rows: difference.rows,
            score: sign * difference.candidate,
            baseline_score: sign * difference.reference,
            pairing: difference.pairing,
            seeds: difference.candidate_seeds,
            baseline_seeds: difference.reference_seeds,
            verdict,
        }
    }
}

/// The hash of a task as in names of folders.
pub(super) fn short_hash(hash: &str) -> &str {
    &hash[..hash.floor_char_boundary(12)]
}
