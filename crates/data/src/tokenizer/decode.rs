//! Tokens to text one at a time, for generation.

use super::{SpecialTokens, Tokenizer};
use crate::error::Result;

/// Gives text as soon as it is complete: the bytes of one character may be spread over several tokens, and some
/// decoders treat the first token of a text differently, so a short context is decoded with every new token.
#[derive(Debug)]
pub struct StreamDecoder<'t> {
    tokenizer: &'t Tokenizer,
    special: SpecialTokens,
    /// The tokens of the last text given, as context, then those not given yet.
    ids: Vec<u32>,
    /// Where in `ids` the tokens not given yet begin.
    given: usize,
}

/// More tokens than this without a complete character are given as they are: no character is this long.
const MAX_HELD_BACK: usize = 8;

impl<'t> StreamDecoder<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, special: SpecialTokens) -> Self {
        StreamDecoder { tokenizer, special, ids: Vec::new(), given: 0 }
    }

    /// Takes the next token and returns the text that it completes, possibly empty.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        let held_back = self.ids.len() - self.given;
        self.take_text(held_back > MAX_HELD_BACK)
    }

    /// Returns what is left at the end: bytes that never became a character are U+FFFD.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        self.take_text(true)
    }

    fn take_text(&mut self, even_if_incomplete: bool) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.given], self.special)?;
        let now = self.tokenizer.decode(&self.ids, self.special)?;
        // A character in the making shows as U+FFFD at the end.
        if now.ends_with('\u{FFFD}') && !even_if_incomplete {
            return Ok(String::new());
        }
        let text = now.get(before.len()..).unwrap_or_default().to_owned();
        if !text.is_empty() {
            self.ids.drain(..self.given);
            self.given = self.ids.len();
        }
        Ok(text)
    }
}
