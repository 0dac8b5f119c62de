//! Scores of the rows of a task.
//!
//! Rows are read, encoded and scored in windows, so memory does not grow with the task but for the numbers of
//! its rows. Windows and batches follow from the rows and the device alone: an evaluation that is continued,
//! or shared by other ranks, scores the same batches as one that was never interrupted.

use crate::checked::{CheckedTask, length};
use crate::error::EvaluationError;
use crate::exchange::Exchange;
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{EncodedRequest, Gold, TaskRow};
use xtrain_data::{DataError, Tokenizer};
use xtrain_report::scores::{RowScores, ScoresHeader, ScoresWriter};
use xtrain_step::generate::Generator;
use xtrain_step::learner::IN_FLIGHT;
use xtrain_step::scored_shape::ScoredLength;
use xtrain_step::scoring::{FlyingBatch, Score, ScoredBatch, Scorer};
use xtrain_step::weights::Weights;

/// Batches whose tokens a window has, so that the last batch of each shape, which is not full, costs little.
const WINDOW_BATCHES: usize = 64;

/// A model whose scores are wanted, in one state and one precision.
pub struct ScoredModel<'a> {
    /// Its weights.
    pub weights: &'a mut Weights,
    /// Programs for them.
    pub scorer: &'a mut Scorer,
    /// A generator over the weights, for tasks with generated answers; see [`crate::answer_generator`].
    pub generator: Option<&'a mut Generator>,
    /// Its tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Its chat template, for tasks that are rendered in one.
    pub prompts: Option<&'a ChatPrompts<'a>>,
    /// Its name in files and messages.
    pub name: String,
    /// The step of the checkpoint, if it is from a run.
    pub step: Option<u64>,
}

/// The name of the model in a folder, for files and messages.
pub fn model_name(folder: &Path) -> String {
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}

/// Progress on a task that an earlier process may have begun.
pub(crate) struct Begun {
    /// The file of the scores, on rank 0 if there is to be one.
    pub(crate) writer: Option<ScoresWriter>,
    /// Scores of the first rows, on rank 0.
    pub(crate) scores: Vec<RowScores>,
    /// Number of rows that are scored.
    pub(crate) done: usize,
}

