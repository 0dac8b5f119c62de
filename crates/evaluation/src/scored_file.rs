//! Scores of a model on a task, and the file that has them.

use crate::answers::answer;
use crate::checked::CheckedTask;
use crate::error::EvaluationError;
use crate::exchange::Exchange;
use crate::folder::ScoresFolder;
use crate::model_hash::model_hash;
use crate::score::{Begun, ScoredModel, score};
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_data::task::PROTOCOL;
use xtrain_report::scores::{RowScores, ScoresHeader, ScoresWriter, other_scores, read_header, read_scores};

/// Use of scores that an earlier evaluation has written under the same name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Earlier {
    /// Complete ones are the result, and an interrupted evaluation is continued. Scores of another model, or
    /// of a task that has changed since the interruption, are an error.
    Used,
    /// The same, but scores of another model are replaced, as those of an earlier attempt at a run.
    UsedIfSame,
    /// They are replaced.
    Replaced,
}

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
    /// damaged, of another model, or cannot be written; too little memory; the run has ended.
    pub fn scores(
        &mut self,
        task: &CheckedTask,
        header: &ScoresHeader,
        folder: Option<&ScoresFolder>,
        earlier: Earlier,
        exchange: &Exchange<'_>,
        on_progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
    ) -> Result<Option<Vec<RowScores>>, EvaluationError> {
        let mut file = None;
        let decided = exchange.of_first(|| {
            file = match folder {
                Some(folder) => Some(ScoresFile::find(folder, task, header, earlier)?),
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
        task: &CheckedTask,
        header: &ScoresHeader,
        earlier: Earlier,
    ) -> Result<ScoresFile, EvaluationError> {
        let path = folder.file(header, task.limit);
        if earlier != Earlier::Replaced && path.exists() {
            let (found, rows) = read_scores(&path)?;
            match earlier {
                _ if found == *header => return Ok(ScoresFile::Complete(rows)),
                Earlier::Used => return Err(other_scores(&path).into()),
                Earlier::UsedIfSame | Earlier::Replaced => {}
            }
        }
        let partial = ScoresWriter::partial(&path);
        let is_replaced = match earlier {
            Earlier::Replaced => true,
            Earlier::Used => false,
            Earlier::UsedIfSame => is_of_another(&partial, header),
        };
        match is_replaced {
            true => folder.forget_interrupted(header, &path)?,
            false => folder.check_interrupted(header, &path)?,
        }
        let (writer, rows) = ScoresWriter::open(&path, header)?;
        Ok(ScoresFile::Begun(writer, rows))
    }
}

/// True if the file exists and does not begin with `header`.
fn is_of_another(file: &Path, header: &ScoresHeader) -> bool {
    file.exists() && !read_header(file).is_ok_and(|found| found.is_none_or(|found| found == *header))
}
