//! The scores of a task's rows by one model, and their mean over checkpoints or runs.

use std::collections::{HashMap, HashSet};

/// The score of each row of a task by one model, in one metric.
///
/// A score is 0 or 1 for accuracy, and any finite number for other metrics. All have an id of their own,
/// which pairs them with the rows of another model.
#[derive(Clone, Debug, PartialEq)]
pub struct ItemScores {
    ids: Vec<String>,
    scores: Vec<f64>,
    clusters: Option<Vec<String>>,
}

/// Scores that cannot be used, or not together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScoreError {
    /// The numbers of ids, scores and clusters differ.
    #[error("{rows} rows have {found} {of}; each row needs one")]
    Lengths {
        /// Number of ids.
        rows: usize,
        /// Number of the others.
        found: usize,
        /// `scores` or `clusters`.
        of: &'static str,
    },
    /// Two rows have one id.
    #[error("two rows have the id `{id}`; give each row an id of its own")]
    DuplicateId {
        /// The id.
        id: String,
    },
    /// A score is NaN or infinite.
    #[error("row `{id}`: the score is {score}, which is no finite number; evaluate this checkpoint again")]
    NotFinite {
        /// The row's id.
        id: String,
        /// The score, printed.
        score: String,
    },
    /// A row has a score on one side only.
    #[error("row `{id}` has a score on one side only; evaluate both sides on the same rows")]
    MissingRow {
        /// The row's id.
        id: String,
    },
    /// A row is in different clusters, or in a cluster on one side only.
    #[error("row `{id}` is not in the same cluster on both sides; evaluate both sides on the same file")]
    OtherCluster {
        /// The row's id.
        id: String,
    },
    /// There are no scores to average or to compare.
    #[error("there are no scores; evaluate at least one checkpoint of each side")]
    NoScores,
    /// No seed of a side has been evaluated on all tasks.
    #[error("no run has scores of all tasks; evaluate the same runs on each task")]
    NoCommonRun,
    /// A chance level is outside of [0, 1).
    #[error(
        "the chance level {chance} of a task is not a number from 0 to below 1; correct `chance` in the task"
    )]
    Chance {
        /// The level, printed.
        chance: String,
    },
}

impl ItemScores {
    /// The scores of the rows with these ids, and the cluster of each row if the task has clusters: rows of
    /// one cluster, such as questions on one text, are not independent.
    ///
    /// # Errors
    ///
    /// Lists of different lengths, an id that is used twice, a score that is not finite.
    pub fn new(
        ids: Vec<String>,
        scores: Vec<f64>,
        clusters: Option<Vec<String>>,
    ) -> Result<Self, ScoreError> {
        let rows = ids.len();
        let lengths = [(scores.len(), "scores"), (clusters.as_ref().map_or(rows, Vec::len), "clusters")];
        if let Some((found, of)) = lengths.into_iter().find(|(found, _)| *found != rows) {
            return Err(ScoreError::Lengths { rows, found, of });
        }
        let mut seen = HashSet::with_capacity(rows);
        for (id, score) in ids.iter().zip(&scores) {
            if !seen.insert(id.as_str()) {
                return Err(ScoreError::DuplicateId { id: id.clone() });
            }
            if !score.is_finite() {
                return Err(ScoreError::NotFinite { id: id.clone(), score: score.to_string() });
            }
        }
        Ok(Self { ids, scores, clusters })
    }

    /// The mean score of each row over some evaluations of the same rows, in the order of the first: over the
    /// last K checkpoints of a run, or over runs of one seed.
    ///
    /// # Errors
    ///
    /// No evaluation; different rows or clusters.
    pub fn average(evaluations: &[Self]) -> Result<Self, ScoreError> {
        let Some((first, others)) = evaluations.split_first() else { return Err(ScoreError::NoScores) };
        let mut mean = first.clone();
        for other in others {
            for (sum, score) in mean.scores.iter_mut().zip(first.aligned(other)?) {
                *sum += score;
            }
        }
        mean.scores.iter_mut().for_each(|sum| *sum /= evaluations.len() as f64);
        Ok(mean)
    }

    /// The scores times -1, so that more is better where less was.
    pub fn negated(mut self) -> Self {
        self.scores.iter_mut().for_each(|score| *score = -*score);
        self
    }

    /// The scores of `other` in the order of these rows.
    ///
    /// # Errors
    ///
    /// Different rows or clusters.
    pub fn aligned(&self, other: &Self) -> Result<Vec<f64>, ScoreError> {
        if self.ids == other.ids && self.clusters == other.clusters {
            return Ok(other.scores.clone());
        }
        let places: HashMap<&str, usize> = other.ids.iter().map(String::as_str).zip(0..).collect();
        let mut scores = Vec::with_capacity(self.rows());
        for (row, id) in self.ids.iter().enumerate() {
            let Some(&place) = places.get(id.as_str()) else {
                return Err(ScoreError::MissingRow { id: id.clone() });
            };
            if self.cluster(row) != other.cluster(place) {
                return Err(ScoreError::OtherCluster { id: id.clone() });
            }
            scores.push(other.scores[place]);
        }
        if other.rows() > self.rows() {
            let own: HashSet<&str> = self.ids.iter().map(String::as_str).collect();
            let id = other.ids.iter().find(|id| !own.contains(id.as_str()));
            return Err(ScoreError::MissingRow { id: id.cloned().unwrap_or_default() });
        }
        Ok(scores)
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.ids.len()
    }

    /// The rows' ids.
    pub fn ids(&self) -> &[String] {
        &self.ids
    }

    /// The rows' scores.
    pub fn scores(&self) -> &[f64] {
        &self.scores
    }

    /// The rows' clusters, numbered in the order of their first rows, if the task has clusters.
    pub(super) fn clusters(&self) -> Option<Clusters> {
        let mut places: HashMap<&str, usize> = HashMap::new();
        let of_rows = self.clusters.as_ref()?.iter();
        let of_rows = of_rows.map(|name| {
            let next = places.len();
            *places.entry(name.as_str()).or_insert(next)
        });
        let of_rows: Vec<usize> = of_rows.collect();
        Some(Clusters { of_rows, count: places.len() })
    }

    fn cluster(&self, row: usize) -> Option<&str> {
        self.clusters.as_ref().map(|clusters| clusters[row].as_str())
    }
}

/// Numbers of the clusters of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clusters {
    pub(super) of_rows: Vec<usize>,
    pub(super) count: usize,
}

impl Clusters {
    /// The sum of the rows' values in each cluster.
    pub(super) fn sums(&self, values: impl Iterator<Item = f64>) -> Vec<f64> {
        let mut sums = vec![0.0; self.count];
        for (&cluster, value) in self.of_rows.iter().zip(values) {
            sums[cluster] += value;
        }
        sums
    }
}
