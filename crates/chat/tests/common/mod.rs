//! Golden files of transformers (`tests/chat/make.py`), and a tokenizer of bytes.

#![allow(dead_code, reason = "each test uses some")]

use std::fs;
use std::path::PathBuf;

use serde_json::{Map, Value};
use xtrain_chat::{
    ChatError, ChatRow, Conversation, Encode, EncodedToken, RowFormat, Template, TemplateSettings, read_row,
};

pub(crate) fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/chat"))
}

pub(crate) fn read(name: &str) -> String {
    let path = folder().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

pub(crate) fn golden(name: &str) -> Value {
    serde_json::from_str(&read(&format!("golden/{name}"))).expect("JSON")
}

/// Settings with the golden file's date and variables, and more of these.
pub(crate) fn settings(golden: &Value, more: &[(&str, Value)]) -> TemplateSettings {
    let mut kwargs: Map<String, Value> = golden["variables"].as_object().cloned().unwrap_or_default();
    kwargs.extend(more.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    let today = golden["today"].as_str().unwrap_or("2026-11-28").parse().expect("a date");
    TemplateSettings { kwargs, today, ..TemplateSettings::default() }
}

/// The conversation of a row with `messages`.
pub(crate) fn conversation(row: &Value) -> Result<Conversation, ChatError> {
    match read_row(RowFormat::Messages, row.as_object().expect("an object"))? {
        ChatRow::Chat(conversation) => Ok(conversation),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn messages(json: &str) -> Conversation {
    conversation(&serde_json::json!({"messages": serde_json::from_str::<Value>(json).expect("JSON")}))
        .expect("a row")
}

/// A template whose generation blocks are plain blocks.
pub(crate) fn without_spans(source: &str) -> String {
    source
        .replace("endgeneration", "endif")
        .replace("generation %}", "if true %}")
        .replace("generation -%}", "if true -%}")
}

pub(crate) fn compile(source: &str, settings: &TemplateSettings) -> Template {
    Template::compile(source, "test", settings).unwrap_or_else(|error| panic!("{error}"))
}

/// Byte b has the id b; added tokens follow, the special ones first.
pub(crate) struct Bytes {
    pub(crate) special: Vec<String>,
    pub(crate) not_special: Vec<String>,
}

impl Encode for Bytes {
    fn encode(&self, text: &str, splits_special: bool, _: bool) -> Result<Vec<EncodedToken>, ChatError> {
        let added = self.special.iter().chain(&self.not_special);
        let added: Vec<(usize, &String)> = added.enumerate().collect();
        let is_used = |at: usize| !splits_special || at >= self.special.len();
        let (mut tokens, mut rest, mut chars) = (Vec::new(), text, 0);
        while let Some(c) = rest.chars().next() {
            let starting = added.iter().filter(|(at, name)| is_used(*at) && rest.starts_with(name.as_str()));
            let (ids, taken) = match starting.max_by_key(|(_, name)| name.len()) {
                Some((at, name)) => (vec![256 + u32::try_from(*at).expect("few")], name.as_str()),
                None => {
                    let taken = &rest[..c.len_utf8()];
                    (taken.bytes().map(u32::from).collect(), taken)
                }
            };
            let end = chars + taken.chars().count();
            tokens.extend(ids.into_iter().map(|id| EncodedToken { id, start: chars, end }));
            (chars, rest) = (end, &rest[taken.len()..]);
        }
        Ok(tokens)
    }
}

/// Repeatable random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 16).expect("64 bits") % below.max(1)
    }
}
