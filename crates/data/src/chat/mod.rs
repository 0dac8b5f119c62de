//! Conversations as documents of a dataset: settings, the encoder of rows, and the record of what was done.

mod check;
mod encoder;
mod first;
mod preview;
mod prompt;
mod record;
mod vocabulary;

use std::path::PathBuf;

use serde_json::{Map, Value};
use xtrain_chat::{Date, TrainOn};

pub(crate) use encoder::{ChatEncoder, EncodedRow, RowError};
pub use first::{FirstConversations, first_conversations};
pub use preview::{PreviewedRow, preview};
pub use prompt::{ChatPrompts, PromptContent, PromptRow, PromptRows, RowPrompt};
pub use record::ChatRecord;
pub use vocabulary::{run_settings, with_markers};

/// Settings with which rows of conversations become documents.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatOptions {
    /// Where the template is.
    pub template: TemplateSource,
    /// `data.chat_template_kwargs`: variables of the template.
    pub kwargs: Map<String, Value>,
    /// The date that templates print.
    pub today: Date,
    /// Part of a conversation that is trained.
    pub train_on: TrainOn,
    /// Share of the rows that may be dropped.
    pub bad_rows: f64,
}

impl Default for ChatOptions {
    fn default() -> Self {
        ChatOptions {
            template: TemplateSource::Tokenizer,
            kwargs: Map::new(),
            today: Date::default(),
            train_on: TrainOn::default(),
            bad_rows: 0.05,
        }
    }
}

/// Where a chat template is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TemplateSource {
    /// Among the tokenizer's files.
    Tokenizer,
    /// In this file.
    File(PathBuf),
    /// The built-in ChatML.
    ChatMl,
}
