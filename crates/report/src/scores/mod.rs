//! Statistics of task scores: a task's score, the difference of two models, the verdict of `xtrain compare`.
//!
//! ```text
//! ItemScores (a score for each row) -> TaskScore -> CentredMean (several tasks)
//!     |                             -> PairedDifference (two models on the same rows)
//!     +-> RunScores (a seed)        -> SeedDifference (two groups of runs; one task, or the mean) -> TaskVerdict
//! ```
//!
//! All intervals have 95% confidence. Rows of one cluster are never taken as independent, only clusters are.
//! Scores are finite, so no figure is NaN; what a sample cannot tell is `None`. Absent: bootstrap, and a
//! correction for many comparisons.

mod binomial;
mod centred;
mod difference_error;
#[cfg(test)]
mod draws;
mod file;
mod folder;
mod interval;
mod items;
mod paired;
mod paths;
mod row;
pub(crate) mod sample;
mod seeds;
mod student;
mod summary;
pub(crate) mod verdict;

pub use binomial::{McNemar, mcnemar_p};
pub use centred::CentredMean;
pub use file::{Earlier, ScoresHeader, ScoresWriter, damaged, other_scores, read_scores};
pub use folder::{ScoreFile, ScoreFiles};
pub use interval::{Interval, TaskScore, wilson};
pub use items::{ItemScores, ScoreError};
pub use paired::{PairedDifference, bonett_price};
pub(crate) use paths::SCORES_FOLDER;
pub use paths::ScoresFolder;
pub use row::RowScores;
pub use seeds::{Pairing, RunScores, SeedDifference, TaskRuns};
pub use student::{NORMAL_95, student_quantile};
pub use summary::{items, summaries, task_metrics};
pub use verdict::{Finding, MARGIN_POINTS, Settling, TaskVerdict, Variation};
