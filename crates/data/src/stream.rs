//! What the loader reads: one long sequence of tokens in which documents end.

use std::fmt::Debug;
use std::ops::Range;

use crate::error::{DataError, Result};

/// A sequence of tokens that can be read anywhere.
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
