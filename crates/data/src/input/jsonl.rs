//! Rows of JSON: an object per line, or the objects of an array. The document is one of the row's fields, or
//! the row.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use super::bad_rows::{ReadError, SKIPPING};
use super::conversations::{self, Content, Field};
use super::json_array::JsonArray;
use super::json_fault::{self, Fault, REPAIR, replace_non_numbers};
use super::stream::InputStream;
use super::{Document, Format, InputOptions, MAX_VALUE_BYTES, Piece, naming_advice, no_safe_cut};
use crate::error::{DataError, Result};
use crate::tokenizer::CutRule;

/// Bytes of blank lines after which a reader hears that the file goes on.
const BLANK_BYTES: usize = 4 << 20;

/// Reads the documents of a `.jsonl` or `.json` file. Skips blank lines.
pub(super) struct JsonRows {
    stream: InputStream,
    /// The array whose elements are the rows; `None` if they are lines.
    array: Option<JsonArray>,
    field: String,
    /// A document is the whole row.
    whole_rows: bool,
    rule: CutRule,
    /// The row, and its number in the file, from 1.
    line: Vec<u8>,
    line_number: u64,
    /// The document of the line, until its last piece is returned.
    document: Option<Document>,
    /// True if a line before had its text in the field.
    has_documents: bool,
    /// Number of lines without text in the field, before any that has it.
    lines_without: usize,
}

/// Number of lines without text in the field from which on the field has the wrong name.
const WRONG_LINES: usize = 16;

/// Result of reading up to the next line with text.
enum NextLine {
    Text,
    /// Only blank lines so far.
    Blank,
    End,
}

impl JsonRows {
    /// Opens a file; the first byte of a `.json` file says whether it is an array.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn open(
        mut stream: InputStream,
        format: Format,
        options: &InputOptions,
        rule: CutRule,
    ) -> Result<Self> {
        let is_array = format == Format::Json && stream.begins_with(b'[')?;
        Ok(JsonRows {
            stream,
            array: is_array.then(JsonArray::default),
            field: options.field.clone(),
            whole_rows: options.whole_rows,
            rule,
            line: Vec::new(),
            line_number: 0,
            document: None,
            has_documents: false,
            lines_without: 0,
        })
    }

    /// Reads the next element of an array.
    fn read_element(&mut self, mut array: JsonArray) -> Result<NextLine> {
        self.line.clear();
        self.line_number += 1;
        let read = array.read_element(&mut self.stream, MAX_VALUE_BYTES, &mut self.line)?;
        self.array = Some(array);
        match read {
            Ok(true) => Ok(NextLine::Text),
            Ok(false) => Ok(NextLine::End),
            Err(problem) => Err(self.error(problem, "fetch or write the file again")),
        }
    }

    /// Reads the next row, in a file of lines the next line that is not blank.
    fn read_line(&mut self) -> Result<NextLine> {
        if let Some(array) = self.array.take() {
            return self.read_element(array);
        }
        let start = self.stream.offset();
        loop {
            if self.stream.offset() - start >= BLANK_BYTES as u64 {
                return Ok(NextLine::Blank);
            }
            self.line.clear();
            if self.stream.read_line(MAX_VALUE_BYTES + 1, &mut self.line)? == 0 {
                return Ok(NextLine::End);
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
                return Ok(NextLine::Text);
            }
        }
    }

    /// The row as a whole.
    fn whole_row(&mut self) -> std::result::Result<Piece, ReadError> {
        let text = String::from_utf8(std::mem::take(&mut self.line)).map_err(|error| {
            let problem = format!("byte {} is not valid UTF-8", error.utf8_error().valid_up_to() + 1);
            ReadError::Row(self.error(problem, json_fault::LATIN))
        })?;
        Ok(Piece { text, begins_document: true, ends_document: true, row: self.line_number })
    }

    /// Parses the line; its document is what [`JsonRows::next_piece`] returns next.
    fn parse_line(&mut self) -> std::result::Result<(), ReadError> {
        let mut is_replaced = false;
        let parsed = parse(&self.line, &self.field).or_else(|error| {
            is_replaced = replace_non_numbers(&mut self.line);
            if is_replaced { parse(&self.line, &self.field) } else { Err(error) }
        });
        let (field, kind) = (&self.field, if is_replaced { "NaN or a number" } else { "a number" });
        let problem = match parsed {
            Ok(FieldValue::Text(text)) => {
                self.document = Some(Document::new(text, self.line_number));
                self.has_documents = true;
                return Ok(());
            }
            Ok(FieldValue::Null) => return Err(ReadError::Row(self.null())),
            Ok(FieldValue::Number) => format!("field {field:?} is {kind}, not a string"),
            Ok(FieldValue::Other(kind)) => format!("field {field:?} is {kind}, not a string"),
            Ok(FieldValue::Missing(keys)) => {
                format!("there is no field {field:?}; the {} has {}", self.noun(), keys.join(", "))
            }
            Err(error) => {
                let Fault { problem, advice } = json_fault::explain(&self.line, &error);
                // If lines before are right, the fault is probably that of a few lines.
                let is_rare = self.has_documents || advice == REPAIR;
                let advice = if is_rare { format!("{advice}, or {SKIPPING}") } else { advice.to_owned() };
                return Err(ReadError::Row(self.error(problem, advice)));
            }
        };
        self.lines_without += usize::from(!self.has_documents);
        Err(self.wrong_field(problem))
    }

    fn next_piece(&mut self) -> std::result::Result<Option<Piece>, ReadError> {
        if self.document.is_none() {
            match self.read_line()? {
                NextLine::Text if self.whole_rows => return self.whole_row().map(Some),
                NextLine::Text => self.parse_line()?,
                NextLine::Blank => {
                    return Ok(Some(Piece {
                        text: String::new(),
                        begins_document: false,
                        ends_document: false,
                        row: self.line_number,
                    }));
                }
                NextLine::End => return Ok(None),
            }
        }
        let piece = self.document.as_mut().and_then(|document| document.next_piece(self.rule));
        let piece = piece.ok_or_else(|| no_safe_cut(self.stream.path(), self.location(), self.rule))?;
        if piece.ends_document {
            self.document = None;
        }
        Ok(Some(piece))
    }

    /// The error for a line whose field is null.
    fn null(&self) -> DataError {
        self.error(
            format!("field {:?} is null, not a string", self.field),
            format!("drop such lines, or {SKIPPING}"),
        )
    }

    /// The error for a line whose text is not where the field says. Unless lines before had it there, the
    /// file may have its text elsewhere or be no text.
    fn wrong_field(&self, problem: String) -> ReadError {
        if self.has_documents {
            return ReadError::Row(self.error(problem, format!("drop such lines, or {SKIPPING}")));
        }
        let row: Map<String, Value> = serde_json::from_slice(&self.line).unwrap_or_default();
        if let Some(advice) = conversations::advice("field", &fields(&row)) {
            return ReadError::File(self.error(problem, advice));
        }
        let strings = string_fields(&row);
        if self.lines_without >= WRONG_LINES {
            return ReadError::File(self.wrong_name());
        }
        ReadError::Row(self.error(problem, naming_advice("field", &strings)))
    }

    /// The error for a file in which no line so far has its text in the field.
    fn wrong_name(&self) -> DataError {
        let row: Map<String, Value> = serde_json::from_slice(&self.line).unwrap_or_default();
        let strings = string_fields(&row);
        let has = if strings.is_empty() {
            "no strings".to_owned()
        } else {
            format!("strings in {}", strings.join(", "))
        };
        let problem = format!(
            "none of the first {WRONG_LINES} rows has text in the field {:?}, so that this is a wrong name and not a bad \
             row to skip; the {} has {has}",
            self.field,
            self.noun()
        );
        self.error(problem, naming_advice("field", &strings))
    }

    fn error(&self, problem: impl Into<String>, advice: impl Into<String>) -> DataError {
        DataError::input(self.stream.path(), self.location(), problem, advice)
    }

    fn location(&self) -> String {
        format!("{} {}", self.noun(), self.line_number)
    }

    fn noun(&self) -> &'static str {
        if self.array.is_some() { "row" } else { "line" }
    }
}

