//! Tasks whose rows have all been read.

use crate::error::TaskError;
use crate::score::length;
use std::collections::BTreeSet;
use xtrain_data::Tokenizer;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{RowKind, Task, TaskRows, TaskSummary};
use xtrain_step::scoring::ScoredShape;

/// A task whose rows have all been read, and the number of them that are scored.
#[derive(Debug)]
pub struct CheckedTask {
    /// The task.
    pub task: Task,
    /// What all of its rows say.
    pub summary: TaskSummary,
    /// Score only so many rows, the first ones.
    pub limit: Option<u64>,
}

impl CheckedTask {
    /// Reads all rows of `task`. `prompts` render the contexts of a task in a chat template.
    ///
    /// # Errors
    /// The first bad row; a task in a chat template without `prompts`; generated answers, which are not
    /// scored yet.
    pub fn new(
        task: Task,
        prompts: Option<&ChatPrompts<'_>>,
        limit: Option<u64>,
    ) -> Result<CheckedTask, TaskError> {
        if task.kind() == RowKind::Generated {
            return Err(TaskError::Refused(format!(
                "{}: generated answers are not scored yet; name a task with choices or continuations",
                task.path().display()
            )));
        }
        let summary = match prompts {
            Some(prompts) => task.check_in_chat(prompts),
            None => task.check(),
        };
        Ok(CheckedTask { summary: summary?, task, limit })
    }

    /// Number of rows that are scored.
    pub fn rows(&self) -> u64 {
        self.limit.map_or(self.summary.rows, |limit| limit.min(self.summary.rows))
    }

    /// The shapes of its requests for a model that reads `context` tokens, in order.
    ///
    /// # Errors
    /// A row that cannot be encoded.
    pub fn shapes(
        &self,
        tokenizer: &Tokenizer,
        prompts: Option<&ChatPrompts<'_>>,
        context: usize,
    ) -> Result<BTreeSet<ScoredShape>, TaskError> {
        let mut shapes = BTreeSet::new();
        for row in self.read(prompts)?.take(usize::try_from(self.rows()).unwrap_or(usize::MAX)) {
            let requests = self.task.encode(tokenizer, &row?, context)?;
            shapes.extend(requests.iter().map(|request| ScoredShape::of(length(request))));
        }
        Ok(shapes)
    }

    /// Its rows, in order.
    pub(crate) fn read<'a>(
        &'a self,
        prompts: Option<&'a ChatPrompts<'a>>,
    ) -> Result<TaskRows<'a>, TaskError> {
        Ok(match prompts {
            Some(prompts) => self.task.rows_in_chat(prompts)?,
            None => self.task.rows()?,
        })
    }
}
