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
mod corpus;
mod error;
mod finish;
pub(crate) mod fit;
mod folder;
mod open;
mod reference;
pub(crate) mod saved;
pub(crate) mod setup;
#[cfg(test)]
mod tests;
mod trainer;
mod writing;

pub use corpus::Corpus;
pub use error::RunError;
pub use fit::{Fit, Outcome as FitOutcome, Room, Way};
pub use folder::RunFolder;
pub use setup::{Planned, plan, plan_on};
pub(crate) use trainer::IN_FLIGHT;
pub use trainer::{Observer, Outcome, Start, train, train_profiled};

use xtrain_data::{LearnProgress, Progress, VocabularyKind};

/// Something that a run does before its first step.
#[derive(Clone, Debug)]
pub enum Notice {
    /// A vocabulary is made of the training text.
    Learning {
        /// Which.
        vocabulary: VocabularyKind,
        /// How far it is.
        progress: LearnProgress,
    },
    /// A text is turned into tokens.
    Tokenizing {
        /// The source.
        path: String,
        /// How far it is.
        progress: Progress,
    },
}
