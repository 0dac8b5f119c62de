//! Scores of the rows of a task.
//!
//! Rows are read, encoded and scored in windows, so memory does not grow with the task but for the numbers of
//! its rows. Windows follow from the rows and the device alone: an evaluation that is continued scores the
//! same batches as one that was never interrupted.

use crate::error::TaskError;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_data::Tokenizer;
use xtrain_data::task::{EncodedRequest, Gold, Task, TaskRow, TaskRows};
use xtrain_report::scores::{RowScores, ScoresHeader, ScoresWriter};
use xtrain_step::learner::IN_FLIGHT;
use xtrain_step::scoring::{Score, ScoredLength, Scorer};
use xtrain_step::weights::Weights;

/// Batches whose tokens a window has, so that the last batch of each shape, which is not full, costs little.
const WINDOW_BATCHES: usize = 64;

/// Scores the rows of `task` that `header` counts. Lines are written to `file`, where an earlier process may
/// have left some of them. `on_progress` is called before each batch with the rows so far; if it breaks, the
/// result is `None`, and the lines written so far stay.
///
/// # Errors
/// Rows that cannot be read or encoded; generated answers, which are not scored yet; a score that is not a
/// finite number; a file of scores that is damaged or cannot be written; too little memory.
pub fn score(
    weights: &mut Weights,
    tokenizer: &Tokenizer,
    task: &Task,
    rows: TaskRows<'_>,
    header: &ScoresHeader,
    file: Option<&Path>,
    on_progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<Vec<RowScores>>, TaskError> {
    let (mut writer, mut scores) = match file {
        Some(file) => {
            let (writer, rows) = ScoresWriter::open(file, header)?;
            (Some(writer), rows)
        }
        None => (None, Vec::new()),
    };
    let (context, window_tokens) =
        (weights.model().context(), WINDOW_BATCHES * Scorer::batch_tokens(weights));
    let mut rows = rows.take(usize::try_from(header.rows).unwrap_or(usize::MAX));
    let (mut scorer, mut begun) = (Scorer::default(), 0);
    loop {
        let window = RowWindow::read(tokenizer, task, &mut rows, context, window_tokens)?;
        if window.rows.is_empty() {
            break;
        }
        let first = begun;
        begun += window.rows.len();
        if begun <= scores.len() {
            continue;
        }
        let Some(of_window) = window.score(weights, &mut scorer, &mut || on_progress(first as u64))? else {
            return Ok(None);
        };
        if let Some(broken) = of_window.iter().find(|row| row.is_broken()) {
            return Err(TaskError::NotFinite {
                task: task.name().to_owned(),
                place: task.place(broken.row),
                scores: broken.logprobs.clone(),
                model: match header.step {
                    Some(step) => format!("step {step} of {}", header.model),
                    None => header.model.clone(),
                },
            });
        }
        // Of a window that was cut by a kill, the first lines are there.
        let new = &of_window[scores.len().saturating_sub(first)..];
        if let Some(writer) = &mut writer {
            writer.append(new)?;
        }
        scores.extend_from_slice(new);
    }
    if let Some(writer) = writer {
        writer.finish()?;
    }
    Ok(Some(scores))
}

/// Some rows, encoded.
struct RowWindow {
    rows: Vec<(TaskRow, Vec<EncodedRequest>)>,
}

impl RowWindow {
    /// Reads rows of about so many tokens.
    fn read(
        tokenizer: &Tokenizer,
        task: &Task,
        rows: &mut dyn Iterator<Item = Result<TaskRow, xtrain_data::DataError>>,
        context: usize,
        tokens: usize,
    ) -> Result<RowWindow, TaskError> {
        let (mut window, mut read) = (Vec::new(), 0);
        while read < tokens
            && let Some(row) = rows.next().transpose()?
        {
            if let Gold::Answer { .. } = row.gold {
                return Err(TaskError::Refused(format!(
                    "task {}, {}: generated answers are not scored yet; name a task with choices or continuations",
                    task.name(),
                    task.place(row.row)
                )));
            }
            let encoded = task.encode(tokenizer, &row, context)?;
            read += encoded.iter().map(|request| request.tokens.len()).sum::<usize>();
            window.push((row, encoded));
        }
        Ok(RowWindow { rows: window })
    }

    /// The scores of the rows; `None` if `check` breaks.
    fn score(
        &self,
        weights: &mut Weights,
        scorer: &mut Scorer,
        check: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Vec<RowScores>>, TaskError> {
        let requests: Vec<&EncodedRequest> = self.rows.iter().flat_map(|(_, requests)| requests).collect();
        let length = |request: &&EncodedRequest| ScoredLength {
            inputs: request.tokens.len() - 1,
            targets: request.scored,
        };
        let lengths: Vec<ScoredLength> = requests.iter().map(length).collect();
        let mut scores: Vec<Option<Score>> = vec![None; requests.len()];
        let (mut flying, mut batches) = (VecDeque::new(), Scorer::batches(weights, &lengths).into_iter());
        loop {
            let next = batches.next();
            let is_more = next.is_some();
            if let Some(batch) = next {
                if check().is_break() {
                    return Ok(None);
                }
                let tokens_of = |item: usize| (requests[item].tokens.as_slice(), requests[item].scored);
                flying.push_back(scorer.launch(weights, batch, tokens_of)?);
            }
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some(oldest) = flying.pop_front()
            {
                for (item, score) in scorer.collect(weights, oldest)? {
                    scores[item] = Some(score);
                }
            }
            if !is_more && flying.is_empty() {
                break;
            }
        }
        let mut scores = scores.into_iter().flatten();
        Ok(Some(self.rows.iter().map(|(row, requests)| of_row(row, requests, &mut scores)).collect()))
    }
}

/// The numbers of a row, whose requests have the next of `scores`.
fn of_row(row: &TaskRow, requests: &[EncodedRequest], scores: &mut dyn Iterator<Item = Score>) -> RowScores {
    let scores: Vec<Score> = scores.take(requests.len()).collect();
    let truncated: Vec<u64> = requests.iter().map(|request| request.truncated as u64).collect();
    RowScores {
        row: row.row,
        id: row.id.clone(),
        cluster: row.cluster.clone(),
        gold: match row.gold {
            Gold::Choice(choice) => Some(choice),
            Gold::Greedy | Gold::Answer { .. } => None,
        },
        logprobs: scores.iter().map(|score| score.logprob).collect(),
        greedy: scores.iter().map(|score| score.is_greedy).collect(),
        tokens: requests.iter().map(|request| request.scored as u64).collect(),
        characters: row.requests.iter().map(|request| request.characters as u64).collect(),
        bytes: row.requests.iter().map(|request| request.bytes as u64).collect(),
        truncated: if truncated.iter().any(|&tokens| tokens > 0) { truncated } else { Vec::new() },
    }
}
