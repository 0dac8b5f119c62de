//! Generated answers: the text that a model generates greedily after the context of a row, and whether the
//! answer in it is the right one. The rules are lm-eval's (`HFLM.generate_until`, lm-eval 0.4.13); those of
//! tokens, stop strings and expressions are in `data::task`.
//!
//! One sequence is generated at a time, from an empty cache, so an answer depends on its row and the model
//! alone. Ranks share the rows of a window, and exchange what they have generated after each.
//!
//! Deviations: generation ends at every stop token of the tokenizer's files, and settings that a model's
//! `generation_config.json` has for sampling are not used, `repetition_penalty` included.

use crate::checked::CheckedTask;
use crate::error::EvaluationError;
use crate::exchange::Exchange;
use crate::score::{Begun, ScoredModel, broken};
use std::ops::ControlFlow;
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{EncodedPrompt, GenerationRules, StopStrings, TaskRow};
use xtrain_data::{DataError, Tokenizer};
use xtrain_report::scores::{RowScores, ScoresHeader};
use xtrain_step::error::LearnError;
use xtrain_step::generate::{Generator, Sampling};
use xtrain_step::weights::Weights;

/// Rows of each rank in a window, if there are several ranks: they wait for each other at its end.
const ROWS_OF_RANK: usize = 4;

/// Maximum size of a text in files of scores, in bytes.
const STORED_BYTES: usize = 4 << 10;

/// True if a text in a file of scores is not just the beginning of a longer one.
pub(crate) fn is_whole(text: &str) -> bool {
    // One that was cut may lack the bytes of a character.
    text.len() + 4 <= STORED_BYTES
}

const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

/// Number of tokens of the longest row with generated answers, context and maximum of new tokens together;
/// `None` if no task has such rows.
///
/// # Errors
/// A row that cannot be encoded; a maximum that leaves no room for a context.
pub fn answer_tokens(
    tasks: &[CheckedTask],
    tokenizer: &Tokenizer,
    prompts: Option<&ChatPrompts<'_>>,
    context: usize,
) -> Result<Option<usize>, EvaluationError> {
    let mut longest = None;
    for task in tasks {
        let Some(rules) = task.task.generation() else { continue };
        let most = prompt_tokens(task, rules, context)?;
        for row in task.read(prompts)? {
            let prompt = task.task.encode_prompt(tokenizer, &row?, most)?;
            longest = longest.max(Some(prompt.tokens.len() + rules.max_tokens));
        }
    }
    Ok(longest)
}

/// A generator for rows of at most `tokens` tokens. The bits of an answer do not depend on that number.
///
/// # Errors
/// Too little memory for the cache.
pub fn answer_generator(weights: &mut Weights, tokens: usize) -> Result<Generator, EvaluationError> {
    // A cache that is smaller than a chunk of a prompt would make smaller chunks.
    let chunk = weights.engine().busy_rows();
    Ok(Generator::new(weights, tokens.max(chunk))?)
}

/// Maximum number of tokens of a context.
fn prompt_tokens(
    task: &CheckedTask,
    rules: &GenerationRules,
    context: usize,
) -> Result<usize, EvaluationError> {
    context.checked_sub(rules.max_tokens).filter(|&room| room > 0).ok_or_else(|| {
        EvaluationError::Refused(format!(
            "{}: answers of {} tokens leave no room for a question, because the model reads {context}; lower max_tokens \
             in the task file, or take a model with a longer context",
            task.task.path().display(),
            rules.max_tokens
        ))
    })
}

