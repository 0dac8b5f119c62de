//! Parquet: one column of strings, or whole rows, read row by row. A value is limited in size as a line of
//! JSON is, and so is a page, which is decoded as a whole.

mod checked_pages;
mod footer;
mod page_limit;
mod rows;
mod thrift;

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::basic::Type;
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::metadata::ParquetMetaData;
use parquet::file::serialized_reader::SerializedPageReader;
use parquet::schema::types::{ColumnDescPtr, ColumnDescriptor};

use super::bad_rows::{ReadError, SKIPPING};
use super::conversations::{self, Content, Field};
use super::files::InputFile;
use super::kinds::{Compression, Format};
use super::{Document, InputOptions, MAX_VALUE_BYTES, Piece, foreign, naming_advice, no_safe_cut};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::tokenizer::CutRule;
use checked_pages::CheckedPages;
use footer::read_footer;
use page_limit::LimitedPages;
pub(super) use rows::ParquetRows;

/// Reads the documents in one column of a parquet file.
pub(super) struct ParquetColumn {
    metadata: ParquetMetaData,
    pages: Arc<LimitedPages>,
    path: PathBuf,
    file_bytes: u64,
    column: usize,
    column_name: String,
    is_optional: bool,
    rule: CutRule,
    next_group: usize,
    reader: Option<ColumnReaderImpl<ByteArrayType>>,
    rows_done: u64,
    rows_total: u64,
    /// Rows of the open group that remain, according to the footer.
    rows_left: u64,
    bytes_read: Arc<AtomicU64>,
    /// Buffers of a row.
    levels: Vec<i16>,
    values: Vec<ByteArray>,
    /// The document of the last row, until its last piece is returned.
    document: Option<Document>,
}

impl ParquetColumn {
    pub(super) fn open(
        input: &InputFile,
        column: &str,
        rule: CutRule,
        bytes_read: Arc<AtomicU64>,
    ) -> Result<Self> {
        let path = &input.path;
        let (opened, metadata) = open_file(path)?;
        let columns = metadata.file_metadata().schema_descr().columns();
        let mut named = (0..columns.len()).filter(|&index| columns[index].path().string() == column);
        let first = named.next();
        if named.next().is_some() {
            return Err(DataError::input(
                path,
                "schema",
                format!("there are several columns {column:?}"),
                "write the file again with one column of that name",
            ));
        }
        let Some(index) = first else {
            let names: Vec<String> =
                columns.iter().take(8).map(|c| format!("{:?}", c.path().string())).collect();
            let has = if names.is_empty() { "no column at all".to_owned() } else { names.join(", ") };
            let problem = format!("there is no column {column:?}; the file has {has}");
            return Err(DataError::input(path, "schema", problem, column_advice(input, columns)));
        };
        let chosen = &columns[index];
        if !holds_strings(chosen) {
            let problem = format!("column {column:?} is not a column of strings");
            return Err(DataError::input(path, "schema", problem, column_advice(input, columns)));
        }
        Ok(ParquetColumn {
            column: index,
            column_name: column.to_owned(),
            is_optional: chosen.max_def_level() > 0,
            rows_total: u64::try_from(metadata.file_metadata().num_rows()).unwrap_or(0),
            pages: Arc::new(LimitedPages::new(opened)),
            metadata,
            path: path.clone(),
            file_bytes: input.bytes,
            rule,
            next_group: 0,
            reader: None,
            rows_done: 0,
            rows_left: 0,
            bytes_read,
            levels: Vec::new(),
            values: Vec::new(),
            document: None,
        })
    }

