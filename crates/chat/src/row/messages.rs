//! Messages: roles, content, thoughts and calls, with the keys that transformers passes to templates.

use serde_json::{Map, Value};

use super::{kind, names, numbers};
use crate::error::{ChatError, shown};

/// Author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions before the conversation.
    System,
    /// Instructions of a developer.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// Result of a tool.
    Tool,
}

impl Role {
    const ALL: [Role; 5] = [Role::System, Role::Developer, Role::User, Role::Assistant, Role::Tool];

    /// Name with an article, for messages of errors.
    fn with_article(self) -> String {
        let article = if self == Role::Assistant { "an" } else { "a" };
        format!("{article} {}", self.name())
    }

    /// Name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// A message: its keys in order, without null, and the thoughts under the names that templates read.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    keys: Map<String, Value>,
    role: Role,
    is_trained: bool,
}

impl ChatMessage {
    /// A message of text.
    pub fn new(role: Role, content: &str) -> ChatMessage {
        let keys = [("role", role.name()), ("content", content)];
        let keys = keys.into_iter().map(|(key, value)| (key.to_owned(), Value::from(value))).collect();
        ChatMessage { keys, role, is_trained: true }
    }

    /// Keys and values that a template gets.
    pub fn keys(&self) -> &Map<String, Value> {
        &self.keys
    }

    /// Author of the message.
    pub fn role(&self) -> Role {
        self.role
    }

    /// True for an answer of the model that has text, thoughts or calls, unless the row leaves it untrained.
    pub fn is_trained(&self) -> bool {
        self.is_trained && self.role == Role::Assistant && self.has_answer()
    }

    /// Leaves the message untrained.
    pub fn leave_untrained(&mut self) {
        self.is_trained = false;
    }

    /// Texts of the content: the string, or the text of each part.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let content = self.keys.get("content");
        let parts = content.and_then(Value::as_array).into_iter().flatten();
        content.and_then(Value::as_str).into_iter().chain(parts.filter_map(|part| part.get("text")?.as_str()))
    }

    fn has_answer(&self) -> bool {
        let is_filled = |value: &Value| match value {
            Value::String(text) => !text.trim().is_empty(),
            Value::Array(items) => !items.is_empty(),
            _ => false,
        };
        let has = |key: &str| self.keys.get(key).is_some_and(is_filled);
        self.texts().any(|text| !text.trim().is_empty()) || has("reasoning_content") || has("tool_calls")
    }
}

/// Messages of a row, and its tools.
#[derive(Debug, Clone, PartialEq)]
pub struct Conversation {
    /// Messages in order; at least one.
    pub messages: Vec<ChatMessage>,
    /// Tools, unless the row has none.
    pub tools: Option<Vec<Value>>,
}

impl Conversation {
    /// Removes the last message if it is an answer, so that a model can write it. Nothing may be left.
    pub fn take_answer(&mut self) -> Option<ChatMessage> {
        self.messages.pop_if(|last| last.role == Role::Assistant)
    }
}

/// A conversation, unless it is empty.
pub(super) fn conversation(
    messages: Vec<ChatMessage>,
    tools: Option<Vec<Value>>,
) -> Result<Conversation, ChatError> {
    match messages.is_empty() {
        true => Err(ChatError::new("the conversation is empty", "give at least one message")),
        false => Ok(Conversation { messages, tools }),
    }
}

/// Reads a message with `role` and `content`.
pub(super) fn read_message(value: &Value) -> Result<ChatMessage, ChatError> {
    let Value::Object(given) = value else {
        return Err(ChatError::new(
            format!("a message is {}", kind(Some(value))),
            "it is an object with role and content",
        ));
    };
    let mut keys: Map<String, Value> = Map::new();
    for (key, value) in given.iter().filter(|(_, value)| !value.is_null()) {
        keys.insert(key.clone(), value.clone());
    }
    let role = match keys.get("role") {
        Some(Value::String(name)) => {
            Role::ALL.into_iter().find(|role| role.name() == name).ok_or_else(|| {
                let known = Role::ALL.map(Role::name).join(", ");
                ChatError::new(format!("the role {} is unknown", shown(name)), format!("known are {known}"))
            })?
        }
        other => {
            let found = format!("\"role\" is {} in a message with {}", kind(other), names(keys.keys()));
            return Err(ChatError::new(found, "each message has a role and content"));
        }
    };
    let is_trained = match keys.shift_remove("train") {
        None => true,
        Some(Value::Bool(is_trained)) => is_trained,
        Some(other) => {
            let found = format!("\"train\" of a message is {}", kind(Some(&other)));
            return Err(ChatError::new(found, "it is true or false"));
        }
    };
    check_content(role, &keys)?;
    read_calls(&mut keys)?;
    name_thoughts(&mut keys)?;
    Ok(ChatMessage { keys, role, is_trained })
}

/// Reads a turn with `from` and `value`.
pub(super) fn read_turn(value: &Value) -> Result<ChatMessage, ChatError> {
    let (from, text) = match (value.get("from"), value.get("value")) {
        (Some(Value::String(from)), Some(Value::String(text))) => (from.as_str(), text.as_str()),
        (from, text) => {
            return Err(ChatError::new(
                format!("a turn has \"from\" ({}) and \"value\" ({})", kind(from), kind(text)),
                "both are strings",
            ));
        }
    };
    let role = match from {
        "human" | "user" => Role::User,
        "gpt" | "assistant" => Role::Assistant,
        "system" => Role::System,
        "tool" | "observation" => Role::Tool,
        "function_call" => return read_call_turn(value, text),
        other => {
            return Err(ChatError::new(
                format!("the sender {} is unknown", shown(other)),
                "known are human, user, gpt, assistant, system, tool, observation, function_call",
            ));
        }
    };
    let mut message = ChatMessage::new(role, text);
    message.is_trained = trained(value)?;
    Ok(message)
}

