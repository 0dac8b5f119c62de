//! Rows that cannot be read as documents, and how many of them are skipped.

use std::fmt;

use crate::error::{DataError, Result};

/// Number of bad rows that are described.
const EXAMPLES: usize = 3;

/// Advice on bad rows, after the advice on the row itself.
pub(super) const SKIPPING: &str =
    "skip up to N such rows with data.skip_bad_rows = N (tokenize and eval: --skip-bad-rows N)";

/// Failure to read the next piece.
pub(super) enum ReadError {
    /// A row cannot be read; the reader goes on with the next one.
    Row(DataError),
    /// The rest of the file cannot be read.
    File(DataError),
}

impl From<DataError> for ReadError {
    fn from(error: DataError) -> Self {
        ReadError::File(error)
    }
}

/// The bad rows of a source, which has one or several files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BadRows {
    limit: u64,
    count: u64,
    /// The first ones that this process read: file, place and problem.
    examples: Vec<String>,
}

impl BadRows {
    /// Of a source in which up to `limit` bad rows are skipped; `count` of them were before.
    pub(crate) fn new(limit: u64, count: u64) -> BadRows {
        BadRows { limit, count, examples: Vec::new() }
    }

    /// Number of bad rows that were skipped.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Counts a bad row.
    ///
    /// # Errors
    /// There are more than may be skipped.
    pub(super) fn skip(&mut self, error: DataError) -> Result<()> {
        if self.limit == 0 {
            return Err(error);
        }
        self.count += 1;
        if self.examples.len() < EXAMPLES {
            let example = match error {
                DataError::Input { path, location, problem, .. } => {
                    format!("{}, {location} ({problem})", path.display())
                }
                other => other.to_string(),
            };
            self.examples.push(example);
        }
        if self.count <= self.limit {
            return Ok(());
        }
        Err(DataError::invalid(
            format!("more bad rows than may be skipped ({}): {}", self.limit, self.examples.join("; ")),
            "repair or remove them, or raise data.skip_bad_rows (tokenize and eval: --skip-bad-rows)",
        ))
    }
}

impl fmt::Display for BadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = if self.count == 1 { "bad row is" } else { "bad rows are" };
        write!(f, "{} {rows} skipped", self.count)?;
        let examples = self.examples.join("; ");
        match self.examples.len() as u64 {
            0 => Ok(()),
            described if described < self.count => write!(f, ", for example {examples}"),
            _ => write!(f, ": {examples}"),
        }
    }
}