    /// Reads the document of the next row; false at the end of the file.
    fn read_row(&mut self) -> std::result::Result<bool, ReadError> {
        loop {
            if self.reader.is_none() && !self.open_group()? {
                return Ok(false);
            }
            let Some(reader) = &mut self.reader else { continue };
            self.levels.clear();
            self.values.clear();
            let levels = self.is_optional.then_some(&mut self.levels);
            let read = catch_panic(|| reader.read_records(1, levels, None, &mut self.values));
            let rows = match (read, self.pages.refused()) {
                (_, Some(problem)) => return Err(self.too_large(&problem).into()),
                (Ok((rows, _, _)), None) => rows,
                (Err(error), None) => return Err(damaged(&self.path, &self.location(), &error).into()),
            };
            // A page with a wrong row count would add or lose documents silently.
            if (rows == 0) != (self.rows_left == 0) || rows as u64 > self.rows_left {
                return Err(self.row_count_error(rows as u64).into());
            }
            if rows == 0 {
                self.reader = None;
                continue;
            }
            self.rows_left -= rows as u64;
            let value = self.values.pop();
            if value.is_none() && !self.is_optional {
                let problem = "a page has too few values".to_owned();
                return Err(damaged(&self.path, &self.location(), &problem).into());
            }
            let text = match &value {
                Some(value) => self.text(value),
                None => Err(ReadError::Row(DataError::input(
                    &self.path,
                    self.location(),
                    format!("column {:?} has no value (null)", self.column_name),
                    format!("drop such rows, or {SKIPPING}"),
                ))),
            };
            self.rows_done += 1;
            self.document = Some(Document::new(text?, self.rows_done));
            let share = self.rows_done as f64 / self.rows_total.max(1) as f64;
            self.bytes_read.store((self.file_bytes as f64 * share.min(1.0)) as u64, Ordering::Relaxed);
            return Ok(true);
        }
    }

    /// The value of the next row as text.
    fn text(&self, value: &ByteArray) -> std::result::Result<String, ReadError> {
        if value.len() > MAX_VALUE_BYTES {
            let (value, most) = (value.len().div_ceil(1 << 20), MAX_VALUE_BYTES >> 20);
            let problem = format!("the value takes {value} MiB, more than {most} MiB");
            return Err(self.too_large(&problem).into());
        }
        let text = std::str::from_utf8(value.data()).map_err(|e| {
            ReadError::Row(DataError::input(
                &self.path,
                self.location(),
                format!("byte {} of column {:?} is not valid UTF-8", e.valid_up_to(), self.column_name),
                format!("write the column as strings, or name another one, or {SKIPPING}"),
            ))
        })?;
        Ok(text.to_owned())
    }

    fn next_piece(&mut self) -> std::result::Result<Option<Piece>, ReadError> {
        if self.document.is_none() && !self.read_row()? {
            return Ok(None);
        }
        let piece = self.document.as_mut().and_then(|document| document.next_piece(self.rule));
        let row = self.rows_done;
        let piece = piece.ok_or_else(|| no_safe_cut(&self.path, format!("row {row}"), self.rule))?;
        if piece.ends_document {
            self.document = None;
        }
        Ok(Some(piece))
    }

    fn too_large(&self, problem: &str) -> DataError {
        DataError::input(
            &self.path,
            self.location(),
            format!("column {:?}: {problem}", self.column_name),
            "split long documents, and write fewer rows to a page (pyarrow: write_batch_size=16 in write_table)",
        )
    }

    /// Opens the column in the next row group; false if there is none.
    fn open_group(&mut self) -> Result<bool> {
        if self.next_group >= self.metadata.num_row_groups() {
            return Ok(false);
        }
        let group = self.next_group;
        self.next_group += 1;
        let location = format!("row group {group}");
        let group = self.metadata.row_group(group);
        self.rows_left = u64::try_from(group.num_rows()).unwrap_or_default();
        let column = group.column(self.column);
        if column.column_type() != Type::BYTE_ARRAY {
            let problem = "its type differs from the schema's".to_owned();
            return Err(damaged(&self.path, &location, &problem));
        }
        let opened = catch_panic(|| {
            let rows = self.rows_left as usize;
            SerializedPageReader::new(Arc::clone(&self.pages), column, rows, None)
        });
        let pages = opened.map_err(|error| damaged(&self.path, &location, &error))?;
        let pages = Box::new(CheckedPages::new(pages, usize::from(self.is_optional)));
        self.reader = Some(ColumnReaderImpl::new(column.column_descr_ptr(), pages));
        Ok(true)
    }

