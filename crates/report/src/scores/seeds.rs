//! The difference of two groups of runs on a task, or in the mean of several tasks, with the chance of rows
//! and of seeds.
//!
//! ```text
//! runs -> one per seed (runs of one seed are averaged row by row) -> pairs of one seed -> difference
//! ```
//!
//! Runs of one seed saw the same batches, so their differences lose the noise that both sides share. Without
//! two common seeds, means of the sides are compared.

use super::centred::weight;
use super::difference_error::DifferenceError;
use super::interval::{Interval, MeanError, mean};
use super::items::{ItemScores, ScoreError};
use super::paired::PairedDifference;
use super::sample::SeedSample;
use serde::Serialize;

/// The scores of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunScores {
    /// The run's seed, if it is known. Runs without one count as one run, as nothing shows that their seeds
    /// differ, and pair with none.
    pub seed: Option<u64>,
    /// Its scores.
    pub scores: ItemScores,
}

/// The runs of both sides that a task was evaluated on.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskRuns {
    /// Score of chance, in [0, 1).
    pub chance: f64,
    /// Runs of the reference.
    pub reference: Vec<RunScores>,
    /// Runs that are compared with it.
    pub candidate: Vec<RunScores>,
}

/// Runs of both sides that are subtracted from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pairing {
    /// Runs of the same seed, of at least two seeds.
    BySeed,
    /// Means of both sides, at least two seeds each.
    Unpaired,
    /// At least one side has one seed: its run of the same seed, if any, or the mean of the other side.
    OneSeed,
}

/// The difference between two groups of runs, in the unit of the scores.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SeedDifference {
    /// Number of rows, of all tasks together.
    pub rows: usize,
    /// Runs that are subtracted from each other.
    pub pairing: Pairing,
    /// Number of the reference's seeds that are compared.
    pub reference_seeds: usize,
    /// Number of the candidate's seeds that are compared.
    pub candidate_seeds: usize,
    /// Mean score of the compared seeds of the reference; over several tasks the mean centred score.
    pub reference: f64,
    /// Mean score of the compared seeds of the candidate.
    pub candidate: f64,
    /// Candidate minus reference: negative if the candidate is worse, for a metric of which more is better.
    pub difference: f64,
    /// 95% interval of the difference, the wider of two. Over seeds: Student's t of the differences of seeds
    /// (Welch's without pairs), whose variance is increased by that of rows, as far as all seeds share it.
    /// Over rows, for these seeds alone: the paired interval of each row's mean over seeds. With one seed on
    /// a side it is that of rows, and says nothing of other seeds. `None` for one row or cluster.
    pub interval: Option<Interval>,
    /// Distance from the reference within which the mean of as many other seeds of the reference would lie
    /// with 95% confidence: `t s sqrt(1/n + 1/m)`. `None` if the reference has one seed.
    pub band: Option<f64>,
    #[serde(skip)]
    pub(super) error: DifferenceError,
}

/// One side's runs with common rows.
struct Side {
    seeds: Vec<Option<u64>>,
    /// The rows' scores for each seed.
    rows: Vec<Vec<f64>>,
}

impl Side {
    /// The runs whose seed is in `only`, one per seed, in the order of `rows`.
    fn new(runs: &[RunScores], only: &[Option<u64>], rows: &ItemScores) -> Result<Self, ScoreError> {
        let of_seed = |seed: &Option<u64>| {
            let same = runs.iter().filter(|run| run.seed == *seed).map(|run| run.scores.clone());
            rows.aligned(&ItemScores::average(&same.collect::<Vec<_>>())?)
        };
        let scores: Result<Vec<_>, _> = only.iter().map(of_seed).collect();
        Ok(Self { seeds: only.to_vec(), rows: scores? })
    }

    fn select(&self, seeds: &[usize]) -> Vec<&[f64]> {
        seeds.iter().map(|&seed| self.rows[seed].as_slice()).collect()
    }

    fn means(&self) -> Vec<f64> {
        self.rows.iter().map(|rows| mean(rows)).collect()
    }
}

/// The distinct seeds of some runs, in their order.
fn distinct(runs: &[RunScores]) -> Vec<Option<u64>> {
    let mut seeds: Vec<Option<u64>> = Vec::new();
    for run in runs {
        if !seeds.contains(&run.seed) {
            seeds.push(run.seed);
        }
    }
    seeds
}

