//! Hugging Face's config.json: read in the old form and in transformers v5's (`read`), written so that both old and new readers agree
//! (`write`).
//!
//! What we do not understand but cannot change the result is kept and written back; what would change it (another activation,
//! sliding windows, other rope types) is refused by name.

mod read;
#[cfg(test)]
mod tests;
mod write;

use crate::{Architecture, ModelError};
use serde_json::{Map, Value};

/// A parsed config.json.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// The model that it describes.
    pub model: Architecture,
    /// The first token of every text, if any.
    pub bos_token_id: Option<u32>,
    /// The tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The file as it was, for what else is in it.
    pub source: Map<String, Value>,
    /// The generation_config.json beside it as it was; empty where there is none.
    pub generation: Map<String, Value>,
}

/// The context of the first training, in tokens.
const CONTEXT: &str = "original_max_position_embeddings";

/// What is said of weights that are quantized.
const QUANTIZATION: &str = "quantization_config";

/// Names that need not be imported: tables that the model computes.
pub const IGNORABLE_SUFFIXES: [&str; 1] = ["rotary_emb.inv_freq"];

fn fail(message: impl Into<String>) -> ModelError {
    ModelError::HuggingFace { file: "config.json", message: message.into() }
}
