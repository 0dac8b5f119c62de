//! Tokenizers that are generated here: bytes, the characters of texts, and trained byte-level BPE.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use serde_json::{Map, Value};

use super::train_bpe::WordCounts;
use super::{Tokenizer, end_tokens, load, tokenizer_json};
use crate::error::{DataError, Result};

/// Minimum size of a byte-level BPE vocabulary: 256 bytes and the end-of-document token.
pub const MIN_BPE_TOKENS: usize = 257;

/// Bytes of text per batch in which training counts words.
const FEED_BYTES: usize = 8 << 20;

impl Tokenizer {
    /// The tokenizer of plain bytes: 256 tokens and the end-of-document token.
    pub fn bytes() -> Tokenizer {
        Tokenizer::from_generated_json(&tokenizer_json::bytes()).expect("the bytes tokenizer is a constant")
    }

    /// The tokenizer of characters: one token per distinct character of `texts`, in the order of code points,
    /// and the end-of-document token. Encoding any other character is an error.
    ///
    /// # Errors
    /// Texts without characters; the first error of `texts`.
    pub fn chars(texts: impl IntoIterator<Item = Result<String>>) -> Result<Tokenizer> {
        let mut alphabet = BTreeSet::new();
        for text in texts {
            alphabet.extend(text?.chars());
        }
        if alphabet.is_empty() {
            return Err(no_text("chars"));
        }
        Tokenizer::from_generated_json(&tokenizer_json::chars(&alphabet))
    }

    /// Trains byte-level BPE on `texts`: 256 bytes, merges, and the end-of-document token as the last id, at
    /// most `vocab_size` tokens. There are fewer if the text has too few repeated pairs. Equal texts give
    /// byte-identical files, with any number of threads. `on_merge` gets the number of merges found and the
    /// maximum before each merge; [`ControlFlow::Break`] stops the training.
    ///
    /// # Errors
    /// A `vocab_size` below [`MIN_BPE_TOKENS`]; texts without characters; the first error of `texts`;
    /// [`DataError::Interrupted`].
    pub fn train_bpe(
        texts: impl IntoIterator<Item = Result<String>>,
        vocab_size: usize,
        on_merge: &mut dyn FnMut(usize, usize) -> ControlFlow<()>,
    ) -> Result<Tokenizer> {
        let Some(max_merges) = vocab_size.checked_sub(MIN_BPE_TOKENS) else {
            return Err(DataError::invalid(
                format!("a byte-level vocabulary of {vocab_size} tokens is too small"),
                format!("use at least {MIN_BPE_TOKENS} (256 bytes and the end-of-document token)"),
            ));
        };
        let mut counts = WordCounts::default();
        let mut waiting = Vec::new();
        let mut waiting_bytes = 0;
        let mut seen_text = false;
        for text in texts {
            let text = text?;
            seen_text |= !text.is_empty();
            waiting_bytes += text.len();
            waiting.push(text);
            if waiting_bytes >= FEED_BYTES {
                counts.feed(&waiting);
                waiting.clear();
                waiting_bytes = 0;
            }
        }
        counts.feed(&waiting);
        if !seen_text {
            return Err(no_text("bpe"));
        }
        let merges = counts.learn_merges(max_merges, on_merge)?;
        if merges.len() < max_merges {
            tracing::warn!(
                "the text has too few repeated pairs for {vocab_size} tokens; the vocabulary has {}",
                MIN_BPE_TOKENS + merges.len()
            );
        }
        Tokenizer::from_generated_json(&tokenizer_json::byte_level_bpe(&merges))
    }

    fn from_generated_json(json: &Value) -> Result<Tokenizer> {
        let bytes = serde_json::to_vec_pretty(json).map_err(|e| DataError::Internal(e.to_string()))?;
        let config = serde_json::to_vec_pretty(&tokenizer_json::config(Some(tokenizer_json::END_OF_TEXT)))
            .map_err(|e| DataError::Internal(e.to_string()))?;
        let side_files = BTreeMap::from([("tokenizer_config.json".to_owned(), config)]);
        let source =
            end_tokens::TokenizerSource { location: "generated", side_folder: None, end_of_document: None };
        load::from_parts(&source, bytes, side_files, end_tokens::ConfigTokens::default(), Map::new())
    }
}

fn no_text(kind: &str) -> DataError {
    DataError::tokenizer(kind, "there is no text to learn a vocabulary from", "name input that is not empty")
}
