//! What the loader reads: one long sequence of tokens in which documents end.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::{DataError, Result};

/// A sequence of tokens that can be read anywhere: a dataset folder, or tokens in memory.
pub trait TokenStream: Send + Sync + Debug {
    /// What to call it in messages.
    fn name(&self) -> &str;

    /// How many tokens there are, end-of-document tokens included.
    fn token_count(&self) -> u64;

    /// Bytes of the text behind all tokens, where it is known; what bits per byte are counted by.
    fn text_bytes(&self) -> Option<u64>;

    /// Every token is below this.
    fn vocab_size(&self) -> usize;

    /// Changes with the tokens, their order and the ends of documents.
    fn fingerprint(&self) -> u64;

    /// Fills `out` with the tokens from position `start` on.
    ///
    /// # Errors
    /// A read past the end, a file that shrank, a token outside the vocabulary.
    fn read(&self, start: u64, out: &mut [i32]) -> Result<()>;

    /// Appends, ascending, each position in `range` that follows the end of a document: the next one begins there.
    ///
    /// # Errors
    /// A file that shrank.
    fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()>;
}

/// Tokens in memory.
#[derive(Debug, Clone)]
pub struct MemoryTokens {
    name: String,
    tokens: Vec<i32>,
    ends: Vec<u64>,
    vocab_size: usize,
    text_bytes: Option<u64>,
    fingerprint: u64,
}

impl MemoryTokens {
    /// Packs documents: each one's tokens, then `end_of_document`.
    ///
    /// # Errors
    /// A token that is not below `vocab_size`.
    pub fn from_documents<D: AsRef<[u32]>>(
        name: impl Into<String>,
        documents: impl IntoIterator<Item = D>,
        end_of_document: u32,
        vocab_size: usize,
    ) -> Result<MemoryTokens> {
        let mut packed = MemoryTokens {
            name: name.into(),
            tokens: Vec::new(),
            ends: Vec::new(),
            vocab_size,
            text_bytes: None,
            fingerprint: 0,
        };
        for document in documents {
            for &token in document.as_ref().iter().chain([&end_of_document]) {
                if token as usize >= vocab_size || i32::try_from(token).is_err() {
                    return Err(outside_vocabulary(&packed.name, token, packed.token_count(), vocab_size));
                }
                packed.tokens.push(token as i32);
            }
            packed.ends.push(packed.token_count());
        }
        let of_tokens = xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(&packed.tokens));
        packed.fingerprint =
            xxhash_rust::xxh3::xxh3_64_with_seed(bytemuck::cast_slice(&packed.ends), of_tokens);
        Ok(packed)
    }

    /// The same tokens, made from this many bytes of text.
    #[must_use]
    pub fn with_text_bytes(self, text_bytes: u64) -> MemoryTokens {
        MemoryTokens { text_bytes: Some(text_bytes), ..self }
    }
}

impl TokenStream for MemoryTokens {
    fn name(&self) -> &str {
        &self.name
    }

    fn token_count(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn text_bytes(&self) -> Option<u64> {
        self.text_bytes
    }

    fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn read(&self, start: u64, out: &mut [i32]) -> Result<()> {
        let range = usize::try_from(start).ok().and_then(|start| Some(start..start.checked_add(out.len())?));
        let tokens = range.and_then(|range| self.tokens.get(range));
        out.copy_from_slice(tokens.ok_or_else(|| past_the_end(self, start, out.len()))?);
        Ok(())
    }

    fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        let first = self.ends.partition_point(|&end| end < range.start);
        out.extend(self.ends[first..].iter().take_while(|&&end| end < range.end));
        Ok(())
    }
}

/// The error for a read beyond a stream's tokens: ours, as callers know the count.
pub(crate) fn past_the_end(stream: &dyn TokenStream, start: u64, len: usize) -> DataError {
    DataError::Internal(format!(
        "{len} tokens wanted at {start} of {}, which has {}",
        stream.name(),
        stream.token_count()
    ))
}

/// The error for a token that the vocabulary does not have.
pub(crate) fn outside_vocabulary(name: &str, token: u32, at: u64, vocab_size: usize) -> DataError {
    DataError::invalid(
        format!("{name}: token {token} at position {at} is outside the vocabulary of {vocab_size}"),
        "tokenize with the tokenizer of this model, or verify the dataset's checksums",
    )
}
