//! The tokens at the start of each document.
//!
//! Prompts start with the tokens that the tokenizer's file specifies, here and in other engines. A model that
//! never saw them in training would start from an unknown context, so documents start with them too.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use crate::error::{DataError, Result};

/// Choice of the tokens at the start of documents and prompts. Serialized as "auto", true or false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "SerializedChoice", into = "SerializedChoice")]
pub enum BeginOfDocument {
    /// The tokens that the template of the tokenizer's file puts before a text, possibly none.
    #[default]
    Auto,
    /// Those of the template, or else the beginning-of-sequence token that the files name.
    Always,
    /// None.
    Never,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum SerializedChoice {
    Flag(bool),
    AutoWord(AutoWord),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum AutoWord {
    Auto,
}

impl From<SerializedChoice> for BeginOfDocument {
    fn from(written: SerializedChoice) -> Self {
        match written {
            SerializedChoice::AutoWord(AutoWord::Auto) => BeginOfDocument::Auto,
            SerializedChoice::Flag(true) => BeginOfDocument::Always,
            SerializedChoice::Flag(false) => BeginOfDocument::Never,
        }
    }
}

impl From<BeginOfDocument> for SerializedChoice {
    fn from(choice: BeginOfDocument) -> Self {
        match choice {
            BeginOfDocument::Auto => SerializedChoice::AutoWord(AutoWord::Auto),
            BeginOfDocument::Always => SerializedChoice::Flag(true),
            BeginOfDocument::Never => SerializedChoice::Flag(false),
        }
    }
}

impl FromStr for BeginOfDocument {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "auto" => Ok(BeginOfDocument::Auto),
            "true" => Ok(BeginOfDocument::Always),
            "false" => Ok(BeginOfDocument::Never),
            _ => Err("use auto, true or false".to_owned()),
        }
    }
}

impl Tokenizer {
    /// Sets the tokens at the start of documents and prompts. A loaded tokenizer has
    /// [`BeginOfDocument::Auto`].
    ///
    /// # Errors
    /// [`BeginOfDocument::Always`] if no file names such a token.
    pub fn with_begin_of_document(self, choice: BeginOfDocument) -> Result<Tokenizer> {
        let begin = match choice {
            BeginOfDocument::Never => Vec::new(),
            BeginOfDocument::Always if self.template_begin.is_empty() => {
                let bos = self.begin.ok_or_else(|| {
                    DataError::tokenizer(
                        "begin_of_document = true",
                        "no file of the tokenizer names a beginning-of-sequence token",
                        "add \"bos_token\" to its tokenizer_config.json, or omit begin_of_document",
                    )
                })?;
                vec![bos]
            }
            BeginOfDocument::Always | BeginOfDocument::Auto => self.template_begin.clone(),
        };
        Ok(self.with_document_begin(begin))
    }

    /// Replaces the tokens at the start of documents.
    pub(crate) fn with_document_begin(self, document_begin: Vec<u32>) -> Tokenizer {
        Tokenizer { document_begin, ..self }
    }

    /// The tokens at the start of documents and prompts, usually none or one.
    pub fn document_begin(&self) -> &[u32] {
        &self.document_begin
    }
}

/// The tokens that the template of `tokenizer` puts before a text. `ends` are the tokens that it may put
/// after one.
pub(super) fn tokens_before_text(
    tokenizer: &tokenizers::Tokenizer,
    ends: &[u32],
) -> tokenizers::Result<Vec<u32>> {
    if tokenizer.get_post_processor().is_none() {
        return Ok(Vec::new());
    }
    let with = tokenizer.encode_fast("a", true)?;
    let without = tokenizer.encode_fast("a", false)?;
    let (with, without) = (with.get_ids(), without.get_ids());
    let len = match without {
        // The letter has no token, so all tokens are the template's.
        [] => with.iter().rposition(|id| !ends.contains(id)).map_or(0, |last| last + 1),
        _ => with.windows(without.len()).position(|window| window == without).unwrap_or(0),
    };
    Ok(with[..len].to_vec())
}
