//! The token stream, the input of the loader: one sequence of tokens with the positions where documents end.

use std::fmt::Debug;
use std::ops::Range;

use crate::chat::ChatRecord;
use crate::error::{DataError, Result};

/// A sequence of tokens with random access.
pub trait TokenStream: Send + Sync + Debug {
    /// Name for messages.
    fn name(&self) -> &str;

    /// Number of tokens, including end-of-document tokens.
    fn token_count(&self) -> u64;

    /// Size of the text that the tokens encode, if known. Bits per byte are computed from it.
    fn text_bytes(&self) -> Option<u64>;

    /// Exclusive upper bound of token ids.
    fn vocab_size(&self) -> usize;

    /// Hash of the tokens, their order, which of them are trained, the ends of documents and their questions.
    fn fingerprint(&self) -> u64;

    /// Reads `out.len()` tokens at position `start`.
    ///
    /// # Errors
    /// A read past the end, a file that shrank, a damaged block, a token outside the vocabulary.
    fn read(&self, start: u64, out: &mut [i32]) -> Result<()>;

    /// Reads whether tokens are trained, for `out.len()` tokens at position `start`. The bit of a document's
    /// first token, which is no target, says whether the document belongs to the conversation of the one
    /// before. By default all tokens are trained.
    ///
    /// # Errors
    /// Those of [`TokenStream::read`].
    fn trained(&self, start: u64, out: &mut [bool]) -> Result<()> {
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.token_count()) {
            return Err(DataError::Internal(format!(
                "a read of {} bits at {start} of {}, which has {} tokens",
                out.len(),
                self.name(),
                self.token_count()
            )));
        }
        out.fill(true);
        Ok(())
    }

    /// True if some tokens may be untrained: the tokens are conversations, or prompts with answers.
    fn has_untrained(&self) -> bool {
        false
    }

    /// The hash of each document's question, the first message of a user in its conversation: documents with
    /// equal ones are held out together. `None` if they are not known.
    ///
    /// # Errors
    /// A file that shrank, a damaged block.
    fn questions(&self) -> Result<Option<Vec<u64>>> {
        Ok(None)
    }

    /// How rows of conversations became these tokens, if they are that.
    fn chat(&self) -> Option<&ChatRecord> {
        None
    }

    /// Appends the positions in `range` at which a document has ended, ascending. The next document begins
    /// there.
    ///
    /// # Errors
    /// A file that shrank, a damaged block.
    fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()>;
}

/// The error for a read past the end, a bug of the caller.
pub(crate) fn past_the_end(stream: &dyn TokenStream, start: u64, len: usize) -> DataError {
    DataError::Internal(format!(
        "a read of {len} tokens at {start} of {}, which has {}",
        stream.name(),
        stream.token_count()
    ))
}

/// The error for a token outside the vocabulary.
pub(crate) fn outside_vocabulary(name: &str, token: u32, at: u64, vocab_size: usize) -> DataError {
    DataError::invalid(
        format!("{name}: token {token} at position {at} is outside the vocabulary of {vocab_size}"),
        "tokenize with the tokenizer of this model, or verify the dataset's checksums",
    )
}
