//! Scores of a model on a task, and the file that has them.

use crate::answers::answer;
use crate::checked::CheckedTask;
use crate::error::EvaluationError;
use crate::exchange::Exchange;
use crate::model_hash::model_hash;
use crate::row_check::check_rows;
use crate::score::{Begun, ScoredModel, score};
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_data::task::PROTOCOL;
use xtrain_report::scores::{
    Earlier, RowScores, ScoresFolder, ScoresHeader, ScoresWriter, other_scores, read_scores,
};

impl ScoredModel<'_> {
    /// A hash of the model, for [`ScoredModel::header`]. All ranks call it.
    ///
    /// # Errors
    /// Weights that cannot be read; the run has ended.
    pub fn hash(&mut self, exchange: &Exchange<'_>) -> Result<String, EvaluationError> {
        model_hash(self.weights, self.tokenizer, self.scorer.batch_tokens(), exchange)
    }

    /// The first line of the file of its scores on a task.
    pub fn header(&self, task: &CheckedTask, model_hash: &str) -> ScoresHeader {
        ScoresHeader {
            task: task.task.name().to_owned(),
            hash: task.summary.hash.clone(),
            protocol: PROTOCOL,
            shots: task.task.shots() as u64,
            rows: task.rows(),
            limit: task.limit,
            metric: task.task.metric().name().to_owned(),
            chance: task.summary.chance,
            model: self.name.clone(),
            model_hash: model_hash.to_owned(),
            step: self.step,
            precision: self.weights.numerics().recipe,
        }
    }

    /// The scores of the rows of a task, in order, on rank 0; none on other ranks. They are also written to
    /// the file of `folder`, window by window. `on_progress` is called before each batch with the rows so
    /// far; if it breaks on any rank, the result is `None`, and the lines written so far stay. All ranks call
    /// it.
    ///
    /// # Errors
    /// Rows that cannot be read or encoded; a score that is not a finite number; a file of scores that is
    /// damaged, has other rows than the task, is of another model, or cannot be written; too little memory;
    /// the run has ended.
    pub fn scores(
        &mut self,
        task: &CheckedTask,
        header: &ScoresHeader,
        folder: Option<&ScoresFolder>,
        earlier: Earlier,
        exchange: &Exchange<'_>,
        on_progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Option<Vec<RowScores>>, EvaluationError> {
        let hash = u64::from_str_radix(header.hash.get(..16).unwrap_or_default(), 16).unwrap_or_default();
        let hashes = exchange.all(vec![hash])?;
        if let Some(rank) = hashes.iter().position(|of_rank| *of_rank != hashes[0]) {
            return Err(EvaluationError::Refused(format!(
                "{}: rank {rank} has another version of the task {} than rank 0; give all ranks the same files",
                task.task.path().display(),
                header.task
            )));
        }
        let mut file = None;
        let decided = exchange.of_first(|| {
            file = match folder {
                Some(folder) => {
                    let found = ScoresFile::find(folder, header, earlier)?;
                    let path = folder.file(header);
                    match &found {
                        ScoresFile::Complete(rows) => check_rows(rows, &path, task, self.prompts)?,
                        ScoresFile::Begun(_, rows) => {
                            check_rows(rows, &ScoresWriter::partial(&path), task, self.prompts)?;
                        }
                    }
                    Some(found)
                }
                None => None,
            };
            Ok(match &file {
                Some(ScoresFile::Complete(_)) => vec![],
                Some(ScoresFile::Begun(_, rows)) => vec![rows.len() as u64],
                None => vec![0],
            })
        })?;
        let (writer, scores) = match file {
            Some(ScoresFile::Complete(rows)) => return Ok(Some(rows)),
            Some(ScoresFile::Begun(writer, rows)) => (Some(writer), rows),
            None => (None, Vec::new()),
        };
        // If rank 0 has a complete file, it has sent no number.
        let Some(&done) = decided.first() else { return Ok(Some(scores)) };
        let begun = Begun { writer, scores, done: done as usize };
        match task.task.generation() {
            Some(rules) => answer(self, task, rules, header, begun, exchange, on_progress),
            None => score(self, task, header, begun, exchange, on_progress),
        }
    }
}

/// A file of scores, as it is found.
enum ScoresFile {
    Complete(Vec<RowScores>),
    /// New, or continued with the rows that it has.
    Begun(ScoresWriter, Vec<RowScores>),
}

impl ScoresFile {
    fn find(
        folder: &ScoresFolder,
        header: &ScoresHeader,
        earlier: Earlier,
    ) -> Result<ScoresFile, EvaluationError> {
        let path = folder.file(header);
        if let Some(rows) = complete(&path, header, earlier)? {
            return Ok(ScoresFile::Complete(rows));
        }
        for (hash, begun) in folder.interrupted(header) {
            if earlier == Earlier::Used {
                return Err(interrupted(folder, header, &hash));
            }
            std::fs::remove_file(&begun).map_err(EvaluationError::io(&begun, "remove"))?;
        }
        let (writer, rows) = ScoresWriter::open(&path, header, earlier)?;
        // Another process may have completed it, while this one waited for it.
        match complete(&path, header, earlier)? {
            Some(rows) => writer.abandon().map(|()| ScoresFile::Complete(rows)).map_err(Into::into),
            None => Ok(ScoresFile::Begun(writer, rows)),
        }
    }
}

/// The error of a task that has changed since an evaluation of it, whose hash begins with `hash`, was
/// interrupted.
fn interrupted(folder: &ScoresFolder, header: &ScoresHeader, hash: &str) -> EvaluationError {
    let now = header.hash.get(..hash.len()).unwrap_or(&header.hash);
    EvaluationError::Refused(format!(
        "{}: an evaluation of {} with hash {hash} was interrupted, and the task now has hash {now}; take the task as it \
         was, or begin anew with --again, or in another folder with --out",
        folder.path().display(),
        header.task
    ))
}

/// The rows of a complete file of these scores, unless it is to be replaced.
fn complete(
    path: &Path,
    header: &ScoresHeader,
    earlier: Earlier,
) -> Result<Option<Vec<RowScores>>, EvaluationError> {
    if earlier == Earlier::Replaced || !path.exists() {
        return Ok(None);
    }
    let (found, rows) = read_scores(path)?;
    match earlier {
        _ if found.is_same(header) => Ok(Some(rows)),
        Earlier::Used => Err(other_scores(path).into()),
        Earlier::UsedIfSame | Earlier::Replaced => Ok(None),
    }
}
