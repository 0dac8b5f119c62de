//! What can end a run, and whose fault it is.

use crate::advice::advice;
use crate::config::ConfigErrors;
use crate::metrics::MetricsError;
use crate::report::ReportError;
use crate::weights::LearnError;
use std::path::{Path, PathBuf};
use thiserror::Error;
use xtrain_checkpoint::CheckpointError;
use xtrain_data::DataError;
use xtrain_model::ModelError;

/// What can end a run. [`RunError::is_users`] tells the exit code.
#[derive(Debug, Error)]
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
    /// A model's description, by where it stands.
    #[error("{place}: {error}")]
    Model {
        /// The folder or file.
        place: String,
        /// What is wrong with it.
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
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
    /// Anything else the user can mend: what is wrong, and what to do.
    #[error("{0}")]
    Refused(String),
    /// Too many steps in a row that were not finite.
    #[error("{0}")]
    Diverged(String),
}

impl RunError {
    /// Whether the user can mend it: exit code 2; otherwise 1.
    pub fn is_users(&self) -> bool {
        match self {
            RunError::Data(e) => e.is_users(),
            RunError::Learn(e) => e.is_users(),
            RunError::Checkpoint(e) => e.is_users(),
            _ => true,
        }
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> RunError {
        let path = path.to_path_buf();
        move |source| RunError::Io { path, action, source }
    }
}