/// Generates the answers of `task` from where `begun` is. The result is that of [`ScoredModel::scores`].
pub(crate) fn answer(
    model: &mut ScoredModel<'_>,
    task: &CheckedTask,
    rules: &GenerationRules,
    header: &ScoresHeader,
    begun: Begun,
    exchange: &Exchange<'_>,
    on_progress: &mut dyn FnMut(u64) -> ControlFlow<()>,
) -> Result<Option<Vec<RowScores>>, EvaluationError> {
    let Some(generator) = model.generator.as_deref_mut() else {
        return Err(EvaluationError::Refused(format!(
            "{}: generated answers are scored by `xtrain eval` only",
            task.task.path().display()
        )));
    };
    let room = prompt_tokens(task, rules, model.weights.model().context())?;
    let stops = StopStrings::new(model.tokenizer, &rules.until)?;
    let (tokenizer, weights) = (model.tokenizer, &mut *model.weights);
    let mut writer = AnswerWriter { generator, weights, tokenizer, task, rules, stops, room };
    let Begun { writer: mut file, mut scores, done } = begun;
    let rank = exchange.rank();
    let mut rows = task.read(model.prompts)?;
    for row in rows.by_ref().take(done) {
        row?;
    }
    let mut first = done;
    loop {
        let most = if exchange.is_alone() { 1 } else { rank.world_size * ROWS_OF_RANK };
        let window: Vec<TaskRow> = rows.by_ref().take(most).collect::<Result<_, DataError>>()?;
        if window.is_empty() {
            break;
        }
        let mut own = Vec::new();
        for row in window.iter().skip(rank.index).step_by(rank.world_size) {
            match writer.answer(row, &mut || on_progress(first as u64))? {
                Some(answer) => own.push(answer),
                None if exchange.is_alone() => return Ok(None),
                None => break,
            }
        }
        // A rank that was asked to stop has too few answers. All learn of it here.
        let all = exchange.all(own.iter().flat_map(WrittenAnswer::words).collect())?;
        let mut of_ranks: Vec<_> =
            all.iter().map(|words| WrittenAnswer::read_all(words).into_iter()).collect();
        let answers = (0..window.len()).map(|row| of_ranks[row % rank.world_size].next());
        let Some(answers) = answers.collect::<Option<Vec<WrittenAnswer>>>() else { return Ok(None) };
        let mut new = Vec::with_capacity(window.len());
        for (row, answer) in window.iter().zip(answers) {
            if let Verdict::Broken(logit) = answer.verdict {
                return Err(broken(task, header, row.row, vec![logit.into()]));
            }
            new.push(of_row(row, answer));
        }
        first += window.len();
        if rank.is_first() {
            if let Some(file) = &mut file {
                file.append(&new)?;
            }
            scores.extend(new);
        }
    }
    task.check_unchanged(model.prompts)?;
    if let Some(file) = file {
        file.finish()?;
    }
    Ok(Some(scores))
}

/// Generates answers to the rows of a task.
struct AnswerWriter<'a> {
    generator: &'a mut Generator,
    weights: &'a mut Weights,
    tokenizer: &'a Tokenizer,
    task: &'a CheckedTask,
    rules: &'a GenerationRules,
    stops: StopStrings<'a>,
    /// Maximum number of tokens of a context.
    room: usize,
}