/// The first rows of a file that are objects, at most `count`.
///
/// # Errors
/// The file cannot be read.
pub(super) fn first_rows(
    stream: InputStream,
    format: Format,
    count: usize,
) -> Result<Vec<Map<String, Value>>> {
    let mut lines = JsonRows::open(stream, format, &InputOptions::default(), CutRule::Anywhere)?;
    let mut rows = Vec::new();
    for _ in 0..count {
        match lines.read_line()? {
            NextLine::Text => {
                replace_non_numbers(&mut lines.line);
                rows.extend(serde_json::from_slice::<Map<String, Value>>(&lines.line).ok());
            }
            NextLine::Blank => {}
            NextLine::End => break,
        }
    }
    Ok(rows)
}

/// Quoted names of the fields of a row that have strings.
fn string_fields(row: &Map<String, Value>) -> Vec<String> {
    row.iter().filter(|(_, value)| value.is_string()).map(|(name, _)| format!("{name:?}")).collect()
}

/// The fields of a row, as far as the recognition of chats needs them.
pub(super) fn fields(row: &Map<String, Value>) -> Vec<Field<'_>> {
    let content = |value: &Value| match value {
        Value::String(text) if conversations::is_json_list(text) => Content::List,
        Value::String(_) => Content::Text,
        Value::Array(_) => Content::List,
        Value::Object(_) => Content::Object,
        Value::Null | Value::Bool(_) | Value::Number(_) => Content::Other,
    };
    row.iter().map(|(name, value)| Field { name, content: content(value) }).collect()
}

/// Parses a line and keeps one field. Without its line break: a string that is cut off ends there.
fn parse(line: &[u8], field: &str) -> serde_json::Result<FieldValue> {
    let mut json = serde_json::Deserializer::from_slice(line.trim_ascii_end());
    let value = FieldSelector(field).deserialize(&mut json)?;
    json.end().map(|()| value)
}

impl Iterator for JsonRows {
    type Item = std::result::Result<Piece, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

/// Value of the text field of an object.
enum FieldValue {
    Text(String),
    Null,
    Number,
    /// Another value: its JSON type, with an article.
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
        Ok(FieldValue::Null)
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Other("a boolean"))
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Number)
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Number)
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<FieldValue, E> {
        Ok(FieldValue::Number)
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