/// A turn `function_call`: an answer whose value is a call, or a list of calls, in JSON.
fn read_call_turn(turn: &Value, text: &str) -> Result<ChatMessage, ChatError> {
    let advice = "it is JSON with name and arguments, or a list of these";
    let calls = match numbers::parse_value(text) {
        Ok(Value::Array(calls)) => calls,
        Ok(call @ Value::Object(_)) => vec![call],
        _ => return Err(ChatError::new(format!("a function_call is {}", shown(text)), advice)),
    };
    let mut wrapped = Vec::new();
    for call in calls {
        let is_call = call.get("name").is_some_and(Value::is_string);
        match call {
            _ if !is_call => {
                return Err(ChatError::new(format!("a function_call is {}", shown(text)), advice));
            }
            call => wrapped.push(serde_json::json!({"type": "function", "function": call})),
        }
    }
    let mut message = ChatMessage::new(Role::Assistant, "");
    message.keys.insert("tool_calls".to_owned(), Value::Array(wrapped));
    read_calls(&mut message.keys)?;
    message.is_trained = trained(turn)?;
    Ok(message)
}

fn trained(turn: &Value) -> Result<bool, ChatError> {
    match turn.get("train") {
        None | Some(Value::Null) => Ok(true),
        Some(Value::Bool(is_trained)) => Ok(*is_trained),
        other => {
            Err(ChatError::new(format!("\"train\" of a turn is {}", kind(other)), "it is true or false"))
        }
    }
}

/// Content is text or a list of text parts; an answer may have calls or thoughts instead.
fn check_content(role: Role, keys: &Map<String, Value>) -> Result<(), ChatError> {
    let name = role.with_article();
    match keys.get("content") {
        Some(Value::String(_)) => Ok(()),
        Some(Value::Array(parts)) => {
            let is_text = |part: &&Value| {
                part.get("type").and_then(Value::as_str) == Some("text")
                    && part.get("text").is_some_and(Value::is_string)
            };
            let Some(part) = parts.iter().find(|part| !is_text(part)) else { return Ok(()) };
            let found = match part.get("type").and_then(Value::as_str) {
                Some(other) => format!("a part of type {}", shown(other)),
                None => format!("a part that is {} without type and text", kind(Some(part))),
            };
            let problem = format!("the content of {name} message has {found}");
            Err(ChatError::new(problem, "parts are {\"type\": \"text\", \"text\": ...}"))
        }
        None => {
            let has = |key: &str| keys.contains_key(key);
            let has_thoughts = THOUGHTS.iter().any(|key| has(key));
            if role == Role::Assistant && (has("tool_calls") || has_thoughts) {
                return Ok(());
            }
            let problem = format!("{name} message has no content (its keys are {})", names(keys.keys()));
            Err(ChatError::new(problem, "give content, or tool_calls of an assistant"))
        }
        other => Err(ChatError::new(
            format!("the content of {name} message is {}", kind(other)),
            "it is a string or a list of text parts",
        )),
    }
}

/// Arguments of calls that are an object in a string of JSON become the object.
fn read_calls(keys: &mut Map<String, Value>) -> Result<(), ChatError> {
    let calls = match keys.get_mut("tool_calls") {
        None => return Ok(()),
        Some(Value::Array(calls)) => calls,
        other => {
            let problem = format!("\"tool_calls\" is {}", kind(other.as_deref()));
            return Err(ChatError::new(problem, "it is a list of calls"));
        }
    };
    for call in calls {
        let Value::Object(call) = call else {
            return Err(ChatError::new(
                format!("a tool call is {}", kind(Some(call))),
                "it is {\"function\": {\"name\": ..., \"arguments\": {...}}}",
            ));
        };
        let function = match call.get_mut("function") {
            Some(Value::Object(function)) => function,
            _ => call,
        };
        let Some(arguments) = function.get_mut("arguments") else { continue };
        if let Some(object) = arguments.as_str().and_then(|text| numbers::parse(text).ok()) {
            *arguments = Value::Object(object);
        }
    }
    Ok(())
}

/// Names of the thoughts of an answer. The first is the one that templates read, the second that of gpt-oss.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Passes the thoughts under their first two names, in transformers' order of keys.
fn name_thoughts(keys: &mut Map<String, Value>) -> Result<(), ChatError> {
    let Some(thoughts) = THOUGHTS.iter().find_map(|key| keys.get(*key)).cloned() else { return Ok(()) };
    if !thoughts.is_string() {
        let problem = format!("the thoughts of a message are {}", kind(Some(&thoughts)));
        return Err(ChatError::new(problem, "reasoning_content is a string"));
    }
    let mut named = Map::new();
    named.insert("thinking".to_owned(), thoughts.clone());
    named.extend(std::mem::take(keys));
    named.insert("reasoning_content".to_owned(), thoughts);
    *keys = named;
    Ok(())
}