impl AnswerWriter<'_> {
    /// The answer to a row; `None` if `check` breaks.
    fn answer(
        &mut self,
        row: &TaskRow,
        check: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<WrittenAnswer>, EvaluationError> {
        if check().is_break() {
            return Ok(None);
        }
        let AnswerWriter { generator, weights, tokenizer, task, rules, stops, room } = self;
        let EncodedPrompt { tokens: prompt, truncated } = task.task.encode_prompt(tokenizer, row, *room)?;
        let (mut tokens, mut failed, mut is_stopped) = (Vec::new(), None, false);
        let mut each = |token| {
            tokens.push(token);
            match stops.is_reached(&tokens) {
                Ok(false) => {
                    is_stopped = check().is_break();
                    if is_stopped { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                }
                Ok(true) => ControlFlow::Break(()),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        generator.reset();
        let stop = tokenizer.stop_tokens();
        let made = generator
            .generate(weights, &prompt, rules.max_tokens, GREEDY, stop, &mut |made| each(made.token));
        let (truncated, generated) = (truncated as u64, tokens.len() as u64);
        match made {
            Err(LearnError::Logits(logit)) => {
                let verdict = Verdict::Broken(logit);
                return Ok(Some(WrittenAnswer {
                    verdict,
                    tokens: generated,
                    truncated,
                    text: String::new(),
                }));
            }
            made => made?,
        };
        if let Some(error) = failed {
            return Err(error.into());
        }
        if is_stopped {
            return Ok(None);
        }
        let mut text = stops.text(&tokens)?;
        let verdict = if task.task.is_right(row, &text)? { Verdict::Right } else { Verdict::Wrong };
        text.truncate(text.floor_char_boundary(STORED_BYTES));
        Ok(Some(WrittenAnswer { verdict, tokens: generated, truncated, text }))
    }
}

/// A generated answer.
#[derive(Debug, Clone, PartialEq)]
struct WrittenAnswer {
    verdict: Verdict,
    /// Number of generated tokens.
    tokens: u64,
    /// Tokens that were cut off the beginning of the context.
    truncated: u64,
    /// The beginning of the text.
    text: String,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Verdict {
    Wrong,
    Right,
    /// A logit that is no finite number.
    Broken(f32),
}

impl WrittenAnswer {
    /// The answer as words.
    fn words(&self) -> Vec<u64> {
        let (verdict, logit) = match self.verdict {
            Verdict::Wrong => (0, 0),
            Verdict::Right => (1, 0),
            Verdict::Broken(logit) => (2, logit.to_bits()),
        };
        let bytes = self.text.as_bytes();
        let mut words = vec![verdict, logit.into(), self.tokens, self.truncated, bytes.len() as u64];
        words.extend(bytes.chunks(size_of::<u64>()).map(|chunk| {
            let mut word = [0; size_of::<u64>()];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_le_bytes(word)
        }));
        words
    }

    /// The answers of a message of [`WrittenAnswer::words`].
    fn read_all(mut words: &[u64]) -> Vec<WrittenAnswer> {
        let mut answers = Vec::new();
        while let [verdict, logit, tokens, truncated, length, rest @ ..] = words {
            let length = *length as usize;
            let (text, after) = rest.split_at(length.div_ceil(size_of::<u64>()).min(rest.len()));
            let bytes: Vec<u8> = text.iter().flat_map(|word| word.to_le_bytes()).take(length).collect();
            let verdict = match verdict {
                0 => Verdict::Wrong,
                1 => Verdict::Right,
                _ => Verdict::Broken(f32::from_bits(*logit as u32)),
            };
            let text = String::from_utf8_lossy(&bytes).into_owned();
            answers.push(WrittenAnswer { verdict, tokens: *tokens, truncated: *truncated, text });
            words = after;
        }
        answers
    }
}

/// The numbers of a row.
fn of_row(row: &TaskRow, answer: WrittenAnswer) -> RowScores {
    let WrittenAnswer { verdict, tokens, truncated, text } = answer;
    RowScores {
        row: row.row,
        id: row.id.clone(),
        cluster: row.cluster.clone(),
        tokens: vec![tokens],
        truncated: if truncated > 0 { vec![truncated] } else { Vec::new() },
        answer: Some(text),
        exact_match: Some(verdict == Verdict::Right),
        ..RowScores::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_the_same_after_a_message() {
        let answer =
            |verdict, text: &str| WrittenAnswer { verdict, tokens: 3, truncated: 1, text: text.to_owned() };
        let answers = [
            answer(Verdict::Right, ""),
            answer(Verdict::Wrong, "naïve 東京"),
            answer(Verdict::Broken(f32::INFINITY), ""),
            answer(Verdict::Wrong, "12345678"),
        ];
        let words: Vec<u64> = answers.iter().flat_map(WrittenAnswer::words).collect();
        assert_eq!(WrittenAnswer::read_all(&words), answers);
    }
}
