//! Values of the keys of `[data]` about conversations.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Content of the rows of a source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum RowContent {
    /// Conversations if the first rows have their keys and no `text_field` is given, otherwise text.
    #[default]
    Auto,
    /// A text in `text_field`.
    Text,
    /// Conversations, prompts with completions, instructions with outputs, or texts.
    Chat,
}

/// Part of a conversation that is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// All answers.
    #[default]
    Assistant,
    /// The last answer.
    Last,
    /// The whole text.
    All,
}

/// Treatment of a conversation that is longer than a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// Left out, and counted.
    #[default]
    Drop,
    /// Its start is trained on.
    Truncate,
    /// Ends the run.
    Error,
}

/// Packing of conversations into sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChatPacking {
    /// Several whole conversations to a sequence.
    #[default]
    Whole,
    /// One conversation to a sequence.
    None,
}

/// Variables of a chat template.
pub type TemplateVariables = BTreeMap<String, Value>;
