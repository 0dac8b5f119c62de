//! `xtrain generate --chats`: answers to the conversations of a file, in one process.
//!
//! All rows are read and rendered before the first answer, so that a mistake in the file is known at once.

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
    let rows = prompts.rows(&listing.files)?;
    if rows.is_empty() {
        return Err(Failure::user(format!("{} has no rows; name another file", terminal::shown_path(file))));
    }
    let context = weights.model().context();
    let fits = |row: &&PromptRow| row.prompt.as_ref().is_ok_and(|prompt| prompt.ids.len() <= context);
    let longest = rows.iter().filter(fits).filter_map(|row| Some(row.prompt.as_ref().ok()?.ids.len())).max();
    let tokens = context.min(longest.unwrap_or(1).saturating_add(args.max_tokens));
    let mut answers = Answers::new(&mut weights, &tokenizer, tokens)?;
    let (all, mut failed, mut first) = (rows.len(), 0, None);
    for PromptRow { row, place, prompt } in rows {
        let prompt = match prompt {
            Ok(prompt) if prompt.ids.len() > context => Err(format!(
                "the conversation has {} tokens, but the model's context has {context}; shorten it",
                prompt.ids.len()
            )),
            Ok(prompt) => Ok(prompt),
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
