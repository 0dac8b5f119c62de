//! Evaluation of a model: the loss of held-out text, and scores on the rows of tasks.
//!
//! ```text
//! text (data) -> batches -> rounds of the ranks (loss) -> sums over targets
//! rows (data::task) -> windows -> rounds of the ranks (step::scoring) -> numbers of each row (report::scores)
//! rows (data::task) -> answers (step::generate) -> the same
//! ```
//!
//! Invariants: a loss has the same bits for any number of ranks. The numbers of a row follow from the row and
//! the model, whatever is scored beside it, however many ranks there are, and whether an evaluation was
//! interrupted. Excepted are recipes of FP8 that scale whole tensors: there, the rows of a batch share
//! scales, and batches follow from the task and the device.
//!
//! Deliberately absent: rules of rows and their encoding (crate `data`), intervals and comparisons (crate
//! `report`), the programs (crate `step`), processes (crate `train`).

mod answers;
mod checked;
mod checkpoint_scales;
pub mod error;
mod exchange;
pub mod loss;
mod model_hash;
mod row_check;
mod score;
mod scored_file;

pub use answers::{answer_generator, answer_tokens};
pub use checked::{CheckedTask, check_hashes, shapes};
pub use checkpoint_scales::read_scales;
pub use exchange::{Exchange, Gather};
pub use score::{ScoredModel, model_name};
