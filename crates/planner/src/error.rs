//! The error of a plan.

use thiserror::Error;
use xtrain_config::ConfigErrors;
use xtrain_model::ModelError;
use xtrain_step::error::LearnError;

/// Error of a plan. Crate `train` knows which a user can fix.
#[derive(Error)]
pub enum PlanError {
    /// The run file.
    #[error(transparent)]
    Config(#[from] ConfigErrors),
    /// The description of a model, with its place.
    #[error("{place}: {error}")]
    Model {
        /// The folder or file.
        place: String,
        /// The error in the description.
        error: ModelError,
    },
    /// A program or an engine.
    #[error(transparent)]
    Learn(#[from] LearnError),
    /// Anything else that the user can fix: the problem and the remedy.
    #[error("{0}")]
    Refused(String),
}

xtrain_tensor::debug_as_display!(PlanError);
