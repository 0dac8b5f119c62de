//! Which tokens begin a document.
//!
//! A prompt begins as the tokenizer's file says, and so does it in the engines that serve the model later. A model
//! that never saw those tokens in training continues from a place that it does not know, so documents begin with
//! them too.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Tokenizer;
use crate::error::{DataError, Result};

/// Whether documents and prompts begin with the tokenizer's begin token. Written as "auto", true or false.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "SerializedChoice", into = "SerializedChoice")]
pub enum BeginOfDocument {
    /// With what the template of the tokenizer's file puts before a text, be it nothing.
    #[default]
    Auto,
    /// With what the template says, or else with the token that the files name as beginning a sequence.
    Always,
    /// With nothing.
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
            _ => Err("it is auto, true or false".to_owned()),
        }
    }
}

impl Tokenizer {
    /// The same tokenizer, whose documents and prompts begin as `choice` says. As loaded it is
    /// [`BeginOfDocument::Auto`].
    ///
    /// # Errors
    /// [`BeginOfDocument::Always`] where no file names a token for it.
    pub fn with_begin_of_document(self, choice: BeginOfDocument) -> Result<Tokenizer> {
        let begin = match choice {
            BeginOfDocument::Never => Vec::new(),
            BeginOfDocument::Always if self.template_begin.is_empty() => {
                let bos = self.begin.ok_or_else(|| {
                    DataError::tokenizer(
                        "begin_of_document = true",
                        "no file of the tokenizer names a token that begins a text",
                        "add \"bos_token\" to its tokenizer_config.json, or leave begin_of_document out",
                    )
                })?;
                vec![bos]
            }
            BeginOfDocument::Always | BeginOfDocument::Auto => self.template_begin.clone(),
        };
        Ok(self.with_document_begin(begin))
    }

    /// The same tokenizer with other tokens at the beginning of a document.
    pub(crate) fn with_document_begin(self, document_begin: Vec<u32>) -> Tokenizer {
        Tokenizer { document_begin, ..self }
    }

    /// The tokens that begin each document and each prompt; mostly none or one.
    pub fn document_begin(&self) -> &[u32] {
        &self.document_begin
    }
}

/// What the template of `tokenizer` puts before a text. `ends` are the tokens that it may put behind one.
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
        // No token for the letter: all that is there is the template's.
        [] => with.iter().rposition(|id| !ends.contains(id)).map_or(0, |last| last + 1),
        _ => with.windows(without.len()).position(|window| window == without).unwrap_or(0),
    };
    Ok(with[..len].to_vec())
}
