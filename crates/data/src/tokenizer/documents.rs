//! Documents as tokens: fast paths for four kinds of tokenizers, the `tokenizers` crate for all others.

use std::borrow::Cow;

use tokenizers::{NormalizedString, Normalizer};

use super::Tokenizer;
use super::encoder::Encoder;
use super::long_text::LongText;
use super::space_bpe::Prefix;
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};

/// Maximum size of text whose words the `tokenizers` crate has in memory at a time, over all threads. Its
/// memory use is up to 300 times that.
pub(crate) const MAX_HF_BYTES: usize = 3 << 20;

impl Tokenizer {
    /// Encodes a document, without special tokens.
    ///
    /// # Errors
    /// A character that a character vocabulary lacks; a text too long for this kind of tokenizer.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_piece(text, true)
    }

    /// Encodes a piece of a document that was split by [`Tokenizer::cut_rule`]. The tokens of all pieces in
    /// order are those of the document. Some vocabularies put a space before a document, so the first piece
    /// is marked.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`].
    pub fn encode_piece(&self, text: &str, begins_document: bool) -> Result<Vec<u32>> {
        if let Some(ids) = self.encode_fast(text, begins_document)? {
            return Ok(ids);
        }
        // A later piece starts with a space, and the mark that the crate puts before it takes its place.
        let replaces_space = match &self.encoder {
            Encoder::SpaceBpe(bpe) => bpe.prefix() == Prefix::Mark && !begins_document,
            _ => false,
        };
        self.encode_with_hf(text.strip_prefix(' ').filter(|_| replaces_space).unwrap_or(text))
    }

    /// As [`Tokenizer::encode_piece`], by a fast path; `None` for a text or a tokenizer that it does not
    /// encode.
    pub(super) fn encode_fast(&self, text: &str, begins_document: bool) -> Result<Option<Vec<u32>>> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        match &self.encoder {
            Encoder::Chars(vocab) => {
                for (at, c) in text.char_indices() {
                    ids.push(*vocab.get(&c).ok_or_else(|| unknown_character(text, at))?);
                }
            }
            Encoder::ByteBpe { bpe, nfc } => {
                let changes = *nfc && text.chars().any(may_change_under_nfc);
                let normalized =
                    if changes { Cow::Owned(self.normalise(text)?) } else { Cow::Borrowed(text) };
                let has_added = self.added.occurs_in(text) || self.added.occurs_in_normalized(&normalized);
                if has_added || bpe.lacks_byte_of(&normalized) {
                    return Ok(None);
                }
                bpe.encode(&normalized, &mut ids);
            }
            Encoder::SpaceBpe(bpe) => {
                let marked = bpe.mark(text, begins_document);
                let normalized = if bpe.normalizes() { &marked } else { text };
                if self.added.occurs_in(text) || self.added.occurs_in_normalized(normalized) {
                    return Ok(None);
                }
                bpe.encode_marked(&marked, &mut ids);
            }
            Encoder::HuggingFace => return Ok(None),
        }
        Ok(Some(ids))
    }

    /// Encodes a document with the `tokenizers` crate, with special tokens as plain text.
    fn encode_with_hf(&self, text: &str) -> Result<Vec<u32>> {
        let hf_plain_text = self.hf_plain_text();
        let _share = self.budget.take(text.len());
        self.refuse_growth(text)?;
        if text.len() > MAX_HF_BYTES {
            let Some(long_text) = self.long_text() else {
                return Err(DataError::tokenizer(
                    "of this kind",
                    format!("cannot encode {} MiB of text as one document", text.len() >> 20),
                    "split the document (with a separator, or one document per line)",
                ));
            };
            return long_text.encode(hf_plain_text, text).map_err(|e| self.refused_text(&e, text));
        }
        let encoding = catch_panic(|| hf_plain_text.encode_fast(text, false))
            .map_err(|e| self.refused_text(&e, text))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Fails if the normalizer would multiply `text` beyond a limit.
    pub(super) fn refuse_growth(&self, text: &str) -> Result<()> {
        let split = "split the document (with a separator, or one document per line), or check that file";
        self.normalized_size
            .check(text)
            .map_err(|problem| DataError::tokenizer(&self.location, problem, split))
    }

    pub(super) fn long_text(&self) -> Option<&LongText> {
        self.long_text.get_or_init(|| LongText::from_tokenizer(&self.hf)).as_ref()
    }

    /// The tokenizer that takes special tokens as plain text.
    pub(super) fn hf_plain_text(&self) -> &tokenizers::Tokenizer {
        self.hf_plain_text.get_or_init(|| {
            let mut copy = self.hf.clone();
            copy.set_encode_special_tokens(true);
            copy
        })
    }

    pub(super) fn normalise(&self, text: &str) -> Result<String> {
        let mut normalised = NormalizedString::from(text);
        if let Some(normalizer) = self.hf.get_normalizer() {
            catch_panic(|| normalizer.normalize(&mut normalised)).map_err(|e| self.refused(&e))?;
        }
        Ok(normalised.get().to_owned())
    }

    /// The error for a text that cannot be encoded, with its beginning, which users can search for.
    fn refused_text(&self, error: &str, text: &str) -> DataError {
        let begins = &text[..text.floor_char_boundary(24)];
        // The expression of a pre-tokenizer stops at a limit in a long run of letters or spaces.
        let is_long = error.contains("a word takes") || error.contains("limit") && error.contains("over");
        let advice = match is_long {
            true => "split or drop the document, or tokenize as bytes",
            false => "check that file",
        };
        let problem = format!("cannot encode the text that begins with {begins:?}: {error}");
        DataError::tokenizer(&self.location, problem, advice)
    }
}

/// True for a character that may change under NFC: none below U+0300 does.
pub(super) fn may_change_under_nfc(c: char) -> bool {
    c >= '\u{300}'
}

/// The error for the character at byte `at` of `text`, with the text before it, which users can search for.
pub(super) fn unknown_character(text: &str, at: usize) -> DataError {
    let c = text[at..].chars().next().unwrap_or_default();
    let before: String = text[text.floor_char_boundary(at.saturating_sub(24))..at].to_owned();
    DataError::tokenizer(
        "chars",
        format!("the character {c:?} (U+{:04X}) after {before:?} is not in the vocabulary", c as u32),
        "learn the vocabulary from text with that character, or use bytes or BPE",
    )
}
