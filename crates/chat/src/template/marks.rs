//! Private-use characters that mark ranges of text through a rendering: the text of `{% generation %}`
//! blocks, and names of special tokens that a row holds as text.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

use super::Rendering;
use super::data::Texts;
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
    texts: Arc<[Vec<u8>]>,
    /// Characters at which names begin and end.
    edges: Arc<[char]>,
}

impl Literals {
    /// Special tokens of a tokenizer, by name. At each place the longest name counts.
    ///
    /// # Errors
    /// Names too long to search for.
    pub fn new<N: AsRef<[u8]>>(names: impl IntoIterator<Item = N>) -> Result<Literals, ChatError> {
        let names: Vec<N> = names.into_iter().filter(|name| !name.as_ref().is_empty()).collect();
        if names.is_empty() {
            return Ok(Literals { names: None, texts: Arc::new([]), edges: Arc::new([]) });
        }
        let searcher = AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&names);
        let texts: Arc<[Vec<u8>]> = names.iter().map(|name| name.as_ref().to_vec()).collect();
        let mut edges: Vec<char> = Vec::new();
        for name in texts.iter() {
            let name = String::from_utf8_lossy(name);
            edges.extend(name.chars().next().into_iter().chain(name.chars().next_back()));
        }
        edges.sort_unstable();
        edges.dedup();
        let error =
            |error| ChatError::new(format!("names of special tokens: {error}"), "check tokenizer.json");
        Ok(Literals { names: Some(searcher.map_err(error)?), texts, edges: edges.into() })
    }

    /// True if a message or tool holds such a name.
    pub(super) fn occur(&self, messages: &[ChatMessage], tools: Option<&[Value]>) -> bool {
        let Some(names) = &self.names else { return false };
        let has = |value: &Value| any_string(value, &|text| names.is_match(text));
        messages.iter().any(|message| message.keys().values().any(has))
            || tools.into_iter().flatten().any(has)
    }

    /// True if the characters of a row may begin or end a name.
    pub(super) fn may_come_from(&self, messages: &[ChatMessage], tools: Option<&[Value]>) -> bool {
        let has_edge = |text: &str| text.contains(&*self.edges);
        let has = |(key, value): (&String, &Value)| has_edge(key) || any_string(value, &has_edge);
        let is_text = |message: &ChatMessage| message.keys().values().all(Value::is_string);
        // Brackets are also written around lists; other characters may come from anything.
        let is_sure = |&edge: &char| match edge {
            '<' | '>' | '|' | '｜' => true,
            '[' | ']' => tools.is_none() && messages.iter().all(is_text),
            _ => false,
        };
        !self.edges.iter().all(is_sure)
            || messages.iter().any(|message| message.keys().iter().any(has))
            || tools.into_iter().flatten().any(|tool| any_string(tool, &has_edge))
    }

    /// True if one of the pieces ends with the beginning of a name, and one begins with the rest of one.
    pub(super) fn enclose(&self, pieces: &[&str]) -> bool {
        self.texts.iter().any(|name| {
            let cuts = 1..name.len();
            let begins = |piece: &&str| cuts.clone().any(|at| piece.as_bytes().ends_with(&name[..at]));
            let ends = |piece: &&str| cuts.clone().any(|at| piece.as_bytes().starts_with(&name[at..]));
            pieces.iter().any(begins) && pieces.iter().any(ends)
        })
    }

    /// True if both are one list of names.
    pub(super) fn is(&self, other: &Literals) -> bool {
        Arc::ptr_eq(&self.texts, &other.texts)
    }

    /// The names in a text that are not in the ranges `literals`, in order.
    pub(super) fn outside<'t>(&self, text: &'t str, literals: &[Range<usize>]) -> Vec<&'t str> {
        let Some(names) = &self.names else { return Vec::new() };
        let ends = literals.iter().map(|range| range.start).chain([text.len()]);
        let pieces = std::iter::once(0).chain(literals.iter().map(|range| range.end)).zip(ends);
        let pieces = pieces.map(|(start, end)| &text[start..end]);
        pieces.flat_map(|piece| names.find_iter(piece).map(|found| &piece[found.range()])).collect()
    }

    /// True if a text holds a name, or is a part of one, or begins or ends with one's end or beginning.
    pub(super) fn touch(&self, text: &str) -> bool {
        let text = text.as_bytes();
        let holds = |text: &[u8], part: &[u8]| text.windows(part.len().max(1)).any(|window| window == part);
        let runs_into = |first: &[u8], second: &[u8]| {
            (1..=first.len().min(second.len())).any(|len| first.ends_with(&second[..len]))
        };
        self.texts.iter().any(|name| {
            holds(name, text) || holds(text, name) || runs_into(name, text) || runs_into(text, name)
        })
    }
}

/// Marks around each name.
impl Texts for Literals {
    fn string<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let Some(names) = self.names.as_ref().filter(|names| names.is_match(text)) else {
            return Cow::Borrowed(text);
        };
        let (mut marked, mut from) = (String::with_capacity(text.len()), 0);
        for found in names.find_iter(text) {
            marked.push_str(&text[from..found.start()]);
            marked.push(LITERAL.0);
            marked.push_str(&text[found.range()]);
            marked.push(LITERAL.1);
            from = found.end();
        }
        marked.push_str(&text[from..]);
        Cow::Owned(marked)
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
