//! Prompts that the model continues after the last step, and questions that it answers.

use super::setup::Setup;
use crate::error::RunError;
use crate::questions;
use std::fmt::Display;
use xtrain_data::{DataError, Tokenizer};

/// A prompt of `eval.prompts`, or a question of `eval.chats`.
pub(super) struct SamplePrompt {
    /// The text, as the configuration has it.
    pub(super) text: String,
    /// Its tokens; at least one.
    pub(super) tokens: Vec<u32>,
    /// True for a question, which the chat template of the run rendered.
    pub(super) is_chat: bool,
}

impl Setup<'_> {
    /// The tokens of `eval.prompts` and `eval.chats`. A text that cannot be encoded is refused before the
    /// first step, and so is a question without a chat template.
    pub(super) fn prompts(&self, tokenizer: &Tokenizer) -> Result<Vec<SamplePrompt>, RunError> {
        let eval = &self.parsed.config.eval;
        let refused = |number: usize, why: &dyn Display| {
            RunError::Refused(format!("[eval] `prompts[{number}]` cannot be continued: {why}"))
        };
        let mut prompts = Vec::new();
        for (number, text) in eval.prompts.iter().enumerate() {
            let tokens = match tokenizer.encode_prompt(text) {
                Err(error @ DataError::Internal(_)) => return Err(error.into()),
                Err(error) => return Err(refused(number, &error)),
                Ok(tokens) if tokens.is_empty() => {
                    let why =
                        "it is empty, and this tokenizer has no token that begins a text; give it some text";
                    return Err(refused(number, &why));
                }
                Ok(tokens) => tokens,
            };
            prompts.push(SamplePrompt { text: text.clone(), tokens, is_chat: false });
        }
        let questions = questions::questions(&self.sources, tokenizer)?;
        for (text, tokens) in eval.chats.iter().zip(questions) {
            prompts.push(SamplePrompt { text: text.clone(), tokens, is_chat: true });
        }
        Ok(prompts)
    }
}

/// Refuses a question that does not fit into the model's context, which is `context` tokens.
pub(super) fn check_chats(prompts: &[SamplePrompt], context: usize) -> Result<(), RunError> {
    let questions = prompts.iter().filter(|prompt| prompt.is_chat);
    questions::check_lengths(questions.map(|prompt| prompt.tokens.len()), context)
}
