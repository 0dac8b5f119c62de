//! Errors of a run and of a model in use, and whether the user can fix them.

use std::path::{Path, PathBuf};
use thiserror::Error;
use xtrain_checkpoint::CheckpointError;
use xtrain_config::ConfigErrors;
use xtrain_config::files::advice;
use xtrain_data::DataError;
use xtrain_distributed::CommError;
use xtrain_model::ModelError;
use xtrain_program::TraceError;
use xtrain_program::backward::BackwardError;
use xtrain_report::ReportError;
use xtrain_report::metrics::MetricsError;
use xtrain_runtime::EngineError;

/// An error of tracing or of a pass: sizes that the configuration should have refused, or a bug of ours.
#[derive(Clone, Error)]
pub enum ProgramError {
    /// An op refused its operands.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The backward pass could not be built.
    #[error(transparent)]
    Backward(#[from] BackwardError),
    /// The ranks of the run cannot share the model as asked: the problem and the remedy.
    #[error("{0}")]
    Refused(String),
}

xtrain_tensor::debug_as_display!(ProgramError);

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
    /// Anything else that the user can fix: the problem and the remedy.
    #[error("{0}")]
    Refused(String),
    /// Too many consecutive steps that were not finite.
    #[error("{0}")]
    Diverged(String),
}

xtrain_tensor::debug_as_display!(RunError);

impl RunError {
    /// True if the user can fix it: exit code 2; otherwise 1.
    pub fn is_users(&self) -> bool {
        match self {
            RunError::Data(e) => e.is_users(),
            RunError::Learn(e) => e.is_users(),
            RunError::Checkpoint(e) => e.is_users(),
            RunError::Ranks(CommError::Start(_) | CommError::Limit(_)) => true,
            RunError::Ranks(CommError::Aborted(fault)) => fault.is_users(),
            RunError::Ranks(_) => false,
            _ => true,
        }
    }

    /// The error of a system call; `action` is the attempt, such as "cannot read".
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> RunError {
        let path = path.to_path_buf();
        move |source| RunError::Io { path, action, source }
    }
}

/// Error of a model that is trained or run.
#[derive(Clone, Error)]
pub enum LearnError {
    /// A program could not be built.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// An error of the engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A collective outside of a program failed.
    #[error(transparent)]
    Collective(#[from] CommError),
    /// Too little memory, with advice.
    #[error("{error}; {advice}")]
    Memory {
        /// The error of the engine, with the missing bytes.
        error: EngineError,
        /// A request that needs less.
        advice: &'static str,
    },
    /// A model whose logits are not finite.
    #[error(
        "the model's logits contain {0}: its weights are broken, or it diverged in training; use another checkpoint or folder"
    )]
    Logits(f32),
}

xtrain_tensor::debug_as_display!(LearnError);

impl LearnError {
    /// This error, with the advice if it is about memory.
    pub fn advising(self, advice: &'static str) -> Self {
        match self {
            LearnError::Engine(error @ EngineError::Memory { .. }) => LearnError::Memory { error, advice },
            other => other,
        }
    }

    /// True if the user can fix it: too little memory, or numbers that are not finite.
    pub fn is_users(&self) -> bool {
        match self {
            LearnError::Logits(_) | LearnError::Memory { .. } => true,
            LearnError::Engine(EngineError::Cuda(e)) => e.is_about_the_machine(),
            LearnError::Engine(e) => matches!(e, EngineError::Memory { .. } | EngineError::NonFinite { .. }),
            LearnError::Collective(_) => false,
            LearnError::Program(e) => matches!(e, ProgramError::Refused(_)),
        }
    }
}
