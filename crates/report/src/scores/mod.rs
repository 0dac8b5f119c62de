//! Statistics of task scores. All intervals have 95% confidence.

pub(crate) mod sample;
mod student;

pub use student::{NORMAL_95, student_quantile};
