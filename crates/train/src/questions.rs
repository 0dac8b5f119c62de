//! Questions of `eval.chats`, which a run answers at its end, as prompts that the chat template rendered.

use crate::error::RunError;
use crate::growth;
use crate::paths::Sources;
use std::fmt::Display;
use xtrain_chat::row::Role;
use xtrain_chat::{ChatMessage, Conversation};
use xtrain_config::TokenizerChoice;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::{Dataset, Tokenizer};

/// The token ids of each question, with the generation prompt.
///
/// # Errors
/// No chat template, or one that is refused; a question that cannot be rendered or encoded.
pub(crate) fn questions(sources: &Sources<'_>, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, RunError> {
    let chats = &sources.config.eval.chats;
    if chats.is_empty() {
        return Ok(Vec::new());
    }
    let options = sources.run_chat_options(tokenizer)?;
    let rendered = ChatPrompts::new(tokenizer, &options).map_err(|error| refused(0, &error))?;
    let ids = |(number, text): (usize, &String)| {
        let messages = vec![ChatMessage::new(Role::User, text)];
        rendered.ids(&Conversation { messages, tools: None }).map_err(|error| refused(number, &error))
    };
    chats.iter().enumerate().map(ids).collect()
}

/// The token ids of each question before the data of a run is opened, with the tokenizer that is `known`, or
/// that of the configuration or of `shards`. If it is learned from the text or cannot be read, only a
/// template that is missing or refused is an error.
///
/// # Errors
/// Those of [`questions`].
pub(crate) fn planned(
    sources: &Sources<'_>,
    known: Option<&Tokenizer>,
    shards: Option<&Dataset>,
) -> Result<Vec<Vec<u32>>, RunError> {
    if sources.config.eval.chats.is_empty() {
        return Ok(Vec::new());
    }
    if let Some(known) = known {
        return questions(sources, known);
    }
    if let Some(tokenizer) = growth::known_tokenizer(sources, shards)? {
        return questions(sources, &tokenizer);
    }
    if let TokenizerChoice::Bpe | TokenizerChoice::Chars = sources.tokenizer {
        // A vocabulary that is learned has no template, as that of bytes.
        let bytes = Tokenizer::bytes();
        let options = sources.run_chat_options(&bytes)?;
        let prompts = ChatPrompts::new(&bytes, &options);
        prompts.and_then(|prompts| prompts.check()).map_err(|error| refused(0, &error))?;
    }
    Ok(Vec::new())
}

/// Refuses a question of `lens` tokens that does not fit into the model's context, which is `context` tokens.
pub(crate) fn check_lengths(lens: impl IntoIterator<Item = usize>, context: usize) -> Result<(), RunError> {
    match lens.into_iter().enumerate().find(|(_, len)| *len > context) {
        Some((number, len)) => Err(RunError::Refused(format!(
            "[eval] `chats[{number}]` has {len} tokens, but the model's context has {context}; shorten it"
        ))),
        None => Ok(()),
    }
}

fn refused(number: usize, why: &dyn Display) -> RunError {
    RunError::Refused(format!("[eval] `chats[{number}]` cannot be answered: {why}"))
}
