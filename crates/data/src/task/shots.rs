//! Few-shot examples: the first rows of a file that are not the row itself.

use std::borrow::Cow;
use std::path::PathBuf;

use super::content::RowContent;
use super::fault::{RowFault, RowResult};
use super::parsed_rows::TaskData;
use crate::error::{DataError, Result};

/// Maximum size of the examples of a row, in bytes of text.
const MAX_BYTES: usize = 16 << 20;

/// Few-shot examples.
#[derive(Debug, Default)]
pub(super) struct Shots {
    /// Number of examples before a row.
    count: usize,
    /// As many rows as leave `count` without those that equal one of them, if there are as many.
    examples: Vec<RowContent>,
    /// The file, for messages.
    path: PathBuf,
}

impl Shots {
    /// The first rows of a file of examples.
    ///
    /// # Errors
    /// Those of its rows; fewer rows than `count`.
    pub(super) fn read(data: &TaskData, count: usize) -> Result<Shots> {
        let mut examples: Vec<RowContent> = Vec::new();
        let (mut bytes, mut most_equal) = (0, 0);
        let mut rows = data.rows()?;
        while examples.len() < count + most_equal {
            let Some(parsed) = rows.next_row()? else { break };
            let example = parsed.row.content;
            let (question, answer) = example.question_and_answer();
            bytes += question.len() + answer.len();
            if bytes > MAX_BYTES {
                let problem = format!("the examples have more than {} MiB", MAX_BYTES >> 20);
                return Err(DataError::corrupt(data.path(), problem, "take fewer or shorter ones"));
            }
            most_equal = most_equal.max(1 + examples.iter().filter(|other| **other == example).count());
            examples.push(example);
        }
        if examples.len() < count {
            let problem = format!("has {} rows, fewer than the {count} examples (shots)", examples.len());
            return Err(DataError::corrupt(data.path(), problem, "lower shots, or add rows"));
        }
        Ok(Shots { count, examples, path: data.path().to_path_buf() })
    }

    /// The examples of a row, in order.
    pub(super) fn of_row(&self, row: &RowContent) -> RowResult<Cow<'_, [RowContent]>> {
        if !self.examples.contains(row) {
            return Ok(Cow::Borrowed(&self.examples[..self.count]));
        }
        let others: Vec<RowContent> =
            self.examples.iter().filter(|other| *other != row).take(self.count).cloned().collect();
        if others.len() < self.count {
            let problem = format!(
                "{} of the {} examples in {} are the row itself, and the rest is fewer than {} (shots)",
                self.examples.len() - others.len(),
                self.examples.len(),
                self.path.display(),
                self.count
            );
            return Err(RowFault::new(problem, "lower shots, or add examples"));
        }
        Ok(Cow::Owned(others))
    }
}
