//! Errors of evaluations.

use std::io;
use std::path::Path;
use thiserror::Error;
use xtrain_checkpoint::CheckpointError;
use xtrain_data::DataError;
use xtrain_distributed::CommError;
use xtrain_report::ReportError;
use xtrain_step::error::LearnError;

/// Error of an evaluation.
#[derive(Error)]
pub enum EvaluationError {
    /// Text, a task, its rows, or the tokenizer.
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

xtrain_tensor::debug_as_display!(EvaluationError);

impl EvaluationError {
    /// True if the user can fix it: exit code 2; otherwise 1.
    pub fn is_users(&self) -> bool {
        match self {
            EvaluationError::Data(error) => error.is_users(),
            EvaluationError::Learn(error) => error.is_users(),
            EvaluationError::Report(_) | EvaluationError::Refused(_) => true,
            EvaluationError::Ranks(error) => error.is_users(),
            EvaluationError::NotFinite { .. } => false,
        }
    }

    /// The error of an operation on `path`: a verb, such as "open".
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> EvaluationError {
        let error = CheckpointError::io(path, action);
        move |source| EvaluationError::Report(error(source).into())
    }
}
