//! Tasks whose rows have all been read.

use crate::error::TaskError;
use std::path::Path;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{RowKind, Task, TaskRows, TaskSummary};

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

    /// Opens the tasks and reads all of their rows. `prompts` is called if one is in a chat template.
    ///
    /// # Errors
    /// Those of [`Task::open`] and [`CheckedTask::new`].
    pub fn open_all(
        paths: &[impl AsRef<Path>],
        prompts: Option<&ChatPrompts<'_>>,
        limit: Option<u64>,
    ) -> Result<Vec<CheckedTask>, TaskError> {
        paths.iter().map(|path| CheckedTask::new(Task::open(path)?, prompts, limit)).collect()
    }

    /// Number of rows that are scored.
    pub fn rows(&self) -> u64 {
        self.limit.map_or(self.summary.rows, |limit| limit.min(self.summary.rows))
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
