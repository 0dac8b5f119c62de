//! Streaming decoder, for generation.

use super::{SpecialTokens, Tokenizer};
use crate::error::Result;

/// Decoder that takes one token at a time and returns text as soon as it is complete. The bytes of a
/// character may be spread over several tokens, and some decoders treat the first token of a text
/// differently, so each new token is decoded with a short context.
#[derive(Debug)]
pub struct StreamDecoder<'t> {
    tokenizer: &'t Tokenizer,
    special: SpecialTokens,
    /// Tokens of the text returned last, as context, then tokens whose text is pending.
    ids: Vec<u32>,
    /// Index in `ids` of the first pending token.
    pending: usize,
}

/// Maximum number of pending tokens. If there are more, all but the last character is returned, because no
/// character has that many tokens.
const MAX_PENDING: usize = 8;

impl<'t> StreamDecoder<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, before: &[u32], special: SpecialTokens) -> Result<Self> {
        // A character that is incomplete in `before` would change with the next token.
        let is_complete = !tokenizer.decode(before, special)?.ends_with('\u{FFFD}');
        let ids = if is_complete { before.to_vec() } else { Vec::new() };
        Ok(StreamDecoder { tokenizer, special, pending: ids.len(), ids })
    }

    /// Adds the next token and returns the text that it completes, which may be empty.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let now = self.tokenizer.decode(&self.ids, self.special)?;
        // An incomplete character decodes to U+FFFD at the end; so may a complete one.
        if !now.ends_with('\u{FFFD}') {
            return self.take_text(&now, self.ids.len());
        }
        if self.ids.len() - self.pending <= MAX_PENDING {
            return Ok(String::new());
        }
        // Return all but the last character: the text before it ends with a complete one.
        for end in (self.pending..self.ids.len()).rev() {
            let without = self.tokenizer.decode(&self.ids[..end], self.special)?;
            if without.len() < now.len() && now.starts_with(&without) {
                return self.take_text(&without, end);
            }
        }
        Ok(String::new())
    }

    /// Returns the pending text. Bytes of an incomplete character become U+FFFD.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        let now = self.tokenizer.decode(&self.ids, self.special)?;
        self.take_text(&now, self.ids.len())
    }

    /// The part of `now`, the text of the first `end` tokens, that has not been returned.
    fn take_text(&mut self, now: &str, end: usize) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.pending], self.special)?;
        let text = now.get(before.len()..).unwrap_or_default().to_owned();
        if !text.is_empty() {
            self.ids.drain(..self.pending);
            self.pending = end - self.pending;
        }
        Ok(text)
    }
}
