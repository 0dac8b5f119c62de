//! Formats of rows, recognised by their keys.

use std::fmt;

use serde_json::{Map, Value};

use super::names;
use crate::error::ChatError;

/// A format of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// `messages` with `role` and `content`, and `tools` beside it.
    Messages,
    /// `conversations` with `from` and `value`, or with `role` and `content`.
    Conversations,
    /// `prompt` and `completion`: strings, or lists of messages.
    PromptCompletion,
    /// `instruction`, `input` if any, and `output`.
    Instruction,
    /// `text`.
    Text,
}

impl Format {
    /// Keys of the format, for messages.
    pub fn keys(self) -> &'static str {
        match self {
            Format::Messages => "messages",
            Format::Conversations => "conversations",
            Format::PromptCompletion => "prompt and completion",
            Format::Instruction => "instruction and output",
            Format::Text => "text",
        }
    }

    /// True for rows that hold more than plain text.
    pub fn is_chat(self) -> bool {
        self != Format::Text
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.keys())
    }
}

/// The format of a row, by the keys that are not null; the first that fits.
///
/// # Errors
/// No known keys: names the keys found and the keys known.
pub fn recognise(row: &Map<String, Value>) -> Result<Format, ChatError> {
    let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
    match () {
        () if has("messages") => Ok(Format::Messages),
        () if has("conversations") => Ok(Format::Conversations),
        () if has("prompt") && has("completion") => Ok(Format::PromptCompletion),
        () if has("instruction") && has("output") => Ok(Format::Instruction),
        () if has("text") => Ok(Format::Text),
        () => Err(ChatError::new(
            format!("the row has no known keys (it has {})", names(row.keys())),
            "known are messages; conversations; prompt with completion; instruction with output; text",
        )),
    }
}
