//! Errors of programs and of a model in use, and whether the user can fix them.

use thiserror::Error;
use xtrain_distributed::CommError;
use xtrain_program::TraceError;
use xtrain_program::backward::BackwardError;
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
    /// A device that cannot be used, or cannot compute what is asked: the problem and the remedy.
    #[error("{0}")]
    Device(String),
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
            LearnError::Logits(_) | LearnError::Memory { .. } | LearnError::Device(_) => true,
            LearnError::Engine(EngineError::Cuda(e)) => e.is_about_the_machine(),
            LearnError::Engine(e) => matches!(e, EngineError::Memory { .. } | EngineError::NonFinite { .. }),
            LearnError::Collective(_) => false,
            LearnError::Program(e) => matches!(e, ProgramError::Refused(_)),
        }
    }
}
