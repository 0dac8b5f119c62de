//! JSON lines: one object per line, with the document in one of its fields.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::stream::InputStream;
use super::{CHAT_ADVICE, Document, MAX_VALUE_BYTES, Piece, is_chat, naming_advice, no_safe_cut};
use crate::error::{DataError, Result};
use crate::tokenizer::CutRule;

/// Bytes of blank lines after which a reader hears that the file goes on.
const BLANK_BYTES: usize = 4 << 20;

/// Reads the documents of a `.jsonl` file. Skips blank lines.
pub(super) struct JsonLines {
    stream: InputStream,
    field: String,
    rule: CutRule,
    line: Vec<u8>,
    line_number: u64,
    /// The document of the line, until its last piece is returned.
    document: Option<Document>,
}

/// Result of reading up to the next line with text.
enum Line {
    Text,
    /// Only blank lines so far.
    Blank,
    End,
}

impl JsonLines {
    pub(super) fn new(stream: InputStream, field: String, rule: CutRule) -> Self {
        JsonLines { stream, field, rule, line: Vec::new(), line_number: 0, document: None }
    }

    /// Reads the next line that is not blank.
    fn read_line(&mut self) -> Result<Line> {
        let start = self.stream.offset();
        loop {
            if self.stream.offset() - start >= BLANK_BYTES as u64 {
                return Ok(Line::Blank);
            }
            self.line.clear();
            if self.stream.read_line(MAX_VALUE_BYTES + 1, &mut self.line)? == 0 {
                return Ok(Line::End);
            }
            self.line_number += 1;
            if self.line.len() > MAX_VALUE_BYTES {
                return Err(self.error(
                    format!("the line is longer than {} MiB", MAX_VALUE_BYTES >> 20),
                    "split its document, or check that the file is JSON lines",
                ));
            }
            if self.line_number == 1 && self.line.starts_with("\u{FEFF}".as_bytes()) {
                self.line.drain(.."\u{FEFF}".len());
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(Line::Text);
            }
        }
    }

    fn parse_line(&mut self) -> Result<()> {
        let mut json = serde_json::Deserializer::from_slice(&self.line);
        let parsed =
            FieldSelector(&self.field).deserialize(&mut json).and_then(|text| json.end().map(|()| text));
        let text = match parsed {
            Ok(FieldValue::Text(text)) => text,
            Ok(FieldValue::Other(kind)) => {
                let problem = format!("field {:?} is {kind}, not a string", self.field);
                return Err(self.wrong_field(problem));
            }
            Ok(FieldValue::Missing(keys)) => {
                let problem = format!("there is no field {:?}; the line has {}", self.field, keys.join(", "));
                return Err(self.wrong_field(problem));
            }
            Err(error) => {
                let reason = error.to_string();
                let reason = reason.rsplit_once(" at line ").map_or(reason.as_str(), |(reason, _)| reason);
                let problem = format!("broken JSON at column {}: {reason}", error.column());
                return Err(self.error(problem, "fix or remove the line (one JSON object per line, UTF-8)"));
            }
        };
        self.document = Some(Document::new(text));
        Ok(())
    }

    fn next_piece(&mut self) -> Result<Option<Piece>> {
        if self.document.is_none() {
            match self.read_line()? {
                Line::Text => self.parse_line()?,
                Line::Blank => {
                    return Ok(Some(Piece {
                        text: String::new(),
                        begins_document: false,
                        ends_document: false,
                    }));
                }
                Line::End => return Ok(None),
            }
        }
        let piece = self.document.as_mut().and_then(|document| document.next_piece(self.rule));
        let piece = piece.ok_or_else(|| {
            no_safe_cut(self.stream.path(), format!("line {}", self.line_number), self.rule)
        })?;
        if piece.ends_document {
            self.document = None;
        }
        Ok(Some(piece))
    }

    /// The fields of the line; none if it is not an object.
    fn fields(&self) -> Map<String, Value> {
        serde_json::from_slice(&self.line).unwrap_or_default()
    }

    /// The error for a line whose text is not where the field says.
    fn wrong_field(&self, problem: String) -> DataError {
        let fields = self.fields();
        if fields.iter().any(|(name, value)| value.is_array() && is_chat(name)) {
            return self.error(problem, CHAT_ADVICE);
        }
        let strings: Vec<String> = fields
            .iter()
            .filter(|(_, value)| value.is_string())
            .map(|(name, _)| format!("{name:?}"))
            .collect();
        self.error(problem, &naming_advice("field", &strings))
    }

    fn error(&self, problem: impl Into<String>, advice: &str) -> DataError {
        DataError::input(self.stream.path(), format!("line {}", self.line_number), problem, advice)
    }
}

/// Names of the fields of the first line that hold strings.
pub(super) fn string_fields(stream: InputStream) -> Result<Vec<String>> {
    let mut lines = JsonLines::new(stream, String::new(), CutRule::Anywhere);
    while let Line::Blank = lines.read_line()? {}
    let fields = lines.fields().into_iter();
    Ok(fields.filter(|(_, value)| value.is_string()).map(|(name, _)| name).collect())
}

impl Iterator for JsonLines {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        self.next_piece().transpose()
    }
}

/// Value of the text field of an object.
enum FieldValue {
    Text(String),
    /// Not a string: its JSON type, with an article.
    Other(&'static str),
    /// No such field: the first keys of the object.
    Missing(Vec<String>),
}

/// Parser of an object that keeps one field.
struct FieldSelector<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for FieldSelector<'_> {
    type Value = FieldValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<FieldValue, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldSelector<'_> {
    type Value = FieldValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<FieldValue, A::Error> {
        const SHOWN_KEYS: usize = 8;
        let mut found = FieldValue::Missing(Vec::new());
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 {
                found = map.next_value_seed(TextOrKind)?;
                continue;
            }
            map.next_value::<IgnoredAny>()?;
            if let FieldValue::Missing(keys) = &mut found {
                match keys.len() {
                    len if len < SHOWN_KEYS => keys.push(format!("{key:?}")),
                    SHOWN_KEYS => keys.push("...".to_owned()),
                    _ => {}
                }
            }
        }
        if let FieldValue::Missing(keys) = &mut found
            && keys.is_empty()
        {
            keys.push("no fields".to_owned());
        }
        Ok(found)
    }
}

/// Parser of any value that keeps a string.
struct TextOrKind;

impl<'de> DeserializeSeed<'de> for TextOrKind {
    type Value = FieldValue;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> std::result::Result<FieldValue, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextOrKind {
    type Value = FieldValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E>(self, text: &str) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Text(text.to_owned()))
    }

    fn visit_string<E>(self, text: String) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Text(text))
    }

    fn visit_unit<E>(self) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("null"))
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a number"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<FieldValue, A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(FieldValue::Other("an array"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<FieldValue, A::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(FieldValue::Other("an object"))
    }
}