    /// The error for pages that hold another number of rows than the footer says; `read` is the number of
    /// rows read last.
    fn row_count_error(&self, read: u64) -> DataError {
        let comparison = if read > self.rows_left { "fewer" } else { "more" };
        let problem =
            format!("its footer counts {comparison} rows of column {:?} than there are", self.column_name);
        damaged(&self.path, &format!("row group {}", self.next_group - 1), &problem)
    }

    /// The next row, counted from 1 in the file.
    fn location(&self) -> String {
        format!("row {}", self.rows_done + 1)
    }
}

impl Iterator for ParquetColumn {
    type Item = std::result::Result<Piece, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_piece().transpose()
    }
}

/// Names of the columns that hold strings; none if the columns are those of chats or of prompts with answers.
pub(super) fn string_columns(input: &InputFile) -> Result<Vec<String>> {
    let (_, metadata) = open_file(&input.path)?;
    let columns = metadata.file_metadata().schema_descr().columns();
    let strings: Vec<String> =
        columns.iter().filter(|column| holds_strings(column)).map(|column| column.path().string()).collect();
    let is_text =
        strings.contains(&InputOptions::default().field) || conversation_advice(input, columns).is_none();
    Ok(if is_text { strings } else { Vec::new() })
}

/// True if the first row of a column of strings is a list of objects in JSON.
fn holds_json_lists(input: &InputFile, column: &str) -> bool {
    let rows = ParquetColumn::open(input, column, CutRule::Anywhere, Arc::default());
    let first = rows.ok().and_then(|mut rows| rows.next()?.ok());
    first.is_some_and(|piece| conversations::is_json_list(&piece.text))
}

fn open_file(path: &Path) -> Result<(File, ParquetMetaData)> {
    let opened = File::open(path).map_err(DataError::io(path, "open the input"))?;
    let mut start = Vec::new();
    let read = (&opened).take(foreign::START_BYTES as u64).read_to_end(&mut start);
    read.map_err(DataError::io(path, "read the input"))?;
    if let Some(error) = foreign::refuse(path, Format::Parquet, Compression::None, &start) {
        return Err(error);
    }
    let metadata = catch_panic(|| read_footer(&opened)).map_err(|e| damaged(path, "footer", &e))?;
    Ok((opened, metadata))
}

/// True for a column with one value of bytes in each row.
fn holds_strings(column: &ColumnDescriptor) -> bool {
    column.physical_type() == Type::BYTE_ARRAY && column.max_rep_level() == 0
}

/// Advice for a column that is missing or holds no strings.
fn column_advice(input: &InputFile, columns: &[ColumnDescPtr]) -> String {
    conversation_advice(input, columns).unwrap_or_else(|| {
        let strings = columns.iter().filter(|column| holds_strings(column));
        let strings: Vec<String> = strings.map(|column| format!("{:?}", column.path().string())).collect();
        naming_advice("column", &strings)
    })
}

/// Advice for columns of chats or of prompts with answers.
fn conversation_advice(input: &InputFile, columns: &[ColumnDescPtr]) -> Option<String> {
    let field = |column: &'_ ColumnDescPtr| {
        let parts = column.path().parts();
        let content = match () {
            () if column.max_rep_level() > 0 => Content::List,
            () if parts.len() > 1 => Content::Object,
            () if !holds_strings(column) => Content::Other,
            () if conversations::is_chat_name(&parts[0]) && holds_json_lists(input, &parts[0]) => {
                Content::List
            }
            () => Content::Text,
        };
        (parts[0].clone(), content)
    };
    let mut fields: Vec<(String, Content)> = columns.iter().map(field).collect();
    // A structure has a column for each of its fields.
    fields.dedup_by(|a, b| a.0 == b.0);
    let fields: Vec<Field<'_>> =
        fields.iter().map(|(name, content)| Field { name, content: *content }).collect();
    conversations::advice("column", &fields)
}

fn damaged(path: &Path, location: &str, problem: &str) -> DataError {
    // The parquet crate would list all bytes of the string.
    let problem = if problem.contains("FromUtf8Error") { "a string is not UTF-8" } else { problem };
    DataError::input(
        path,
        location,
        format!("the parquet data is damaged ({problem})"),
        "fetch or write the file again",
    )
}
