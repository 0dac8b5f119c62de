//! Values of the keys of `[data]` about conversations.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::DataConfig;

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

impl DataConfig {
    /// Keys of settings of conversations that have another value in `now`.
    pub fn changed_chat_keys(&self, now: &DataConfig) -> Vec<&'static str> {
        // A source by a path that has changed is compared by its tokens.
        let of_sources = |data: &DataConfig| -> Vec<_> {
            let sources = data.train.0.iter();
            sources.map(|source| (source.format, source.chat_template.clone(), source.train_on)).collect()
        };
        let changed = [
            ("data.format", self.format.unwrap_or_default() != now.format.unwrap_or_default()),
            ("data.chat_template", self.chat_template != now.chat_template),
            ("data.chat_template_kwargs", self.chat_template_kwargs != now.chat_template_kwargs),
            ("data.reserved_tokens", self.reserved_tokens != now.reserved_tokens),
            ("data.train_on", self.train_on.unwrap_or_default() != now.train_on.unwrap_or_default()),
            ("data.too_long", self.too_long.unwrap_or_default() != now.too_long.unwrap_or_default()),
            ("data.packing", self.packing.unwrap_or_default() != now.packing.unwrap_or_default()),
            ("data.today", self.today != now.today),
            ("data.train", of_sources(self) != of_sources(now)),
        ];
        changed.into_iter().filter(|(_, is_changed)| *is_changed).map(|(key, _)| key).collect()
    }
}
