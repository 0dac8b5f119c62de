//! Rows of chat data: their formats, recognised by keys, and the conversation that each holds.
//!
//! A row is read into a [`ChatRow`] whose messages have the keys, and their order, that transformers passes
//! to a template, so that the same row renders to the same text.

mod format;
mod messages;
mod numbers;

use serde_json::{Map, Value};

use crate::error::{ChatError, shown};

pub use format::{RowFormat, recognise};
pub use messages::{ChatMessage, Conversation, Role};

/// Content of a row.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatRow {
    /// Messages that a template renders.
    Chat(Conversation),
    /// A prompt and its completion, which no template renders: their ids follow each other, then the end
    /// token. The completion is trained.
    Pair {
        /// Text before the completion, not trained.
        prompt: String,
        /// Text to train on.
        completion: String,
    },
    /// Plain text, all of it trained.
    Text(String),
}

/// Parses a line of JSON whose numbers templates can print as Python does.
///
/// # Errors
/// Invalid JSON, `NaN`, a lone surrogate; a line that is no object; an integer beyond 64 bits.
pub fn parse_row(line: &str) -> Result<Map<String, Value>, ChatError> {
    numbers::parse(line)
}

/// Reads a row of a known format.
///
/// # Errors
/// A missing key; messages that are no list of objects; an unknown role; content that is neither text nor a
/// list of text parts.
pub fn read_row(format: RowFormat, row: &Map<String, Value>) -> Result<ChatRow, ChatError> {
    match format {
        RowFormat::Messages => {
            let messages =
                list(row, "messages")?.iter().map(messages::read_message).collect::<Result<_, _>>()?;
            messages::conversation(messages, tools(row)?).map(ChatRow::Chat)
        }
        RowFormat::Conversations => {
            let turns = list(row, "conversations")?;
            let has_roles = turns.iter().all(|turn| turn.get("from").is_none());
            let read = if has_roles { messages::read_message } else { messages::read_turn };
            let mut messages = turns.iter().map(read).collect::<Result<Vec<_>, _>>()?;
            let starts_with_system = messages.first().is_some_and(|first| first.role() == Role::System);
            if let (Some(Value::String(system)), false) = (row.get("system"), starts_with_system) {
                messages.insert(0, ChatMessage::new(Role::System, system));
            }
            messages::conversation(messages, tools(row)?).map(ChatRow::Chat)
        }
        RowFormat::PromptCompletion => prompt_completion(row),
        RowFormat::Instruction => {
            let instruction = text(row, "instruction")?;
            let question = match row.get("input") {
                None | Some(Value::Null) => instruction.to_owned(),
                Some(Value::String(input)) if input.trim().is_empty() => instruction.to_owned(),
                Some(_) => format!("{instruction}\n\n{}", text(row, "input")?),
            };
            let mut messages = vec![
                ChatMessage::new(Role::User, &question),
                ChatMessage::new(Role::Assistant, text(row, "output")?),
            ];
            if let Some(Value::String(system)) = row.get("system") {
                messages.insert(0, ChatMessage::new(Role::System, system));
            }
            messages::conversation(messages, None).map(ChatRow::Chat)
        }
        RowFormat::Text => Ok(ChatRow::Text(text(row, "text")?.to_owned())),
    }
}

/// A row of `prompt` and `completion`: two texts, or two lists of messages of which the second is trained.
fn prompt_completion(row: &Map<String, Value>) -> Result<ChatRow, ChatError> {
    match (row.get("prompt"), row.get("completion")) {
        (Some(Value::String(prompt)), Some(Value::String(completion))) => {
            Ok(ChatRow::Pair { prompt: prompt.clone(), completion: completion.clone() })
        }
        (Some(Value::Array(prompt)), Some(Value::Array(completion))) => {
            let mut messages = prompt.iter().map(messages::read_message).collect::<Result<Vec<_>, _>>()?;
            messages.iter_mut().for_each(ChatMessage::leave_untrained);
            for message in completion {
                messages.push(messages::read_message(message)?);
            }
            messages::conversation(messages, tools(row)?).map(ChatRow::Chat)
        }
        (prompt, completion) => Err(ChatError::new(
            format!("\"prompt\" is {} and \"completion\" is {}", kind(prompt), kind(completion)),
            "both are strings, or both are lists of messages",
        )),
    }
}

/// The tools of a row: none, a list of objects, or such a list as JSON in a string.
fn tools(row: &Map<String, Value>) -> Result<Option<Vec<Value>>, ChatError> {
    let wrong = |found: String| ChatError::new(format!("\"tools\" is {found}"), "it is a list of objects");
    let list = match row.get("tools") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => match numbers::parse_value(text) {
            Ok(Value::Null) => return Ok(None),
            Ok(Value::Array(list)) => list,
            Ok(other) => return Err(wrong(format!("a string of JSON with {}", kind(Some(&other))))),
            Err(error) => return Err(wrong(format!("a string that is no JSON ({})", error.problem))),
        },
        Some(Value::Array(list)) => list.clone(),
        Some(other) => return Err(wrong(kind(Some(other)).to_owned())),
    };
    match list.iter().find(|tool| !tool.is_object()) {
        Some(tool) => Err(wrong(format!("a list with {}", kind(Some(tool))))),
        None => Ok(Some(list)),
    }
}

fn list<'r>(row: &'r Map<String, Value>, key: &str) -> Result<&'r [Value], ChatError> {
    match row.get(key) {
        Some(Value::Array(list)) => Ok(list),
        other => Err(ChatError::new(format!("{key:?} is {}", kind(other)), "it is a list of messages")),
    }
}

fn text<'r>(row: &'r Map<String, Value>, key: &str) -> Result<&'r str, ChatError> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text),
        other => Err(ChatError::new(format!("{key:?} is {}", kind(other)), "it is a string")),
    }
}

/// The kind of a JSON value, for messages.
fn kind(value: Option<&Value>) -> &'static str {
    match value {
        None => "missing",
        Some(Value::Null) => "null",
        Some(Value::Bool(_)) => "a boolean",
        Some(Value::Number(_)) => "a number",
        Some(Value::String(_)) => "a string",
        Some(Value::Array(_)) => "a list",
        Some(Value::Object(_)) => "an object",
    }
}

/// The names of keys that were found, for messages.
fn names<'k>(keys: impl Iterator<Item = &'k String>) -> String {
    const SHOWN: usize = 8;
    let all: Vec<String> = keys.map(|key| shown(key)).collect();
    match all.len() {
        0 => "none".to_owned(),
        len if len > SHOWN => format!("{} and {} more", all[..SHOWN].join(", "), len - SHOWN),
        _ => all.join(", "),
    }
}
