//! Tokens of a sample, and which of them are trained.

use std::ops::Range;

use crate::error::ChatError;
use crate::mask::MaskedText;

/// A token and its place in the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncodedToken {
    /// Id in the vocabulary.
    pub id: u32,
    /// First character of the token.
    pub start: usize,
    /// The character after its last.
    pub end: usize,
}

/// A tokenizer.
pub trait Encode {
    /// Encodes a piece of text without adding tokens. Places are counted in characters of the piece.
    ///
    /// `splits_special`: names of special tokens are text. `begins`: the piece begins the sample; to any
    /// other, no space is put before it.
    ///
    /// # Errors
    /// A text that the tokenizer cannot encode.
    fn encode(&self, text: &str, splits_special: bool, begins: bool) -> Result<Vec<EncodedToken>, ChatError>;
}

/// An encoded sample.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// True for each token that is trained.
    pub trained: Vec<bool>,
    /// Number of trained tokens that reach beyond their range.
    pub crossing: usize,
}

/// Encodes a sample. A token that overlaps a trained range is trained. A sample without names of special
/// tokens in its row is encoded in one piece.
///
/// # Errors
/// Those of the tokenizer.
pub fn encode(encoder: &dyn Encode, sample: &MaskedText) -> Result<Encoded, ChatError> {
    let mut tokens = Vec::new();
    let (mut from, mut chars) = (0, 0);
    let mut piece = |range: Range<usize>, splits_special: bool| -> Result<(), ChatError> {
        let text = &sample.text[range.clone()];
        if text.is_empty() {
            return Ok(());
        }
        let encoded = encoder.encode(text, splits_special, range.start == 0)?;
        tokens.extend(encoded.into_iter().map(|EncodedToken { id, start, end }| EncodedToken {
            id,
            start: start + chars,
            end: end + chars,
        }));
        chars += text.chars().count();
        Ok(())
    };
    for literal in &sample.literals {
        piece(from..literal.start, false)?;
        piece(literal.clone(), true)?;
        from = literal.end;
    }
    piece(from..sample.text.len(), false)?;
    Ok(mark(tokens, &in_chars(&sample.text, &sample.trained)))
}

/// Marks the tokens that overlap a range of characters.
fn mark(tokens: Vec<EncodedToken>, ranges: &[Range<usize>]) -> Encoded {
    let mut encoded = Encoded::default();
    let mut at = 0;
    for EncodedToken { id, start, end } in tokens {
        while ranges.get(at).is_some_and(|range| start >= range.end) {
            at += 1;
        }
        let range = ranges.get(at).filter(|range| end > range.start);
        encoded.ids.push(id);
        encoded.trained.push(range.is_some());
        encoded.crossing += usize::from(range.is_some_and(|range| start < range.start || end > range.end));
    }
    encoded
}

/// Ranges of bytes as ranges of characters.
fn in_chars(text: &str, ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let (mut byte, mut chars) = (0, 0);
    let mut to_chars = |at: usize| {
        chars += text[byte..at].chars().count();
        byte = at;
        chars
    };
    ranges.iter().map(|range| to_chars(range.start)..to_chars(range.end)).collect()
}
