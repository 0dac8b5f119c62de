//! Scores of a model on the rows of tasks.
//!
//! ```text
//! rows (data::task) -> windows -> batches (step::scoring) -> the numbers of each row (report::scores)
//! ```
//!
//! Invariant: the numbers of a row follow from the row and the model, whatever is scored beside it, and
//! whether an evaluation was interrupted. Deliberately absent: rules of rows and their encoding (crate
//! `data`), intervals and comparisons (crate `report`), the programs (crate `step`).

pub mod error;
mod score;

pub use score::score;
