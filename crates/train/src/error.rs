//! The error that ends a run, and whether the user can fix it.

use std::path::{Path, PathBuf};
use thiserror::Error;
use xtrain_checkpoint::CheckpointError;
use xtrain_config::ConfigErrors;
use xtrain_config::files::advice;
use xtrain_data::DataError;
use xtrain_distributed::CommError;
use xtrain_evaluation::error::EvaluationError;
use xtrain_model::ModelError;
use xtrain_planner::error::PlanError;
use xtrain_report::ReportError;
use xtrain_report::metrics::MetricsError;
use xtrain_step::error::LearnError;

/// Error that ends a run. [`RunError::is_users`] decides the exit code.
#[derive(Error)]
pub enum RunError {
    /// The run file.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// Text, tokens or tokenizer.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model folder or checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The description of a model, with its place.
    #[error("{place}: {error}")]
    Model {
        /// The folder or file.
        place: String,
        /// The error in the description.
        error: ModelError,
    },
    /// The metrics files.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The report.
    #[error(transparent)]
    Report(#[from] ReportError),
    /// A program or an engine.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// A file of the run folder.
    #[error("{}: cannot {action}: {source}{}", path.display(), advice(source))]
    Io {
        /// The file.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another process of the run failed, or could not be reached.
    #[error(transparent)]
    Ranks(#[from] CommError),
    /// A score that is not a finite number.
    #[error(transparent)]
    Task(EvaluationError),
    /// Anything else that the user can fix: the problem and the remedy.
    #[error("{0}")]
    Refused(String),
    /// Too many consecutive steps that were not finite.
    #[error("{0}")]
    Diverged(String),
}

xtrain_tensor::debug_as_display!(RunError);

impl From<PlanError> for RunError {
    fn from(error: PlanError) -> RunError {
        match error {
            PlanError::Config(errors) => RunError::Config(errors),
            PlanError::Model { place, error } => RunError::Model { place, error },
            PlanError::Learn(error) => RunError::Learn(error),
            PlanError::Refused(text) => RunError::Refused(text),
        }
    }
}

impl From<EvaluationError> for RunError {
    fn from(error: EvaluationError) -> RunError {
        match error {
            EvaluationError::Data(error) => RunError::Data(error),
            EvaluationError::Report(error) => RunError::Report(error),
            EvaluationError::Learn(error) => RunError::Learn(error),
            EvaluationError::Ranks(error) => RunError::Ranks(error),
            EvaluationError::Refused(text) => RunError::Refused(text),
            EvaluationError::NotFinite { .. } => RunError::Task(error),
        }
    }
}

impl RunError {
    /// True if the user can fix it: exit code 2; otherwise 1.
    pub fn is_users(&self) -> bool {
        match self {
            RunError::Data(e) => e.is_users(),
            RunError::Learn(e) => e.is_users(),
            RunError::Checkpoint(e) => e.is_users(),
            RunError::Ranks(e) => e.is_users(),
            RunError::Task(e) => e.is_users(),
            _ => true,
        }
    }

    /// The error of a system call; `action` is the attempt, such as "cannot read".
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> RunError {
        let path = path.to_path_buf();
        move |source| RunError::Io { path, action, source }
    }
}
