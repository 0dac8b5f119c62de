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

/// Of more tokens than this without a character that is surely complete, all but the last character is given: none is this long.
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
        let now = self.tokenizer.decode(&self.ids, self.special)?;
        // A character in the making shows as U+FFFD at the end, as one that is whole may.
        if !now.ends_with('\u{FFFD}') {
            return self.take_text(&now, self.ids.len());
        }
        if self.ids.len() - self.given <= MAX_HELD_BACK {
            return Ok(String::new());
        }
        // All but the last character: where the text without it ends, none is in the making.
        for end in (self.given..self.ids.len()).rev() {
            let without = self.tokenizer.decode(&self.ids[..end], self.special)?;
            if without.len() < now.len() && now.starts_with(&without) {
                return self.take_text(&without, end);
            }
        }
        Ok(String::new())
    }

    /// Returns what is left at the end: bytes that never became a character are U+FFFD.
    ///
    /// # Errors
    /// Those of [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String> {
        let now = self.tokenizer.decode(&self.ids, self.special)?;
        self.take_text(&now, self.ids.len())
    }

    /// What `now`, the text of the first `end` tokens, has that was not given.
    fn take_text(&mut self, now: &str, end: usize) -> Result<String> {
        let before = self.tokenizer.decode(&self.ids[..self.given], self.special)?;
        let text = now.get(before.len()..).unwrap_or_default().to_owned();
        if !text.is_empty() {
            self.ids.drain(..self.given);
            self.given = end - self.given;
        }
        Ok(text)
    }
}
