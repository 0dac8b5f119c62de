//! The content of a row as its file gives it, without few-shot examples.

use std::collections::HashMap;

use serde_json::{Map, Value};
use xtrain_checkpoint::suggest::{listing, nearest};

use super::answer::AnswerPattern;
use super::fault::{RowFault, RowResult, keys, kind, shown};
use super::row::RowKind;

/// The content of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowContent {
    Choices { query: String, choices: Vec<String>, gold: usize },
    Schema { contexts: Vec<String>, continuation: String, gold: usize },
    Continuation { context: String, continuation: String },
    Answer { query: String, answer: String, extract: Option<String> },
}

/// A row with its names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedRow {
    pub(super) id: Option<String>,
    pub(super) cluster: Option<String>,
    pub(super) content: RowContent,
}

impl RowContent {
    /// A question with choices, checked.
    pub(super) fn of_choices(query: String, choices: Vec<String>, gold: usize) -> RowResult<RowContent> {
        check_options("choice", &choices, gold)?;
        Ok(RowContent::Choices { query, choices, gold })
    }

    /// A continuation with contexts, checked.
    pub(super) fn of_contexts(
        contexts: Vec<String>,
        continuation: String,
        gold: usize,
    ) -> RowResult<RowContent> {
        check_options("context", &contexts, gold)?;
        Ok(RowContent::Schema { contexts, continuation: not_empty("continuation", continuation)?, gold })
    }

    pub(super) fn kind(&self) -> RowKind {
        match self {
            RowContent::Choices { .. } => RowKind::MultipleChoice,
            RowContent::Schema { .. } => RowKind::Schema,
            RowContent::Continuation { .. } => RowKind::Continuation,
            RowContent::Answer { .. } => RowKind::Generated,
        }
    }

    /// The text before the answer, in a few-shot example, and the right answer.
    pub(super) fn question_and_answer(&self) -> (&str, &str) {
        match self {
            RowContent::Choices { query, choices, gold } => (query, &choices[*gold]),
            RowContent::Schema { contexts, continuation, gold } => (&contexts[*gold], continuation),
            RowContent::Continuation { context, continuation } => (context, continuation),
            RowContent::Answer { query, answer, .. } => (query, answer),
        }
    }
}

/// Reads a row of this crate's format.
pub(super) fn read_row(row: &Map<String, Value>) -> RowResult<NamedRow> {
    let kind = recognise(row)?;
    if let Some(key) = kind.keys().iter().find(|key| !row.contains_key(**key)) {
        let problem = format!("the key {key:?} is missing; the row has {}", keys(row));
        return Err(RowFault::new(problem, needs(kind)));
    }
    let content = match kind {
        RowKind::MultipleChoice => {
            let (choices, gold) = (texts(row, "choices")?, gold(row)?);
            RowContent::of_choices(text(row, "query")?, choices, gold)?
        }
        RowKind::Schema => {
            let (contexts, gold) = (texts(row, "context_options")?, gold(row)?);
            RowContent::of_contexts(contexts, text(row, "continuation")?, gold)?
        }
        RowKind::Continuation => RowContent::Continuation {
            context: text(row, "context")?,
            continuation: not_empty("continuation", text(row, "continuation")?)?,
        },
        RowKind::Generated => {
            let extract = match row.get("extract") {
                None | Some(Value::Null) => None,
                Some(_) => Some(not_empty("extract", text(row, "extract")?)?),
            };
            extract.as_deref().map(AnswerPattern::new).transpose()?;
            RowContent::Answer {
                query: text(row, "query")?,
                answer: not_empty("answer", text(row, "answer")?)?,
                extract,
            }
        }
    };
    Ok(NamedRow { id: label(row, "id")?, cluster: label(row, "cluster")?, content })
}

/// The kind of a row, by its keys; some may be missing.
fn recognise(row: &Map<String, Value>) -> RowResult<RowKind> {
    let has = |key: &str| row.contains_key(key);
    match () {
        () if has("choices") => Ok(RowKind::MultipleChoice),
        () if has("context_options") => Ok(RowKind::Schema),
        () if has("context") && has("continuation") => Ok(RowKind::Continuation),
        () if has("query") && has("answer") => Ok(RowKind::Generated),
        () => Err(unknown(row)),
    }
}

