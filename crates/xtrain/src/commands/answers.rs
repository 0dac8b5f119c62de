//! Answers of a model, one after another.

use super::speed::Speed;
use crate::failure::Failure;
use crate::terminal;
use std::ops::ControlFlow;
use xtrain_data::{SpecialTokens, Tokenizer};
use xtrain_step::generate::{GeneratedToken, Generator, Sampling};
use xtrain_step::weights::Weights;

/// A model that answers prompts.
pub(super) struct Answers<'m> {
    weights: &'m mut Weights,
    tokenizer: &'m Tokenizer,
    generator: Generator,
    context: usize,
}

/// An answer.
pub(super) struct ModelAnswer {
    pub(super) text: String,
    /// Number of tokens, without the one at which it stopped.
    pub(super) tokens: usize,
    pub(super) end: AnswerEnd,
}

/// The reason why an answer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerEnd {
    /// The model ended it.
    Stop,
    /// It is as long as allowed, or the context is full.
    Length,
    /// It was stopped while it was written.
    Interrupted,
}

impl<'m> Answers<'m> {
    /// Answers of `weights` in `context` tokens, which the model must support.
    pub(super) fn new(
        weights: &'m mut Weights,
        tokenizer: &'m Tokenizer,
        context: usize,
    ) -> Result<Self, Failure> {
        let generator = Generator::new(weights, context)?;
        Ok(Answers { weights, tokenizer, generator, context })
    }

    /// Number of tokens that prompt and answer may have together.
    pub(super) fn context(&self) -> usize {
        self.context
    }

    /// Forgets the last conversation. Otherwise an answer to its continuation reads only what is new.
    pub(super) fn forget(&mut self) {
        self.generator.reset();
    }

    /// Answers a prompt that is not empty and fits into the context. Each piece of text is passed to `show`,
    /// which may end the answer.
    ///
    /// # Errors
    /// Those of `show`; a token that the model does not have; logits that are not finite.
    pub(super) fn answer(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        sampling: Sampling,
        show: &mut dyn FnMut(&str) -> Result<ControlFlow<()>, Failure>,
    ) -> Result<ModelAnswer, Failure> {
        refuse_unknown(prompt, self.weights.model().vocab_size, FOREIGN)?;
        let held = self.generator.held();
        let mut new = prompt;
        match prompt.strip_prefix(held) {
            Some(rest) if !rest.is_empty() => new = rest,
            _ => self.generator.reset(),
        }
        let limit = max_tokens.min(self.generator.room_after(prompt.len()));
        let stop = self.tokenizer.stop_tokens();
        let mut decoder = self.tokenizer.stream_decoder(prompt, SpecialTokens::Hide)?;
        let (mut text, mut is_interrupted, mut failed) = (String::new(), false, None);
        let mut each = |made: GeneratedToken<'_>| {
            let piece = decoder.push(made.token).map_err(Failure::from);
            let shown = piece.and_then(|piece| {
                text.push_str(&piece);
                show(&piece)
            });
            let go_on = shown.unwrap_or_else(|failure| {
                failed = Some(failure);
                ControlFlow::Break(())
            });
            is_interrupted = go_on.is_break();
            go_on
        };
        let made = self.generator.generate(self.weights, new, limit, sampling, stop, &mut each)?;
        if let Some(failure) = failed {
            return Err(failure);
        }
        let rest = decoder.finish()?;
        text.push_str(&rest);
        let end = match () {
            () if is_interrupted => AnswerEnd::Interrupted,
            () if made.len() < limit => AnswerEnd::Stop,
            () => AnswerEnd::Length,
        };
        if !rest.is_empty() && show(&rest)?.is_break() {
            return Ok(ModelAnswer { text, tokens: made.len(), end: AnswerEnd::Interrupted });
        }
        Ok(ModelAnswer { text, tokens: made.len(), end })
    }

    /// Says how fast the answers were generated.
    pub(super) fn log_speed(&mut self) {
        let bandwidth = self.weights.engine().memory_bandwidth();
        if let Some(line) = (Speed { pace: self.generator.pace(), bandwidth }).line() {
            tracing::info!("{line}");
        }
    }
}

/// The usual cause of tokens that a model does not have.
pub(super) const FOREIGN: &str = "the tokenizer is another model's";

/// Refuses a prompt with tokens that the model does not have, and says the cause.
pub(super) fn refuse_unknown(tokens: &[u32], vocab_size: usize, cause: &str) -> Result<(), Failure> {
    match tokens.iter().find(|&&token| token as usize >= vocab_size) {
        Some(bad) => Err(Failure::user(format!(
            "the prompt has token {bad}, but the model's vocabulary has {vocab_size}: {cause}"
        ))),
        None => Ok(()),
    }
}

/// Prints a piece of an answer.
pub(super) fn print(piece: &str) -> Result<ControlFlow<()>, Failure> {
    match piece.is_empty() {
        true => Ok(ControlFlow::Continue(())),
        false => terminal::print_generated(piece),
    }
}