/// Scores the rows of `task` from where `begun` is. The result is that of [`ScoredModel::scores`].
pub(crate) fn score(
    model: &mut ScoredModel<'_>,
    task: &CheckedTask,
    header: &ScoresHeader,
    begun: Begun,
    exchange: &Exchange<'_>,
    on_progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<Vec<RowScores>>, EvaluationError> {
    let Begun { mut writer, mut scores, done } = begun;
    let window_tokens = WINDOW_BATCHES * model.scorer.batch_tokens();
    let mut rows = task.read(model.prompts)?;
    let mut read = 0;
    loop {
        let window = RowWindow::read(model, task, &mut rows, window_tokens)?;
        if window.rows.is_empty() {
            break;
        }
        let first = read;
        read += window.rows.len();
        if read <= done {
            continue;
        }
        let scored = window.score(model, exchange, &mut || on_progress(first as u64))?;
        let Some(of_window) = scored else { return Ok(None) };
        if let Some(row) = of_window.iter().find(|row| row.is_broken()) {
            return Err(broken(task, header, row.row, row.logprobs.clone()));
        }
        if exchange.rank().is_first() {
            // Of a window that was cut by a kill, the first lines are there.
            let new = &of_window[done.saturating_sub(first)..];
            if let Some(writer) = &mut writer {
                writer.append(new)?;
            }
            scores.extend_from_slice(new);
        }
    }
    task.check_unchanged(model.prompts)?;
    if let Some(writer) = writer {
        writer.finish()?;
    }
    Ok(Some(scores))
}

/// The error of a row whose scores are not finite numbers.
pub(crate) fn broken(
    task: &CheckedTask,
    header: &ScoresHeader,
    row: u64,
    scores: Vec<f64>,
) -> EvaluationError {
    EvaluationError::NotFinite {
        task: task.task.name().to_owned(),
        place: task.task.place(row),
        scores,
        model: match header.step {
            Some(step) => format!("step {step} of {}", header.model),
            None => header.model.clone(),
        },
    }
}

/// Some rows, encoded.
struct RowWindow {
    rows: Vec<(TaskRow, Vec<EncodedRequest>)>,
}

/// A batch of each rank.
struct Round {
    own: FlyingBatch,
    /// True if this rank asks to stop.
    stops: bool,
}

impl RowWindow {
    /// Reads rows of about so many tokens.
    fn read(
        model: &ScoredModel<'_>,
        task: &CheckedTask,
        rows: &mut dyn Iterator<Item = Result<TaskRow, DataError>>,
        tokens: usize,
    ) -> Result<RowWindow, EvaluationError> {
        let context = model.weights.model().context();
        let (mut window, mut read) = (Vec::new(), 0);
        while read < tokens
            && let Some(row) = rows.next().transpose()?
        {
            let encoded = task.task.encode(model.tokenizer, &row, context)?;
            read += encoded.iter().map(|request| request.tokens.len()).sum::<usize>();
            window.push((row, encoded));
        }
        Ok(RowWindow { rows: window })
    }

    /// The scores of the rows, on all ranks; `None` if `check` breaks on any of them.
    fn score(
        &self,
        model: &mut ScoredModel<'_>,
        exchange: &Exchange<'_>,
        check: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Vec<RowScores>>, EvaluationError> {
        let requests: Vec<&EncodedRequest> = self.rows.iter().flat_map(|(_, requests)| requests).collect();
        let lengths: Vec<ScoredLength> = requests.iter().copied().map(length).collect();
        let tokens_of = |item: usize| (requests[item].tokens.as_slice(), requests[item].scored);
        let batches = model.scorer.batches(&lengths);
        // The stages of a pipeline, and the ranks of a tensor group, score the same batches.
        let rank = model.weights.layout().ranks().data_rank(exchange.rank());
        let mut rounds = rounds(&batches, rank.world_size);
        let mut scores: Vec<Option<Score>> = vec![None; requests.len()];
        let mut flying: VecDeque<Round> = VecDeque::new();
        loop {
            let round = rounds.next();
            let is_more = round.is_some();
            if let Some(round) = round {
                let stops = check().is_break();
                if stops && exchange.is_alone() {
                    return Ok(None);
                }
                let own = round.get(rank.index).cloned();
                let own = own.unwrap_or_else(|| round[0].without_items());
                let own = model.scorer.launch(model.weights, own, tokens_of)?;
                flying.push_back(Round { own, stops });
            }
            // All ranks collect the same rounds, so they learn of a stop request at the same time.
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some(Round { own, stops }) = flying.pop_front()
            {
                let own = model.scorer.collect(model.weights, own)?;
                for words in exchange.all(message(stops, &own))? {
                    let (stops, of_rank) = read_message(&words);
                    if stops {
                        return Ok(None);
                    }
                    of_rank.for_each(|(item, score)| scores[item] = Some(score));
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

/// The batches in groups of at most so many, in order. Those of a group have the same program, so that ranks
/// that exchange weights run the same.
fn rounds(batches: &[ScoredBatch], ranks: usize) -> impl Iterator<Item = &[ScoredBatch]> {
    batches.chunk_by(|a, b| a.is_like(b)).flat_map(move |alike| alike.chunks(ranks))
}

/// The scores of a batch, as words.
fn message(stops: bool, scores: &[(usize, Score)]) -> Vec<u64> {
    let words = |&(item, Score { logprob, is_greedy }): &(usize, Score)| {
        [item as u64, logprob.to_bits(), u64::from(is_greedy)]
    };
    std::iter::once(u64::from(stops)).chain(scores.iter().flat_map(words)).collect()
}

/// The stop request and the scores of a [`message`].
fn read_message(words: &[u64]) -> (bool, impl Iterator<Item = (usize, Score)>) {
    let (stops, scores) = words.split_first().map_or((false, words), |(&stops, rest)| (stops == 1, rest));
    let scores = scores.as_chunks().0.iter().map(|&[item, logprob, greedy]| {
        (item as usize, Score { logprob: f64::from_bits(logprob), is_greedy: greedy == 1 })
    });
    (stops, scores)
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
        ..RowScores::default()
    }
}
