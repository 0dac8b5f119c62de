//! The comparison of the rows of a file of scores with those of the task.

use crate::answers::is_whole;
use crate::checked::CheckedTask;
use crate::error::EvaluationError;
use std::path::Path;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{Gold, TaskRow};
use xtrain_report::scores::{RowScores, damaged};

/// Fails if `rows`, which the file at `path` has, are not the first ones of the task.
///
/// # Errors
/// Names the file, the line and what differs; a row of the task that cannot be read.
pub(crate) fn check_rows(
    rows: &[RowScores],
    path: &Path,
    task: &CheckedTask,
    prompts: Option<&ChatPrompts<'_>>,
) -> Result<(), EvaluationError> {
    for ((at, found), row) in rows.iter().enumerate().zip(task.read(prompts)?) {
        let row = row?;
        if let Some(problem) = difference(found, &row, task)? {
            // The first line is that of the task and the model.
            return Err(damaged(path, at + 2, &problem).into());
        }
    }
    Ok(())
}

/// A number of a row that is not the task's.
fn difference(
    found: &RowScores,
    row: &TaskRow,
    task: &CheckedTask,
) -> Result<Option<String>, EvaluationError> {
    let (gold, choices) = match row.gold {
        Gold::Choice(gold) => (Some(gold), row.requests.len()),
        Gold::Greedy => (None, 1),
        Gold::Answer { .. } => (None, 0),
    };
    let of_choices = || row.requests.iter().take(choices);
    let characters: Vec<u64> = of_choices().map(|request| request.characters as u64).collect();
    let bytes: Vec<u64> = of_choices().map(|request| request.bytes as u64).collect();
    let is_same = [
        ("row", found.row == row.row),
        ("id", found.id == row.id),
        ("cluster", found.cluster == row.cluster),
        ("number of choices", found.logprobs.len() == choices),
        ("gold", found.gold == gold),
        ("characters", found.characters == characters),
        ("bytes", found.bytes == bytes),
        ("exact_match", answers_agree(found, row, task)?),
    ];
    let other = is_same.into_iter().find(|(_, is_same)| !is_same);
    Ok(other.map(|(name, _)| format!("{name}: not as in {} of the task", task.task.place(row.row))))
}

/// False if the answer that was generated for a row is not as right as `exact_match` says. Of a long one only
/// the beginning is there.
fn answers_agree(found: &RowScores, row: &TaskRow, task: &CheckedTask) -> Result<bool, EvaluationError> {
    match (&found.answer, found.exact_match) {
        (Some(text), Some(is_right)) if is_whole(text) => Ok(task.task.is_right(row, text)? == is_right),
        _ => Ok(true),
    }
}
