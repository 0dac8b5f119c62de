//! Formats of rows, recognised by their keys.

use std::fmt;

use serde_json::{Map, Value};

use super::names;
use crate::error::ChatError;

/// A format of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowFormat {
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

impl RowFormat {
    /// Keys of the format, for messages.
    pub fn keys(self) -> &'static str {
        match self {
            RowFormat::Messages => "messages",
            RowFormat::Conversations => "conversations",
            RowFormat::PromptCompletion => "prompt and completion",
            RowFormat::Instruction => "instruction and output",
            RowFormat::Text => "text",
        }
    }

    /// True for rows that hold more than plain text.
    pub fn is_chat(self) -> bool {
        self != RowFormat::Text
    }
}

impl fmt::Display for RowFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.keys())
    }
}

/// The format of a row, by the keys that are not null; the first that fits.
///
/// # Errors
/// No known keys: names the keys found and the keys known.
pub fn recognise(row: &Map<String, Value>) -> Result<RowFormat, ChatError> {
    let has = |key: &str| row.get(key).is_some_and(|value| !value.is_null());
    match () {
        () if has("messages") => Ok(RowFormat::Messages),
        () if has("conversations") => Ok(RowFormat::Conversations),
        () if has("prompt") && has("completion") => Ok(RowFormat::PromptCompletion),
        () if has("instruction") && has("output") => Ok(RowFormat::Instruction),
        () if has("text") => Ok(RowFormat::Text),
        () => Err(ChatError::new(
            format!("the row has no known keys (it has {})", names(row.keys())),
            "known are messages; conversations; prompt with completion; instruction with output; text",
        )),
    }
}
