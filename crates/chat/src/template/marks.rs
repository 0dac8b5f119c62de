//! Private-use characters that mark ranges of text through a rendering: the text of `{% generation %}`
//! blocks, and names of special tokens that a row holds as text.

use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

use super::Rendering;
use crate::error::ChatError;
use crate::row::ChatMessage;

/// Marks of a generation block.
pub(super) const SPAN: (char, char) = ('\u{10F8F2}', '\u{10F8F3}');
/// Marks of a name of a special token.
const LITERAL: (char, char) = ('\u{10F8F4}', '\u{10F8F5}');
/// All characters that this module and keys of dictionaries use.
const MARKS: std::ops::RangeInclusive<char> = '\u{10F8F0}'..='\u{10F8F5}';

/// True for text with a character that marks ranges here.
pub(super) fn is_marked(text: &str) -> bool {
    // All marks begin with this byte in UTF-8.
    text.as_bytes().contains(&0xF4) && text.contains(|c| MARKS.contains(&c))
}

/// True for a value with such a character in a string or key.
pub(crate) fn has_mark(value: &Value) -> bool {
    any_string(value, &|text| is_marked(text))
}

fn any_string(value: &Value, is: &dyn Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => is(text),
        Value::Array(items) => items.iter().any(|item| any_string(item, is)),
        Value::Object(keys) => keys.iter().any(|(key, value)| is(key) || any_string(value, is)),
        _ => false,
    }
}

/// Names of special tokens, which are text where a row holds them.
#[derive(Debug, Clone)]
pub struct Literals {
    names: Option<AhoCorasick>,
}

impl Literals {
    /// Special tokens of a tokenizer, by name. At each place the longest name counts.
    ///
    /// # Errors
    /// Names too long to search for.
    pub fn new<N: AsRef<[u8]>>(names: impl IntoIterator<Item = N>) -> Result<Literals, ChatError> {
        let names: Vec<N> = names.into_iter().filter(|name| !name.as_ref().is_empty()).collect();
        if names.is_empty() {
            return Ok(Literals { names: None });
        }
        let searcher = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(names);
        let error =
            |error| ChatError::new(format!("names of special tokens: {error}"), "check tokenizer.json");
        Ok(Literals { names: Some(searcher.map_err(error)?) })
    }

    /// True if a message or tool holds such a name.
    pub(super) fn occur(&self, messages: &[ChatMessage], tools: Option<&[Value]>) -> bool {
        let Some(names) = &self.names else { return false };
        let has = |value: &Value| any_string(value, &|text| names.is_match(text));
        messages.iter().any(|message| message.keys().values().any(has))
            || tools.into_iter().flatten().any(has)
    }

    /// `text` with marks around each name.
    pub(super) fn mark(&self, text: &str) -> String {
        let Some(names) = &self.names else { return text.to_owned() };
        let (mut marked, mut from) = (String::with_capacity(text.len()), 0);
        for found in names.find_iter(text) {
            marked.push_str(&text[from..found.start()]);
            marked.push(LITERAL.0);
            marked.push_str(&text[found.range()]);
            marked.push(LITERAL.1);
            from = found.end();
        }
        marked + &text[from..]
    }
}

/// Removes the marks of spans. `None` if they are unbalanced.
pub(super) fn remove_spans(text: &str) -> Option<Rendering> {
    remove(text, false)
}

/// Removes the marks of spans and of literals. `None` if either are unbalanced.
pub(super) fn remove_all(text: &str) -> Option<Rendering> {
    remove(text, true)
}

fn remove(text: &str, has_literals: bool) -> Option<Rendering> {
    if !is_marked(text) {
        return Some(Rendering { text: text.to_owned(), ..Rendering::default() });
    }
    let mut found = Rendering { text: String::with_capacity(text.len()), ..Rendering::default() };
    let (mut span, mut literal): (Option<usize>, Option<usize>) = (None, None);
    let close = |open: &mut Option<usize>, ranges: &mut Vec<Range<usize>>, at: usize| {
        ranges.push(open.take()?..at);
        Some(())
    };
    for c in text.chars() {
        let at = found.text.len();
        match c {
            c if c == SPAN.0 && span.is_none() && literal.is_none() => span = Some(at),
            c if c == SPAN.1 && literal.is_none() => close(&mut span, &mut found.spans, at)?,
            c if has_literals && c == LITERAL.0 && literal.is_none() => literal = Some(at),
            c if has_literals && c == LITERAL.1 => close(&mut literal, &mut found.literals, at)?,
            c if MARKS.contains(&c) => return None,
            c => found.text.push(c),
        }
    }
    (span.is_none() && literal.is_none()).then_some(found)
}
