//! Statistics of task scores: a task's score, and the difference of two models.
//!
//! ```text
//! ItemScores (a score for each row) -> TaskScore -> CentredMean (several tasks)
//!     |                             -> PairedDifference (two models on the same rows)
//! ```
//!
//! All intervals have 95% confidence. Rows of one cluster are never taken as independent, only clusters are.
//! Scores are finite, so no figure is NaN; what a sample cannot tell is `None`. Absent: bootstrap, and a
//! correction for many comparisons.

mod binomial;
mod centred;
#[cfg(test)]
mod draws;
mod interval;
mod items;
mod paired;
pub(crate) mod sample;
mod student;

pub use binomial::{McNemar, mcnemar_p};
pub use centred::CentredMean;
pub use interval::{Interval, TaskScore, wilson};
pub use items::{ItemScores, ScoreError};
pub use paired::{PairedDifference, bonett_price};
pub use student::{NORMAL_95, student_quantile};
