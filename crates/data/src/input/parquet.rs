//! Parquet: one column of strings, read in small batches of rows.

use std::collections::VecDeque;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::reader::{FileReader, SerializedFileReader};

use super::files::InputFile;
use super::{Piece, naming_advice, no_safe_cut, push_document};
use crate::catch_panic::catch_panic;
use crate::error::{DataError, Result};
use crate::tokenizer::CutRule;

/// Rows per batch. Memory use depends on the page size, because parquet decodes whole pages.
const BATCH_ROWS: usize = 64;

/// Reads the documents in one column of a parquet file.
pub(super) struct ParquetColumn {
    file: SerializedFileReader<File>,
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
    queue: VecDeque<Piece>,
}

impl ParquetColumn {
    pub(super) fn open(
        input: &InputFile,
        column: &str,
        rule: CutRule,
        bytes_read: Arc<AtomicU64>,
    ) -> Result<Self> {
        let path = &input.path;
        let opened = File::open(path).map_err(DataError::io(path, "open the input"))?;
        let file =
            catch_panic(|| SerializedFileReader::new(opened)).map_err(|e| damaged(path, "footer", &e))?;
        let metadata = file.metadata().file_metadata();
        let columns = metadata.schema_descr().columns();
        let Some(index) = columns.iter().position(|c| c.path().string() == column) else {
            let names: Vec<String> =
                columns.iter().take(8).map(|c| format!("{:?}", c.path().string())).collect();
            let has = if names.is_empty() { "no column at all".to_owned() } else { names.join(", ") };
            return Err(DataError::input(
                path,
                "schema",
                format!("there is no column {column:?}; the file has {has}"),
                naming_advice("column", &names),
            ));
        };
        let chosen = &columns[index];
        if chosen.physical_type() != parquet::basic::Type::BYTE_ARRAY || chosen.max_rep_level() > 0 {
            return Err(DataError::input(
                path,
                "schema",
                format!("column {column:?} is not a column of strings"),
                naming_advice("column", &[]),
            ));
        }
        Ok(ParquetColumn {
            column: index,
            column_name: column.to_owned(),
            is_optional: chosen.max_def_level() > 0,
            rows_total: u64::try_from(metadata.num_rows()).unwrap_or(0),
            file,
            path: path.clone(),
            file_bytes: input.bytes,
            rule,
            next_group: 0,
            reader: None,
            rows_done: 0,
            rows_left: 0,
            bytes_read,
            queue: VecDeque::new(),
        })
    }

    /// Queues the documents of the next batch of rows; false at the end of the file.
    fn read_rows(&mut self) -> Result<bool> {
        loop {
            if self.reader.is_none() && !self.open_group()? {
                return Ok(false);
            }
            let Some(reader) = &mut self.reader else { continue };
            let (mut levels, mut values) = (Vec::new(), Vec::new());
            let wants_levels = self.is_optional;
            let read = catch_panic(|| {
                reader.read_records(BATCH_ROWS, wants_levels.then_some(&mut levels), None, &mut values)
            });
            let rows = match read {
                Ok((rows, _, _)) => rows,
                Err(error) => return Err(damaged(&self.path, &self.location(0), &error)),
            };
            // A page with a wrong row count would add or lose documents silently.
            if (rows == 0) != (self.rows_left == 0) || rows as u64 > self.rows_left {
                return Err(self.row_count_error(rows as u64));
            }
            self.rows_left -= rows as u64;
            if rows == 0 {
                self.reader = None;
                continue;
            }
            if values.len() != rows && !self.is_optional {
                return Err(damaged(&self.path, &self.location(0), &"a page has too few values".to_owned()));
            }
            if values.len() != rows {
                let row = levels.iter().position(|&level| level == 0).unwrap_or(0);
                return Err(DataError::input(
                    &self.path,
                    self.location(row),
                    format!("column {:?} has no value (null)", self.column_name),
                    "drop such rows, or name another column",
                ));
            }
            for (row, value) in values.iter().enumerate() {
                self.push_row(row, value)?;
            }
            self.rows_done += rows as u64;
            let share = self.rows_done as f64 / self.rows_total.max(1) as f64;
            self.bytes_read.store((self.file_bytes as f64 * share.min(1.0)) as u64, Ordering::Relaxed);
            return Ok(true);
        }
    }

    fn push_row(&mut self, row: usize, value: &ByteArray) -> Result<()> {
        let text = std::str::from_utf8(value.data()).map_err(|e| {
            DataError::input(
                &self.path,
                self.location(row),
                format!("byte {} of column {:?} is not valid UTF-8", e.valid_up_to(), self.column_name),
                "write the column as strings, or name another one",
            )
        })?;
        push_document(&mut self.queue, text.to_owned(), self.rule)
            .ok_or_else(|| no_safe_cut(&self.path, self.location(row), self.rule))
    }

    /// Opens the column in the next row group; false if there is none.
    fn open_group(&mut self) -> Result<bool> {
        if self.next_group >= self.file.num_row_groups() {
            return Ok(false);
        }
        let (group, column) = (self.next_group, self.column);
        self.next_group += 1;
        let opened = catch_panic(|| self.file.get_row_group(group)?.get_column_reader(column));
        match opened {
            Ok(ColumnReader::ByteArrayColumnReader(reader)) => {
                self.reader = Some(reader);
                self.rows_left =
                    u64::try_from(self.file.metadata().row_group(group).num_rows()).unwrap_or_default();
            }
            Ok(_) => {
                let problem = "its type differs from the schema's".to_owned();
                return Err(damaged(&self.path, &format!("row group {group}"), &problem));
            }
            Err(error) => return Err(damaged(&self.path, &format!("row group {group}"), &error)),
        }
        Ok(true)
    }

    /// The error for pages that hold another number of rows than the footer says; `read` is the size of the
    /// last batch.
    fn row_count_error(&self, read: u64) -> DataError {
        let comparison = if read > self.rows_left { "fewer" } else { "more" };
        let problem =
            format!("its footer counts {comparison} rows of column {:?} than there are", self.column_name);
        damaged(&self.path, &format!("row group {}", self.next_group - 1), &problem)
    }

    /// A row of the current batch, counted from 1 in the file.
    fn location(&self, row_of_batch: usize) -> String {
        format!("row {}", self.rows_done + row_of_batch as u64 + 1)
    }
}

impl Iterator for ParquetColumn {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Result<Piece>> {
        if self.queue.is_empty() {
            match self.read_rows() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => return Some(Err(error)),
            }
        }
        self.queue.pop_front().map(Ok)
    }
}

fn damaged(path: &Path, location: &str, problem: &String) -> DataError {
    DataError::input(
        path,
        location,
        format!("the parquet data is damaged ({problem})"),
        "fetch or write the file again",
    )
}