/// The fault of a row of no known kind.
fn unknown(row: &Map<String, Value>) -> RowFault {
    let known = || RowKind::ALL.iter().flat_map(|kind| kind.keys().iter().copied());
    let meant = row.keys().filter(|key| !known().any(|known| known == *key));
    let meant = meant.filter_map(|key| Some((key, nearest(key, known())?))).next();
    let meant = meant.map_or(String::new(), |(key, near)| format!("did you mean {near:?} by {key:?}? "));
    let kinds = RowKind::ALL.map(|kind| listing(kind.keys().iter().copied(), "", "and"));
    RowFault::new(
        format!("the keys are those of no known row: {}", keys(row)),
        format!("{meant}a row has {}; or it is a row of lm-eval's samples", kinds.join("; ")),
    )
}

fn needs(kind: RowKind) -> String {
    format!("a {} has {}", kind.name(), listing(kind.keys().iter().copied(), "", "and"))
}

/// The string at `key`.
pub(super) fn text(row: &Map<String, Value>, key: &str) -> RowResult<String> {
    match row.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(other) => {
            Err(RowFault::new(format!("{key:?} is {}, not a string", kind(other)), "give a string"))
        }
        None => Err(RowFault::new(
            format!("the key {key:?} is missing; the row has {}", keys(row)),
            "give a string",
        )),
    }
}

/// The strings in the list at `key`.
fn texts(row: &Map<String, Value>, key: &str) -> RowResult<Vec<String>> {
    let Some(Value::Array(items)) = row.get(key) else {
        let found = row.get(key).map_or("missing".to_owned(), kind);
        return Err(RowFault::new(format!("{key:?} is {found}, not a list"), "give a list of strings"));
    };
    let text = |(at, item): (usize, &Value)| match item {
        Value::String(text) => Ok(text.clone()),
        other => Err(RowFault::new(
            format!("element {at} of {key:?} is {}, not a string", kind(other)),
            "give a list of strings",
        )),
    };
    items.iter().enumerate().map(text).collect()
}

/// The index at `gold`.
fn gold(row: &Map<String, Value>) -> RowResult<usize> {
    const ADVICE: &str = "give the index of the right one, counted from 0";
    let value = row.get("gold").unwrap_or(&Value::Null);
    let index = value.as_u64().and_then(|index| usize::try_from(index).ok());
    index.ok_or_else(|| RowFault::new(format!("\"gold\" is {}, not an index", kind(value)), ADVICE))
}

/// A name of a row or cluster: a string or an integer; `None` if it is missing or null.
pub(super) fn label(row: &Map<String, Value>, key: &str) -> RowResult<Option<String>> {
    match row.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(name)) => Ok(Some(name.clone())),
        Some(Value::Number(number)) if number.is_i64() || number.is_u64() => Ok(Some(number.to_string())),
        Some(other) => Err(RowFault::new(
            format!("{key:?} is {}, not a name", kind(other)),
            "give a string or an integer",
        )),
    }
}

/// Fails for an empty text.
pub(super) fn not_empty(key: &str, text: String) -> RowResult<String> {
    match text.is_empty() {
        true => Err(RowFault::new(format!("{key:?} is empty"), "give it some text")),
        false => Ok(text),
    }
}

/// Fails unless there are several different options, of which `gold` is one.
fn check_options(noun: &str, options: &[String], gold: usize) -> RowResult<()> {
    if options.len() < 2 {
        let count = if options.is_empty() { "no" } else { "one" };
        return Err(RowFault::new(format!("there is {count} {noun}"), "give at least two"));
    }
    let mut seen = HashMap::with_capacity(options.len());
    for (at, option) in options.iter().enumerate() {
        if option.is_empty() {
            return Err(RowFault::new(format!("{noun} {at} (counted from 0) is empty"), "give it some text"));
        }
        if let Some(before) = seen.insert(option, at) {
            return Err(RowFault::new(
                format!("{noun}s {before} and {at} (counted from 0) are equal: {}", shown(option)),
                "leave one out",
            ));
        }
    }
    if gold >= options.len() {
        return Err(RowFault::new(
            format!("\"gold\" is {gold}, but there are {} {noun}s", options.len()),
            "give the index of the right one, counted from 0",
        ));
    }
    Ok(())
}
