//! Errors of scoring.

use std::io;
use std::path::Path;
use thiserror::Error;
use xtrain_checkpoint::CheckpointError;
use xtrain_data::DataError;
use xtrain_distributed::CommError;
use xtrain_report::ReportError;
use xtrain_step::error::LearnError;

/// Error of an evaluation on a task.
#[derive(Error)]
pub enum TaskError {
    /// A task, its rows, or the tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A file of scores.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// A program or an engine.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A message between ranks.
    #[error(transparent)]
    Ranks(#[from] CommError),
    /// A task that is not scored: the problem and the remedy.
    #[error("{0}")]
    Refused(String),
    /// Scores that are not finite numbers.
    #[error(
        "task {task}, {place}: the scores are {scores:?}; the weights of {model} are broken, or diverged in training; use another checkpoint"
    )]
    NotFinite {
        /// The task.
        task: String,
        /// The row's place in its file.
        place: String,
        /// Scores of its choices.
        scores: Vec<f64>,
        /// The model and its step.
        model: String,
    },
}

xtrain_tensor::debug_as_display!(TaskError);

impl TaskError {
    /// True if the user can fix it: exit code 2; otherwise 1.
    pub fn is_users(&self) -> bool {
        match self {
            TaskError::Data(error) => error.is_users(),
            TaskError::Learn(error) => error.is_users(),
            TaskError::Report(_) | TaskError::Refused(_) => true,
            TaskError::Ranks(error) => error.is_users(),
            TaskError::NotFinite { .. } => false,
        }
    }

    /// The error of an operation on `path`: a verb, such as "open".
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> TaskError {
        let error = CheckpointError::io(path, action);
        move |source| TaskError::Report(error(source).into())
    }
}