/// Seeds that all tasks have on a side.
fn common<'t>(sides: impl Iterator<Item = &'t [RunScores]>) -> Result<Vec<Option<u64>>, ScoreError> {
    let mut common: Option<Vec<Option<u64>>> = None;
    for runs in sides {
        let seeds = distinct(runs);
        match &mut common {
            None => common = Some(seeds),
            Some(common) => common.retain(|seed| seeds.contains(seed)),
        }
    }
    common.filter(|seeds| !seeds.is_empty()).ok_or(ScoreError::NoCommonRun)
}

/// The seeds of both sides that are compared, as positions in their lists.
fn pair(reference: &[Option<u64>], candidate: &[Option<u64>]) -> (Pairing, Vec<usize>, Vec<usize>) {
    let partner = |(place, seed): (usize, &Option<u64>)| {
        let same = reference.iter().position(|other| seed.is_some() && other == seed);
        same.map(|other| (other, place))
    };
    let pairs: (Vec<usize>, Vec<usize>) = candidate.iter().enumerate().filter_map(partner).unzip();
    let all = || ((0..reference.len()).collect(), (0..candidate.len()).collect());
    let (pairing, (own, others)) = match (pairs.0.len(), reference.len().min(candidate.len())) {
        (2.., _) => (Pairing::BySeed, pairs),
        (_, 2..) => (Pairing::Unpaired, all()),
        (1, _) => (Pairing::OneSeed, pairs),
        _ => (Pairing::OneSeed, all()),
    };
    (pairing, own, others)
}

/// A difference's parts, which are summed over tasks.
struct Parts {
    rows: usize,
    pairing: Pairing,
    /// Mean score of each seed of the reference, compared or not.
    of_reference: Vec<f64>,
    /// Mean scores of the seeds that are compared.
    reference: Vec<f64>,
    candidate: Vec<f64>,
    row_error: Option<MeanError>,
    row_interval: Option<Interval>,
    residual: f64,
}

impl Parts {
    /// The parts of a task, for the runs of these seeds; `None` without rows.
    fn new(
        task: &TaskRuns,
        reference: &[Option<u64>],
        candidate: &[Option<u64>],
    ) -> Result<Option<Self>, ScoreError> {
        let Some(run) = task.reference.first() else { return Err(ScoreError::NoScores) };
        let rows = &run.scores;
        let (own, other) =
            (Side::new(&task.reference, reference, rows)?, Side::new(&task.candidate, candidate, rows)?);
        if rows.rows() == 0 {
            return Ok(None);
        }
        let (pairing, of_own, of_other) = pair(&own.seeds, &other.seeds);
        let (of_reference, of_candidate) = (own.means(), other.means());
        let select = |means: &[f64], seeds: &[usize]| seeds.iter().map(|&seed| means[seed]).collect();
        let clusters = rows.clusters();
        let clusters = clusters.as_ref();
        let (own, other) = (own.select(&of_own), other.select(&of_other));
        let difference = PairedDifference::of_rows(&mean_rows(&own), &mean_rows(&other), clusters);
        let residual = match pairing {
            Pairing::BySeed => {
                let differences: Vec<Vec<f64>> =
                    own.iter().zip(&other).map(|(own, other)| subtract(other, own)).collect();
                let differences: Vec<&[f64]> = differences.iter().map(Vec::as_slice).collect();
                DifferenceError::residual(&differences, clusters)
            }
            Pairing::Unpaired => {
                DifferenceError::residual(&own, clusters) + DifferenceError::residual(&other, clusters)
            }
            Pairing::OneSeed => 0.0,
        };
        Ok(Some(Self {
            rows: rows.rows(),
            pairing,
            reference: select(&of_reference, &of_own),
            candidate: select(&of_candidate, &of_other),
            of_reference,
            row_error: difference.error,
            row_interval: difference.interval,
            residual,
        }))
    }

