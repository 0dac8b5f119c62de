//! Scores of a model on the rows of tasks.
//!
//! ```text
//! rows (data::task) -> windows -> rounds of batches (step::scoring) -> the numbers of each row (report::scores)
//! ```
//!
//! Invariant: the numbers of a row follow from the row and the model, whatever is scored beside it, however
//! many ranks there are, and whether an evaluation was interrupted. Excepted are recipes of FP8 that scale
//! whole tensors: there, the rows of a batch share scales, and batches follow from the task and the device.
//!
//! Deliberately absent: rules of rows and their encoding (crate `data`), intervals and comparisons (crate
//! `report`), the programs (crate `step`).

mod checked;
pub mod error;
mod exchange;
mod folder;
mod model;
mod model_hash;
mod score;

pub use checked::CheckedTask;
pub use exchange::Exchange;
pub use folder::ScoresFolder;
pub use model::{Earlier, ScoredModel};
