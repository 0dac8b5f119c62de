//! `xtrain generate --chats`: answers to the conversations of a file, in one process.
//!
//! Rows are read one by one, twice: first all are rendered, so that a file that cannot be read ends the
//! command before the first answer, and the longest prompt is known; then each is answered. One row is in
//! memory at a time, and answers are in the order of the rows.

use super::answers::{self, AnswerEnd, Answers, ModelAnswer};
use super::open_model;
use crate::cli::GenerateArgs;
use crate::failure::Failure;
use crate::terminal;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_chat::ChatMessage;
use xtrain_chat::row::Role;
use xtrain_data::Take;
use xtrain_data::chat::{ChatPrompts, PromptContent, PromptRow, RowPrompt};
use xtrain_step::generate::Sampling;
use xtrain_train::open_model::OpenedModel;
use xtrain_train::texts;

pub(super) fn run(args: &GenerateArgs, file: &Path, sampling: Sampling) -> Result<(), Failure> {
    let listing = texts::list(&[file], Take::All)?;
    let opened = open_model(&args.model, args.compute.on.device, args.compute.precision)?;
    let options = args.template.over(opened.chat_options()?)?;
    let OpenedModel { mut weights, tokenizer, .. } = opened;
    let prompts = ChatPrompts::new(&tokenizer, &options).map_err(|error| Failure::user(error.to_string()))?;
    let context = weights.model().context();
    let (mut all, mut longest) = (0_u64, 1);
    for row in prompts.rows(&listing.files) {
        all += 1;
        let tokens = row?.prompt.map_or(0, |prompt| prompt.ids.len());
        longest = longest.max(if tokens <= context { tokens } else { 0 });
    }
    if all == 0 {
        return Err(Failure::user(format!("{} has no rows; name another file", terminal::shown_path(file))));
    }
    let tokens = context.min(longest.saturating_add(args.max_tokens));
    let mut answers = Answers::new(&mut weights, &tokenizer, tokens)?;
    let (mut failed, mut first) = (0_u64, None);
    for row in prompts.rows(&listing.files) {
        let PromptRow { row, place, prompt } = row?;
        let prompt = match prompt.map(|prompt| (prompt.ids.len(), prompt)) {
            Ok((tokens, _)) if tokens > context => Err(format!(
                "the conversation has {tokens} tokens, but the model's context has {context}; shorten it"
            )),
            Ok((tokens, _)) if tokens > answers.context() => {
                Err("the file has changed since it was checked; run the command again".to_owned())
            }
            Ok((_, prompt)) => Ok(prompt),
            Err(error) => Err(error.to_string()),
        };
        let shown = match prompt {
            Ok(prompt) => {
                let seed = sampling.seed.wrapping_add(row - 1);
                answers.forget();
                one(&mut answers, args, row, prompt, Sampling { seed, ..sampling })?
            }
            Err(error) => {
                failed += 1;
                first.get_or_insert_with(|| format!("{place}: {error}"));
                match args.json {
                    true => terminal::print_json(&json!({ "row": row, "error": error }))?,
                    false => {
                        tracing::warn!("{place}: {error}");
                        ControlFlow::Continue(())
                    }
                }
            }
        };
        if shown.is_break() {
            return Ok(());
        }
    }
    answers.log_speed();
    match first {
        None => Ok(()),
        Some(first) => {
            Err(Failure::user(format!("{failed} of {all} rows have no answer; the first is {first}")))
        }
    }
}

/// Answers a row, and prints the answer. Breaks if nobody reads it.
fn one(
    answers: &mut Answers<'_>,
    args: &GenerateArgs,
    row: u64,
    prompt: RowPrompt,
    sampling: Sampling,
) -> Result<ControlFlow<()>, Failure> {
    let RowPrompt { content, ids, expected } = prompt;
    if args.json {
        let keep = &mut |_: &str| Ok(ControlFlow::Continue(()));
        let ModelAnswer { text, tokens, end } = answers.answer(&ids, args.max_tokens, sampling, keep)?;
        let mut answer = json!({ "row": row });
        match content {
            PromptContent::Messages(messages) => {
                answer["messages"] =
                    messages.iter().map(|message| Value::Object(message.keys().clone())).collect();
            }
            PromptContent::Text(text) => answer["prompt"] = json!(text),
        }
        answer["answer"] = json!(text);
        answer["expected"] = json!(expected);
        answer["stopped"] = json!(end == AnswerEnd::Stop);
        answer["tokens"] = json!(tokens);
        return terminal::print_json(&answer);
    }
    let beginning = match &content {
        PromptContent::Messages(messages) => format!("{}assistant: ", question(messages)),
        PromptContent::Text(text) => text.clone(),
    };
    if terminal::print_generated(&beginning)?.is_break() {
        return Ok(ControlFlow::Break(()));
    }
    let mut is_unread = false;
    let mut show = |piece: &str| {
        let shown = answers::print(piece)?;
        is_unread = shown.is_break();
        Ok(shown)
    };
    answers.answer(&ids, args.max_tokens, sampling, &mut show)?;
    match is_unread {
        true => Ok(ControlFlow::Break(())),
        false => terminal::print_generated("\n\n"),
    }
}

/// The last message of the user as a line, or the last message if there is none of the user.
fn question(messages: &[ChatMessage]) -> String {
    let of_user = messages.iter().rfind(|message| message.role() == Role::User);
    let Some(message) = of_user.or(messages.last()) else { return String::new() };
    format!("{}: {}\n", message.role().name(), message.texts().collect::<Vec<_>>().concat())
}