    /// The sum of these tasks' centred scores, each times its weight.
    fn sum(tasks: &[(Self, f64, f64)]) -> Option<Self> {
        let (first, ..) = tasks.first()?;
        let by_seed = |of: fn(&Self) -> &[f64]| -> Vec<f64> {
            let at = |seed: usize| {
                tasks.iter().map(|(parts, weight, chance)| weight * (of(parts)[seed] - chance)).sum()
            };
            (0..of(first).len()).map(at).collect()
        };
        let errors: Option<Vec<_>> =
            tasks.iter().map(|(parts, weight, _)| Some((*weight, parts.row_error?))).collect();
        Some(Self {
            rows: tasks.iter().map(|(parts, ..)| parts.rows).sum(),
            pairing: first.pairing,
            of_reference: by_seed(|parts| &parts.of_reference),
            reference: by_seed(|parts| &parts.reference),
            candidate: by_seed(|parts| &parts.candidate),
            row_error: errors.map(|errors| MeanError::of_sum(errors.into_iter())),
            row_interval: None,
            residual: tasks.iter().map(|(parts, weight, _)| weight * weight * parts.residual).sum(),
        })
    }

    fn difference(self) -> SeedDifference {
        let (reference, candidate) = (mean(&self.reference), mean(&self.candidate));
        let seeds = match self.pairing {
            Pairing::BySeed => of_seeds(&subtract(&self.candidate, &self.reference)),
            Pairing::Unpaired => {
                let sides: Option<Vec<_>> =
                    [&self.reference, &self.candidate].map(|side| of_seeds(side)).into_iter().collect();
                sides.map(|sides| MeanError::of_sum(sides.into_iter().map(|side| (1.0, side))))
            }
            Pairing::OneSeed => None,
        };
        let error = DifferenceError { rows: self.row_error, residual: self.residual, seeds };
        let around = |half_width: f64| Interval::around(candidate - reference, half_width);
        let of_error = error.half_width().map(around);
        SeedDifference {
            rows: self.rows,
            pairing: self.pairing,
            reference_seeds: self.reference.len(),
            candidate_seeds: self.candidate.len(),
            reference,
            candidate,
            difference: candidate - reference,
            interval: self.row_interval.filter(|_| self.pairing == Pairing::OneSeed).or(of_error),
            band: SeedSample::from_values(&self.of_reference)
                .and_then(|sample| sample.of_others(self.candidate.len())),
            error,
        }
    }
}

impl SeedDifference {
    /// The difference on one task, of scores as they are, not centred; `None` without rows.
    ///
    /// # Errors
    ///
    /// No run on a side; different rows or clusters.
    pub fn of_task(task: &TaskRuns) -> Result<Option<Self>, ScoreError> {
        let (own, other) = (distinct(&task.reference), distinct(&task.candidate));
        if own.is_empty() || other.is_empty() {
            return Err(ScoreError::NoScores);
        }
        Ok(Parts::new(task, &own, &other)?.map(Parts::difference))
    }

    /// The difference in the mean centred score of several tasks, of the seeds that have scores of all tasks.
    /// Rows of different tasks are independent; the differences of a seed on different tasks are not.
    /// `None` without tasks. A task without rows is left out.
    ///
    /// # Errors
    ///
    /// No seed of a side with scores of all tasks; different rows or clusters on a task; a chance level
    /// outside of [0, 1).
    pub fn of_mean(tasks: &[TaskRuns]) -> Result<Option<Self>, ScoreError> {
        if tasks.is_empty() {
            return Ok(None);
        }
        let own = common(tasks.iter().map(|task| task.reference.as_slice()))?;
        let other = common(tasks.iter().map(|task| task.candidate.as_slice()))?;
        let mut parts = Vec::with_capacity(tasks.len());
        for task in tasks {
            if let Some(of_task) = Parts::new(task, &own, &other)? {
                parts.push((of_task, weight(task.chance, 1)?, task.chance));
            }
        }
        let count = parts.len() as f64;
        parts.iter_mut().for_each(|(_, weight, _)| *weight /= count);
        Ok(Parts::sum(&parts).map(Parts::difference))
    }
}

/// Error of the mean of values of several seeds.
fn of_seeds(values: &[f64]) -> Option<MeanError> {
    let sample = SeedSample::from_values(values)?;
    Some(MeanError { variance: sample.variance_of_mean()?, degrees: sample.degrees() })
}

fn subtract(from: &[f64], values: &[f64]) -> Vec<f64> {
    from.iter().zip(values).map(|(from, value)| from - value).collect()
}

/// The mean of each row over the runs.
fn mean_rows(runs: &[&[f64]]) -> Vec<f64> {
    let rows = runs.first().map_or(0, |rows| rows.len());
    (0..rows).map(|row| runs.iter().map(|run| run[row]).sum::<f64>() / runs.len() as f64).collect()
}

#[cfg(test)]
#[path = "seeds_tests.rs"]
mod tests;
