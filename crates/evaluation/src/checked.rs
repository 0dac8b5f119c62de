//! Tasks whose rows have all been read.

use crate::error::EvaluationError;
use std::collections::BTreeMap;
use std::iter::Take;
use xtrain_data::Tokenizer;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{EncodedRequest, Task, TaskRows, TaskSummary};
use xtrain_step::scored_shape::{ScoredLength, ScoredShape};

/// A task whose rows have all been read, and the number of them that are scored.
#[derive(Debug)]
pub struct CheckedTask {
    /// The task.
    pub task: Task,
    /// The number and the hash of its rows.
    pub summary: TaskSummary,
    /// Score only so many rows, the first ones.
    pub limit: Option<u64>,
}

impl CheckedTask {
    /// Reads all rows of `task`. `prompts` render the contexts of a task in a chat template.
    ///
    /// # Errors
    /// The first bad row; a task in a chat template without `prompts`.
    pub fn new(
        task: Task,
        prompts: Option<&ChatPrompts<'_>>,
        limit: Option<u64>,
    ) -> Result<CheckedTask, EvaluationError> {
        Ok(CheckedTask { summary: CheckedTask::summary(&task, prompts)?, task, limit })
    }

    /// Fails if its files have changed since it was checked.
    ///
    /// # Errors
    /// Names both hashes; a row that is bad by now.
    pub(crate) fn check_unchanged(&self, prompts: Option<&ChatPrompts<'_>>) -> Result<(), EvaluationError> {
        let now = CheckedTask::summary(&self.task, prompts)?;
        if now.hash == self.summary.hash {
            return Ok(());
        }
        Err(EvaluationError::Refused(format!(
            "{}: the task {} changed while it was scored: its hash was {}, and is {} now; take it as it was, or begin anew",
            self.task.path().display(),
            self.task.name(),
            self.summary.hash,
            now.hash
        )))
    }

    /// Number of rows that are scored.
    pub fn rows(&self) -> u64 {
        self.limit.map_or(self.summary.rows, |limit| limit.min(self.summary.rows))
    }

    /// The rows that are scored, in order.
    pub(crate) fn read<'a>(
        &'a self,
        prompts: Option<&'a ChatPrompts<'a>>,
    ) -> Result<Take<TaskRows<'a>>, EvaluationError> {
        let rows = match prompts {
            Some(prompts) => self.task.rows_in_chat(prompts)?,
            None => self.task.rows()?,
        };
        Ok(rows.take(usize::try_from(self.rows()).unwrap_or(usize::MAX)))
    }

    /// Reads all rows.
    fn summary(task: &Task, prompts: Option<&ChatPrompts<'_>>) -> Result<TaskSummary, EvaluationError> {
        Ok(match prompts {
            Some(prompts) => task.check_in_chat(prompts)?,
            None => task.check()?,
        })
    }
}

/// The shapes of the requests of tasks for a model that reads `context` tokens, and the number of each.
/// Generated answers have none.
///
/// # Errors
/// A row that cannot be encoded.
pub fn shapes(
    tasks: &[CheckedTask],
    tokenizer: &Tokenizer,
    prompts: Option<&ChatPrompts<'_>>,
    context: usize,
) -> Result<BTreeMap<ScoredShape, u64>, EvaluationError> {
    let mut shapes = BTreeMap::new();
    for task in tasks.iter().filter(|task| task.task.generation().is_none()) {
        for row in task.read(prompts)? {
            let requests = task.task.encode(tokenizer, &row?, context)?;
            for request in &requests {
                *shapes.entry(ScoredShape::of(length(request))).or_default() += 1;
            }
        }
    }
    Ok(shapes)
}

/// Records the hashes of tasks in `hashes`, by name, and refuses one that has another hash there.
///
/// # Errors
/// Names both hashes.
pub fn check_hashes(
    tasks: &[CheckedTask],
    hashes: &mut BTreeMap<String, String>,
) -> Result<(), EvaluationError> {
    for task in tasks {
        let (name, now) = (task.task.name(), &task.summary.hash);
        let before = hashes.entry(name.to_owned()).or_insert_with(|| now.clone());
        if before != now {
            return Err(EvaluationError::Refused(format!(
                "{}: the task {name} has hash {now}, but hash {before} in the checkpoint, so its scores would be of another \
                 task; take the task as it was, or give it another `name`",
                task.task.path().display()
            )));
        }
    }
    Ok(())
}

/// The length of a request.
pub(crate) fn length(request: &EncodedRequest) -> ScoredLength {
    ScoredLength { inputs: request.tokens.len() - 1, targets: request.scored }
}
