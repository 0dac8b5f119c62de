//! Scores of a run's checkpoints that only its files of scores have, as after
//! `xtrain eval --every-checkpoint`.
//!
//! A file counts if it is complete, of all rows of its task, in the run's own precision, and of a step that
//! the run has made and reported no score of. Rows are read of these files only.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::path::Path;

use xtrain_model::Recipe;

use super::metrics::{TaskMetrics, format};
use super::scores::{ScoreFile, ScoreFiles, read_scores, task_metrics};

/// Maximum size of the files whose rows are read for a page, in bytes. Of larger ones, every second, third,
/// ... step is read.
const READ_BYTES: u64 = 512 << 20;

/// Maximum number of files that cannot be used and are listed; the others are counted.
const LISTED_PROBLEMS: usize = 3;

/// Scores that files have.
#[derive(Debug, Default)]
pub(super) struct TaskPoints {
    /// The scores, by task and step.
    pub(super) scores: Vec<TaskMetrics>,
    /// Problems in the files, one sentence each.
    pub(super) problems: Vec<String>,
}

impl TaskPoints {
    /// The scores in the files of the run in `folder`, whose recipe is `recipe`, up to `last_step`, that are
    /// not among the `reported` ones.
    pub(super) fn read(
        folder: &Path,
        recipe: Option<Recipe>,
        reported: &[TaskMetrics],
        last_step: u64,
    ) -> Self {
        Self::select(ScoreFiles::of_run(folder), recipe, reported, last_step, READ_BYTES)
    }

    /// The scores in the files that are `found`, of which at most about `most_bytes` are read.
    pub(super) fn select(
        found: ScoreFiles,
        recipe: Option<Recipe>,
        reported: &[TaskMetrics],
        last_step: u64,
        most_bytes: u64,
    ) -> Self {
        let ScoreFiles { mut files, problems } = found;
        let mut points = TaskPoints { scores: Vec::new(), problems };
        let Some(own) = recipe.or_else(|| only_precision(&files)) else {
            return points.with_few_problems();
        };
        files.retain(|file| file.header.precision == own && file.step <= last_step);
        let versions = versions(&files, reported);
        let known: HashSet<(u64, &str, &str, u64)> =
            reported.iter().map(|score| (score.step, &*score.task, &*score.metric, score.rows)).collect();
        let is_known = |file: &ScoreFile| {
            let header = &file.header;
            known.contains(&(file.step, &*header.task, &*header.metric, header.rows))
        };
        let is_shown = |file: &ScoreFile| {
            let version = versions.get(&file.header.task);
            file.header.limit.is_none() && version == Some(&file.header.hash) && !is_known(file)
        };
        files.retain(is_shown);
        points.thin(&mut files, most_bytes);
        for file in &files {
            match score(file) {
                Ok(score) => points.scores.push(score),
                Err(problem) => points.problems.push(problem),
            }
        }
        points.scores.sort_by(|a, b| (&a.task, a.step).cmp(&(&b.task, b.step)));
        points.with_few_problems()
    }

    /// Leaves the files of the last step and of every n-th one before it, if all together are too large.
    fn thin(&mut self, files: &mut Vec<ScoreFile>, most_bytes: u64) {
        let size = |file: &ScoreFile| fs::metadata(&file.path).map_or(0, |found| found.len());
        let bytes: u64 = files.iter().map(size).sum();
        let nth = bytes.div_ceil(most_bytes.max(1)).max(1);
        if nth == 1 {
            return;
        }
        let steps: BTreeSet<u64> = files.iter().map(|file| file.step).collect();
        let kept: BTreeSet<u64> = steps.into_iter().rev().step_by(nth as usize).collect();
        files.retain(|file| kept.contains(&file.step));
        self.problems.push(format!(
            "the files of scores have {}, so of their steps only one in {nth} is shown",
            format::bytes(bytes)
        ));
    }

    fn with_few_problems(mut self) -> Self {
        let more = self.problems.len().saturating_sub(LISTED_PROBLEMS);
        if more > 1 {
            self.problems.truncate(LISTED_PROBLEMS);
            self.problems.push(format!("{more} more files of scores could not be used"));
        }
        self
    }
}

/// The precision of all files, if it is one.
fn only_precision(files: &[ScoreFile]) -> Option<Recipe> {
    let first = files.first()?.header.precision;
    files.iter().all(|file| file.header.precision == first).then_some(first)
}

/// The hash of the version of each task that is shown: the one that the run itself scored, else the one with
/// most files, of equals the last.
fn versions(files: &[ScoreFile], reported: &[TaskMetrics]) -> BTreeMap<String, String> {
    let of_run: HashSet<(u64, &str)> = reported.iter().map(|score| (score.step, &*score.task)).collect();
    let mut counts: BTreeMap<(&str, &str), (bool, usize)> = BTreeMap::new();
    for file in files {
        let count = counts.entry((&file.header.task, &file.header.hash)).or_default();
        count.0 |= of_run.contains(&(file.step, &*file.header.task));
        count.1 += usize::from(file.header.limit.is_none());
    }
    let mut best: BTreeMap<String, (String, (bool, usize))> = BTreeMap::new();
    for ((task, hash), count) in counts {
        if best.get(task).is_none_or(|(_, other)| count >= *other) {
            best.insert(task.to_owned(), (hash.to_owned(), count));
        }
    }
    best.into_iter().map(|(task, (hash, _))| (task, hash)).collect()
}

/// The score in a file, or its problem.
fn score(file: &ScoreFile) -> Result<TaskMetrics, String> {
    let (header, rows) = read_scores(&file.path).map_err(|error| error.to_string())?;
    let problem = |text: &dyn std::fmt::Display| format!("{}: {text}", file.path.display());
    let score = task_metrics(&header, &rows).map_err(|error| problem(&error))?;
    score.ok_or_else(|| problem(&format!("its rows have no {}", header.metric)))
}
