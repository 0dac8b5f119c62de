//! Tokenizers, token shards and the deterministic, resumable loader.

mod error;
mod files;
pub mod tokenizer;

pub use error::{DataError, Result};
pub use tokenizer::{CutRule, SpecialTokens, StreamDecoder, Tokenizer};
