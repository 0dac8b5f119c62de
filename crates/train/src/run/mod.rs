//! A training run from its file to its folder.
//!
//! ```text
//! <out>/config.toml      the resolved configuration         <out>/checkpoints/step-N/   state, complete or absent
//! <out>/tokenizer/       the tokenizer                      <out>/hf/                   the last state as a Hugging Face folder
//! <out>/metrics.jsonl    every reported step and event      <out>/sample.txt            what the model wrote at the end
//! <out>/events.out.*     the same for TensorBoard           <out>/report.html           curves and figures on one page
//! <out>/source/          what init_from said of its model  <out>/trace.json           what was run when, with --profile
//! ```

mod choices;
mod finish;
mod open;
mod reference;
mod snapshot;
#[cfg(test)]
mod tests;
mod trainer;
mod writing;

pub use crate::spec::plan;
pub use trainer::{Observer, Outcome, Start, train, train_profiled};
