//! The field of a file that probably holds the text.

use serde_json::{Map, Value};
use xtrain_chat::{RowFormat, recognise};

use super::jsonl::{self, fields};
use super::{Format, InputFile, InputOptions, conversations, json_fault, parquet, read_documents, stream};
use crate::error::Result;
use crate::tokenizer::CutRule;

/// Number of rows whose texts are compared.
const ROWS: usize = 16;

/// Bytes of [`first_text`], at most.
const FIRST_BYTES: usize = 64 << 10;

/// The field of `.jsonl` lines or the column of a `.parquet` file that probably holds the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextField {
    /// Its name.
    pub name: String,
    /// Names of the other fields with strings, if this one was chosen among them.
    pub others: Vec<String>,
}

/// The field that probably holds the text: `text` if that has strings, else the one whose strings are the
/// longest in the first rows. `None` for a `.txt` file.
///
/// # Errors
/// The file cannot be read, has no field of strings, or has chats, prompts with answers or pairs of texts.
pub fn text_field(file: &InputFile) -> Result<Option<TextField>> {
    let default = InputOptions::default();
    let lengths = match file.format {
        Format::Text => return Ok(None),
        Format::JsonLines | Format::Json => field_lengths(file, &default.field)?,
        Format::Parquet => column_lengths(file)?,
    };
    if lengths.iter().any(|(name, _)| *name == default.field) {
        return Ok(Some(TextField { name: default.field, others: Vec::new() }));
    }
    // The first of equals.
    let longest = lengths.iter().rev().max_by_key(|(_, bytes)| *bytes).map(|(name, _)| name.clone());
    match longest {
        Some(name) => {
            let others = lengths.into_iter().map(|(other, _)| other).filter(|other| *other != name).collect();
            Ok(Some(TextField { name, others }))
        }
        // Reading the default field gives the error, which says what the file has.
        None => match read_documents(file, &default, CutRule::Anywhere)?.next() {
            Some(Err(error)) => Err(error),
            _ => Ok(Some(TextField { name: default.field, others: Vec::new() })),
        },
    }
}

/// True if the first rows have the keys of conversations, prompts with completions, or instructions with
/// outputs. Files of plain text have no rows.
///
/// # Errors
/// The first file with rows cannot be read.
pub fn holds_conversations(files: &[InputFile]) -> Result<bool> {
    const ROWS: usize = 100;
    let Some(file) = files.iter().find(|file| file.format != Format::Text) else { return Ok(false) };
    let options = InputOptions { whole_rows: true, ..InputOptions::default() };
    let rows = read_documents(file, &options, CutRule::Anywhere)?.take(ROWS);
    let is_chat = |mut text: Vec<u8>| {
        // A row with NaN or half a surrogate pair counts here; reading it gives the error.
        json_fault::replace_non_numbers(&mut text);
        json_fault::replace_surrogates(&mut text);
        let row: Option<Map<String, Value>> = serde_json::from_slice(&text).ok();
        row.is_some_and(|row| recognise(&row).is_ok_and(RowFormat::is_chat))
    };
    for row in rows {
        if is_chat(row?.text.into_bytes()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The start of the text of the first rows of a file, which are read as for training, with the text in
/// `field`; `None` if they have no documents.
///
/// # Errors
/// The file cannot be read, or no first row has text in the field.
pub fn first_text(file: &InputFile, field: &str) -> Result<Option<String>> {
    // A run says what to do about bad rows.
    let options =
        InputOptions { field: field.to_owned(), skip_bad_rows: ROWS as u64, ..InputOptions::default() };
    let mut text = None;
    // Blank lines, too, are read in pieces.
    for piece in read_documents(file, &options, CutRule::Anywhere)?.take(ROWS) {
        let piece = piece?;
        if piece.is_nothing() {
            continue;
        }
        let text = text.get_or_insert_with(String::new);
        let left = FIRST_BYTES.saturating_sub(text.len());
        text.push_str(&piece.text[..piece.text.floor_char_boundary(left)]);
    }
    Ok(text)
}

/// The fields of strings in the first lines, with the bytes of these; none if they are chats or pairs, unless
/// `default` has strings too.
fn field_lengths(file: &InputFile, default: &str) -> Result<Vec<(String, usize)>> {
    let rows = jsonl::first_rows(stream::open(file, Default::default())?, file.format, ROWS)?;
    let mut lengths: Vec<(String, usize)> = Vec::new();
    for (name, value) in rows.iter().flatten() {
        let Some(text) = value.as_str() else { continue };
        match lengths.iter_mut().find(|(known, _)| known == name) {
            Some((_, bytes)) => *bytes += text.len(),
            None => lengths.push((name.clone(), text.len())),
        }
    }
    let is_conversation = || rows.iter().any(|row| conversations::advice("field", &fields(row)).is_some());
    if !lengths.iter().any(|(name, _)| name == default) && is_conversation() {
        lengths.clear();
    }
    Ok(lengths)
}

/// The columns of strings, with the bytes in their first rows.
fn column_lengths(file: &InputFile) -> Result<Vec<(String, usize)>> {
    let lengths = parquet::string_columns(file)?.into_iter().map(|field| {
        let options =
            InputOptions { field: field.clone(), skip_bad_rows: ROWS as u64, ..InputOptions::default() };
        let documents = read_documents(file, &options, CutRule::Anywhere).into_iter().flatten();
        let bytes = documents.take(ROWS).map_while(Result::ok).map(|piece| piece.text.len()).sum();
        (field, bytes)
    });
    Ok(lengths.collect())
}
