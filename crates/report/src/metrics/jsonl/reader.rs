//! Reader of `metrics.jsonl`, line by line, for any content.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::{MAX_LINE_BYTES, wire};
use crate::metrics::{MetricsError, Record};

/// The records of a metrics file, in order. Memory does not grow with the file.
///
/// A line that is not a record is an item of its own, so one bad line hides no other.
pub struct Reader<R> {
    lines: Lines<R>,
    path: PathBuf,
}

/// A line that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadLine {
    /// Its number, counted from 1.
    pub line: u64,
    /// Reason why the line is bad.
    pub reason: String,
    /// True for a last line without its line end: a process died while writing it.
    pub torn: bool,
}

impl Reader<BufReader<File>> {
    /// Opens the file at `path`.
    pub fn open(path: &Path) -> Result<Self, MetricsError> {
        let file = xtrain_config::files::open(path).map_err(MetricsError::io("open metrics", path))?;
        Ok(Self::new(BufReader::with_capacity(1 << 16, file), path))
    }
}

impl<R: BufRead> Reader<R> {
    /// Reads from `source`; errors name `path`.
    pub fn new(source: R, path: &Path) -> Self {
        Self { lines: Lines::new(source), path: path.to_owned() }
    }
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Result<Record, BadLine>, MetricsError>;

    /// The next line that is not blank. The outer error is a failed read and ends the iteration.
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let line = match self.lines.next_line() {
                Ok(line) => line?,
                Err(source) => return Some(Err(MetricsError::io("read metrics", &self.path)(source))),
            };
            if line.content.is_some_and(|content| content.trim_ascii().is_empty()) {
                continue;
            }
            let record = match line.content {
                Some(content) => wire::decode(content),
                None => Err(format!("longer than {MAX_LINE_BYTES} bytes")),
            };
            let (number, torn) = (line.number, !line.ended);
            return Some(Ok(record.map_err(|reason| BadLine { line: number, reason, torn })));
        }
    }
}

/// The lines of a file, none longer than [`MAX_LINE_BYTES`] in memory.
pub(super) struct Lines<R> {
    source: R,
    buffer: Vec<u8>,
    number: u64,
    failed: bool,
}

/// One line.
pub(super) struct RawLine<'a> {
    /// Its number, counted from 1.
    pub(super) number: u64,
    /// Its bytes without the line end; `None` if there are too many.
    pub(super) content: Option<&'a [u8]>,
    /// True if the line end is present.
    pub(super) ended: bool,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Self { source, buffer: Vec::new(), number: 0, failed: false }
    }

    /// The next line, or `None` at the end of the file and after an error.
    pub(super) fn next_line(&mut self) -> io::Result<Option<RawLine<'_>>> {
        if self.failed {
            return Ok(None);
        }
        match self.read_line() {
            Ok(None) => Ok(None),
            Ok(Some((ended, whole))) => {
                self.number += 1;
                let content = &self.buffer[..self.buffer.len() - usize::from(ended && whole)];
                Ok(Some(RawLine { number: self.number, content: whole.then_some(content), ended }))
            }
            Err(error) => {
                self.failed = true;
                Err(error)
            }
        }
    }

    /// Fills the buffer with the next line; returns true for a line end that is present, and true for a line
    /// that fitted.
    fn read_line(&mut self) -> io::Result<Option<(bool, bool)>> {
        self.buffer.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.source.by_ref().take(limit).read_until(b'\n', &mut self.buffer)? == 0 {
            return Ok(None);
        }
        if self.buffer.ends_with(b"\n") {
            return Ok(Some((true, true)));
        }
        if self.buffer.len() as u64 != limit {
            return Ok(Some((false, true)));
        }
        let ended = loop {
            let chunk = self.source.fill_buf()?;
            if chunk.is_empty() {
                break false;
            }
            if let Some(at) = chunk.iter().position(|&byte| byte == b'\n') {
                self.source.consume(at + 1);
                break true;
            }
            let length = chunk.len();
            self.source.consume(length);
        };
        Ok(Some((ended, false)))
    }
}
