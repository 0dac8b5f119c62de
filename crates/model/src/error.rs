//! Errors in the description of a model.

use thiserror::Error;

/// An error in a model's description, and its remedy.
#[derive(Clone, Error, PartialEq, Eq)]
pub enum ModelError {
    /// Sizes that contradict each other.
    #[error("{0}")]
    Sizes(String),
    /// A file of a Hugging Face folder that is not supported.
    #[error("{file}: {message}")]
    HuggingFace {
        /// `config.json`, `generation_config.json` or `adapter_config.json`.
        file: &'static str,
        /// The error and its remedy.
        message: String,
    },
}

xtrain_tensor::debug_as_display!(ModelError);
