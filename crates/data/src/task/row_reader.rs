//! The rows of a file as JSON objects: lines, or the elements of a list within an object. One row is in
//! memory at a time.

use serde_json::{Map, Value};

use crate::error::{DataError, Result};
use crate::input::InputFile;
use crate::input::json_array::JsonArray;
use crate::input::json_fault::{self, Fault, replace_non_numbers};
use crate::input::stream::{self, InputStream};

/// Maximum size of a row, in bytes of JSON.
pub(super) const MAX_ROW_BYTES: usize = 16 << 20;

/// Reader of rows.
pub(super) struct RowReader {
    stream: InputStream,
    file: InputFile,
    /// The list whose elements are the rows; `None` if they are lines.
    list: Option<JsonArray>,
    row: Vec<u8>,
    number: u64,
}

/// Place of a row, for messages.
pub(super) fn place(number: u64, is_line: bool) -> String {
    format!("{} {number}", if is_line { "line" } else { "example" })
}

impl RowReader {
    /// Reader of the lines of a file. Blank ones are skipped.
    pub(super) fn of_lines(file: &InputFile) -> Result<RowReader> {
        RowReader::new(file, None)
    }

    /// Reader of the elements of the list that begins at byte `at` of the decompressed file.
    pub(super) fn of_list(file: &InputFile, at: u64) -> Result<RowReader> {
        const PIECE: usize = 256 << 10;
        let mut reader = RowReader::new(file, Some(JsonArray::nested()))?;
        while reader.stream.offset() < at {
            reader.row.clear();
            let left = usize::try_from(at - reader.stream.offset()).unwrap_or(PIECE).min(PIECE);
            if reader.stream.read_line(left, &mut reader.row)? == 0 {
                break;
            }
        }
        Ok(reader)
    }

    fn new(file: &InputFile, list: Option<JsonArray>) -> Result<RowReader> {
        let stream = stream::open(file, Default::default())?;
        Ok(RowReader { stream, file: file.clone(), list, row: Vec::new(), number: 0 })
    }

    /// The next row with its number, which counts lines or elements from 1; `None` after the last one.
    ///
    /// # Errors
    /// The file cannot be read; a row that is too long, or is no JSON object.
    pub(super) fn next_row(&mut self) -> Result<Option<(u64, Map<String, Value>)>> {
        if !self.read()? {
            return Ok(None);
        }
        let parsed = serde_json::from_slice(&self.row).or_else(|error| {
            // Python's json writes NaN, which rows of results may hold.
            let is_replaced = replace_non_numbers(&mut self.row);
            if is_replaced { serde_json::from_slice(&self.row) } else { Err(error) }
        });
        match parsed {
            Ok(row) => Ok(Some((self.number, row))),
            Err(error) => {
                let Fault { problem, advice } = json_fault::explain(&self.row, &error);
                Err(self.error(problem, advice))
            }
        }
    }

    /// Reads the bytes of the next row; false at the end.
    fn read(&mut self) -> Result<bool> {
        if let Some(list) = &mut self.list {
            self.row.clear();
            self.number += 1;
            return match list.read_element(&mut self.stream, MAX_ROW_BYTES, &mut self.row)? {
                Ok(is_row) => Ok(is_row),
                Err(problem) => Err(self.error(problem, "check that it is the right file")),
            };
        }
        loop {
            self.row.clear();
            if self.stream.read_line(MAX_ROW_BYTES + 1, &mut self.row)? == 0 {
                return Ok(false);
            }
            self.number += 1;
            if self.row.len() > MAX_ROW_BYTES {
                let problem = format!("the row is longer than {} MiB", MAX_ROW_BYTES >> 20);
                return Err(self.error(problem, "shorten it, or write one JSON object per line"));
            }
            if self.number == 1 && self.row.starts_with("\u{FEFF}".as_bytes()) {
                self.row.drain(.."\u{FEFF}".len());
            }
            self.row.truncate(self.row.trim_ascii_end().len());
            if !self.row.is_empty() {
                return Ok(true);
            }
        }
    }

    fn error(&self, problem: impl Into<String>, advice: &str) -> DataError {
        DataError::input(&self.file.path, place(self.number, self.list.is_none()), problem, advice)
    }
}
