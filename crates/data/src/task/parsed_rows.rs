//! A file of rows: its format, recognised by its keys, and its rows one by one.

use std::collections::HashSet;
use std::path::Path;

use super::big_bench::{self, BigBench};
use super::content::{NamedRow, read_row};
use super::fault::RowFault;
use super::first_object::first_object;
use super::row::RowKind;
use super::row_reader::{RowReader, place};
use super::samples::{Samples, is_sample};
use crate::error::{DataError, Result};
use crate::input::kinds::split_compression;
use crate::input::{Compression, Format, InputFile};

/// A file of rows.
#[derive(Debug)]
pub(super) struct TaskData {
    file: InputFile,
    format: RowFormat,
    kind: RowKind,
}

/// The format of a file of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RowFormat {
    /// Lines of this crate's format.
    Lines,
    /// BIG-bench's `task.json`, whose list of examples begins at a byte.
    BigBench(BigBench, u64),
    /// lm-eval's `samples_*.jsonl`.
    Samples(Samples),
}

/// Rows of a file, in order.
pub(super) struct ParsedRows<'d> {
    data: &'d TaskData,
    reader: RowReader,
    /// Hashes of the examples of BIG-bench so far, 16 bytes each.
    seen: HashSet<u128>,
    left_out: u64,
}

/// A row and its number in the file.
pub(super) struct ParsedRow {
    pub(super) number: u64,
    pub(super) row: NamedRow,
}

impl TaskData {
    /// Recognises a file by its first row, or by the keys of its object. `delimiter` is that of a task file.
    ///
    /// # Errors
    /// A file that cannot be read, is empty or has no known keys; a bad first row.
    pub(super) fn open(path: &Path, delimiter: Option<&str>) -> Result<TaskData> {
        let compression = split_compression(path).1.unwrap_or(Compression::None);
        let file = InputFile::of_kind(path, Format::JsonLines, compression)?;
        let object = first_object(&file, big_bench::EXAMPLES, &big_bench::SETTINGS)?;
        let format = match object {
            Some(object) if object.list_at.is_some() => {
                let at = object.list_at.unwrap_or_default();
                let settings = BigBench::new(&object.values)
                    .map_err(|fault| fault.into_error(path, "its settings".to_owned()))?;
                if !object.is_whole_file {
                    let problem = "the list `examples` is that of BIG-bench's task.json, but more text follows its object";
                    return Err(DataError::corrupt(
                        path,
                        problem,
                        "write one object, or rows without that key",
                    ));
                }
                RowFormat::BigBench(settings, at)
            }
            _ => lines_format(&file, delimiter)?,
        };
        let mut data = TaskData { file, format, kind: RowKind::MultipleChoice };
        let Some(first) = data.rows()?.read_row()? else { return Err(data.no_rows()) };
        data.kind = first.row.content.kind();
        Ok(data)
    }

    /// The rows.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn rows(&self) -> Result<ParsedRows<'_>> {
        let reader = match &self.format {
            RowFormat::BigBench(_, at) => RowReader::of_list(&self.file, *at)?,
            RowFormat::Lines | RowFormat::Samples(_) => RowReader::of_lines(&self.file)?,
        };
        Ok(ParsedRows { data: self, reader, seen: HashSet::new(), left_out: 0 })
    }

    pub(super) fn path(&self) -> &Path {
        &self.file.path
    }

    pub(super) fn format(&self) -> &RowFormat {
        &self.format
    }

    pub(super) fn kind(&self) -> RowKind {
        self.kind
    }

    /// The place of a row, for messages.
    pub(super) fn place(&self, number: u64) -> String {
        place(number, !matches!(self.format, RowFormat::BigBench(..)))
    }

    fn no_rows(&self) -> DataError {
        let (problem, advice) = match &self.format {
            RowFormat::BigBench(..) => (
                "no example has target_scores",
                "name a task of multiple choice; of a task of subtasks, name the task.json of one",
            ),
            RowFormat::Lines | RowFormat::Samples(_) => ("has no rows", "write one JSON object per line"),
        };
        DataError::corrupt(self.path(), problem, advice)
    }
}

/// The format of a file of lines. Of lm-eval's choices all rows are read, of other samples and other lines
/// only the first.
fn lines_format(file: &InputFile, delimiter: Option<&str>) -> Result<RowFormat> {
    let mut reader = RowReader::of_lines(file)?;
    match reader.next_row()? {
        Some((_, first)) if is_sample(&first) => {}
        _ => return Ok(RowFormat::Lines),
    }
    let mut reader = RowReader::of_lines(file)?;
    let fault = |number, fault: RowFault| fault.into_error(&file.path, place(number, true));
    Samples::of_rows(|| reader.next_row(), delimiter, fault).map(RowFormat::Samples)
}

impl ParsedRows<'_> {
    /// The next row, which has the kind of the first; `None` after the last one.
    ///
    /// # Errors
    /// The file cannot be read; a bad row.
    pub(super) fn next_row(&mut self) -> Result<Option<ParsedRow>> {
        let Some(parsed) = self.read_row()? else { return Ok(None) };
        let (kind, first) = (parsed.row.content.kind(), self.data.kind);
        if kind != first {
            let problem =
                format!("the row is a {}, and those before are each a {}", kind.name(), first.name());
            let fault = RowFault::new(problem, "write a file for each kind");
            return Err(fault.into_error(self.data.path(), self.data.place(parsed.number)));
        }
        Ok(Some(parsed))
    }

    /// The number of rows so far that were left out: examples of BIG-bench that are equal or have no choices,
    /// and samples of lm-eval under a second filter.
    pub(super) fn left_out(&self) -> u64 {
        self.left_out
    }

    fn read_row(&mut self) -> Result<Option<ParsedRow>> {
        while let Some((number, row)) = self.reader.next_row()? {
            let parsed = match &self.data.format {
                RowFormat::Lines => read_row(&row).map(Some),
                RowFormat::BigBench(task, _) => task.read_example(&row, &mut self.seen),
                RowFormat::Samples(samples) => samples.read_sample(&row),
            };
            let parsed =
                parsed.map_err(|fault| fault.into_error(self.data.path(), self.data.place(number)))?;
            match parsed {
                Some(row) => return Ok(Some(ParsedRow { number, row })),
                None => self.left_out += 1,
            }
        }
        Ok(None)
    }
}
