//! The loss of a model on given texts and token shards.

use super::HeldOut;
use crate::error::RunError;
use crate::open_model::OpenedModel;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_data::{InputOptions, Progress, Split, Take};

/// Settings of an evaluation of texts.
#[derive(Clone, Debug)]
pub struct TextOptions {
    /// Tokens of context. By default that of the model's run, else 1024 or the model's limit.
    pub seq_len: Option<usize>,
    /// Sequences at once, at least 1.
    pub batch_size: usize,
    /// Keeps attention within documents. By default as in the model's run.
    pub document_mask: Option<bool>,
    /// Files that are read of folders and patterns; the validation split by default.
    pub take: Take,
    /// Options for reading documents from the files.
    pub input: InputOptions,
    /// Folder in which the tokens are cached. By default a temporary folder, which is removed.
    pub cache: Option<PathBuf>,
}

impl Default for TextOptions {
    fn default() -> Self {
        TextOptions {
            seq_len: None,
            batch_size: 8,
            document_mask: None,
            take: Take::OfFolders(Split::Validation),
            input: InputOptions::default(),
            cache: None,
        }
    }
}

/// Result of an evaluation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TextLoss {
    /// Mean cross-entropy of the targets, in nats per token.
    pub loss: f64,
    /// Share of the targets that are the likeliest token, 0 to 1.
    pub token_accuracy: f64,
    /// Number of targets: all tokens but the first of each part of the data.
    pub tokens: usize,
    /// Bytes of the text that the tokens encode; `None` for conversations, of which parts are evaluated.
    pub text_bytes: Option<u64>,
    /// Tokens of context, at most as many as the data has.
    pub seq_len: usize,
    /// True if attention stayed within documents.
    pub document_mask: bool,
}

impl TextLoss {
    /// Cross-entropy in bits per byte of text, which is comparable between tokenizers.
    pub fn bits_per_byte(&self) -> Option<f64> {
        let bits = self.loss * self.tokens as f64 / std::f64::consts::LN_2;
        self.text_bytes.map(|bytes| bits / bytes.max(1) as f64)
    }

    /// Difference to the loss of `reference`, relative to it.
    pub fn gap(&self, reference: &TextLoss) -> f64 {
        self.loss / reference.loss - 1.0
    }
}

/// Progress of an evaluation.
#[derive(Clone, Copy, Debug)]
pub enum EvalProgress<'a> {
    /// The text at this path is being tokenized.
    Tokenizing(&'a Path, &'a Progress),
    /// Sequences evaluated so far, and their total.
    Evaluating(u64, u64),
}

/// Computes the loss of `opened` on `data`: files and folders of text, and folders of token shards.
/// `on_progress` is called often with the progress; [`ControlFlow::Break`] ends the evaluation without a
/// result and removes temporary files.
///
/// # Errors
///
/// Those of [`HeldOut::of_texts`] and [`HeldOut::loss`].
pub fn text(
    opened: &mut OpenedModel,
    data: &[PathBuf],
    options: &TextOptions,
    on_progress: &mut dyn FnMut(EvalProgress<'_>) -> ControlFlow<()>,
) -> Result<Option<TextLoss>, RunError> {
    match HeldOut::of_texts(opened, data, options, on_progress)? {
        Some(held_out) => held_out.loss(opened, options.batch_size, on_progress),
        None => Ok(None),
    }
}
