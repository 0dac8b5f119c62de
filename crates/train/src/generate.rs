//! Generation: prefill in chunks, then one token at a time over a key/value cache.
//!
//! Invariant: no token is ever at a position past the model's context, which it has not learned to read. Where the context is full, the
//! older half is forgotten and the newer half read again from position 0, so that what follows is what a fresh prompt of it would give.

use crate::programs;
use crate::weights::{LearnError, Weights};
use std::ops::ControlFlow;
use xtrain_model::decoder::{Batch, Context, io};
use xtrain_runtime::{Part, ProgramId};
use xtrain_tensor::{DType, Philox};

/// Tokens of the prompt that one prefill run takes.
const PREFILL_TOKENS: usize = 64;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Only the k likeliest tokens are drawn from; 0 for all.
    pub top_k: usize,
    /// Only the likeliest tokens whose probabilities reach this sum are drawn from; 1 for all.
    pub top_p: f64,
    /// Makes the draws repeatable.
    pub seed: u64,
}

/// A token that was made, and what it was chosen from.
#[derive(Clone, Copy, Debug)]
pub struct MadeToken<'a> {
    /// Its id.
    pub token: u32,
    /// The logits after everything before it, one a row of the vocabulary.
    pub logits: &'a [f32],
}

/// A model loaded for generation: one sequence at a time.
pub struct Generator {
    prefill: ProgramId,
    decode: ProgramId,
    capacity: usize,
    vocab_size: usize,
    logits: DType,
    /// The tokens in the cache, each at its index as position.
    held: Vec<u32>,
}

impl Generator {
    /// Loads prefill and decode over `weights`, for `tokens` of prompt and continuation together or the model's context, whichever is less.
    pub fn new(weights: &mut Weights, tokens: usize) -> Result<Self, LearnError> {
        let capacity = tokens.clamp(1, weights.model().max_position_embeddings.max(1));
        // Padding of the last prefill chunk is written behind the prompt.
        let context = Context::Cache { capacity: capacity + PREFILL_TOKENS };
        let mut load = |seq_len| {
            let batch = Batch { sequences: 1, seq_len };
            let program = programs::logits(weights.model(), weights.recipe(), batch, context, 1)?;
            weights.load(program).map_err(|e| e.advising("ask for fewer tokens, or use a smaller model"))
        };
        let (prefill, decode) = (load(PREFILL_TOKENS)?, load(1)?);
        let logits = weights.recipe().precision().compute;
        let vocab_size = weights.model().vocab_size;
        Ok(Generator { prefill, decode, capacity, vocab_size, logits, held: Vec::new() })
    }

    /// The tokens that the next one is made from, oldest first.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    /// Appends `tokens` and returns the logits after the last of them, one a row of the vocabulary. Where they do not fit, only the newest
    /// half of the capacity is kept of all tokens, and read again from position 0.
    ///
    /// # Panics
    /// If `tokens` is empty.
    pub fn append(&mut self, weights: &mut Weights, tokens: &[u32]) -> Result<Vec<f32>, LearnError> {
        assert!(!tokens.is_empty(), "there are no logits before the first token");
        if self.held.len() + tokens.len() <= self.capacity {
            return self.read(weights, tokens);
        }
        let mut kept = std::mem::take(&mut self.held);
        kept.extend(tokens);
        kept.drain(..kept.len() - self.capacity.div_ceil(2));
        self.read(weights, &kept)
    }

    /// Reads tokens that fit.
    fn read(&mut self, weights: &mut Weights, tokens: &[u32]) -> Result<Vec<f32>, LearnError> {
        let engine = weights.engine();
        let mut logits = Vec::new();
        for chunk in tokens.chunks(PREFILL_TOKENS) {
            let (id, width) =
                if chunk.len() == 1 { (self.decode, 1) } else { (self.prefill, PREFILL_TOKENS) };
            let mut ids = vec![0i32; width];
            ids.iter_mut().zip(chunk).for_each(|(i, &t)| *i = t as i32);
            let first = self.held.len();
            let positions: Vec<i32> = (first..first + width).map(|p| p as i32).collect();
            engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&ids))?;
            engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&positions))?;
            engine.write_input(id, io::ROWS, bytemuck::bytes_of(&(chunk.len() as i32 - 1)))?;
            engine.run(id, Part::Whole)?;
            self.held.extend(chunk);
            logits = engine.outputs(id)?.get(io::LOGITS)?.to_vec();
        }
        let ty = xtrain_tensor::TensorType::new(self.logits, [self.vocab_size]);
        let mut host = xtrain_tensor::HostTensor::zeros(ty);
        host.bytes_mut().copy_from_slice(&logits);
        Ok(host.to_f64().into_iter().map(|x| x as f32).collect())
    }
}

impl Generator {
    /// Continues `prompt` by at most `max_tokens` tokens, ending before one of `stop`; each token is also given to `on_token`, which may
    /// end it. Returns the new tokens.
    ///
    /// # Errors
    /// Logits that are not finite: the model is broken, and sampling from it would be noise.
    pub fn generate(
        &mut self,
        weights: &mut Weights,
        prompt: &[u32],
        max_tokens: usize,
        sampling: Sampling,
        stop: &[u32],
        on_token: &mut dyn FnMut(MadeToken<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, LearnError> {
        let mut made = Vec::new();
        if max_tokens == 0 {
            return Ok(made);
        }
        let mut logits = self.append(weights, prompt)?;
        loop {
            if let Some(bad) = logits.iter().find(|x| !x.is_finite()) {
                return Err(LearnError::Logits(*bad));
            }
            let token = sampling.choose(&logits, made.len() as u64);
            if stop.contains(&token) {
                return Ok(made);
            }
            made.push(token);
            let asked_to_end = on_token(MadeToken { token, logits: &logits }).is_break();
            if asked_to_end || made.len() == max_tokens {
                return Ok(made);
            }
            logits = self.append(weights, &[token])?;
        }
    }
}

impl Sampling {
    /// The token chosen from `logits` (the first `vocab` of them) as the `index`-th draw.
    pub fn choose(&self, logits: &[f32], index: u64) -> u32 {
        let best =
            || (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0) as u32;
        if self.temperature <= 0.0 {
            return best();
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let Some(&first) = order.first() else { return 0 };
        let weight = |&i: &usize| (f64::from(logits[i] - logits[first]) / self.temperature).exp();
        let mut weights: Vec<f64> = order.iter().map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut reached = 0.0;
        let kept = weights.iter().position(|w| {
            reached += w / total;
            reached >= self.top_p
        });
        weights.truncate(kept.map_or(weights.len(), |k| k + 1));
        let mut draw =
            f64::from(Philox::new(self.seed, SAMPLE_STREAM, 0).uniform(index)) * weights.iter().sum::<f64>();
        for (w, &token) in weights.iter().zip(&order) {
            draw -= w;
            if draw < 0.0 {
                return token as u32;
            }
        }
        best()
    }
}

/// The Philox stream of sampling.
const SAMPLE_STREAM: u32 = u32::MAX - 1;

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 5 };

    fn shares(s: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        (0..20_000).for_each(|i| counts[s.choose(logits, i) as usize] += 1.0 / 20_000.0);
        counts
    }

    #[test]
    fn draws_follow_the_softmax() {
        let logits = [0.0f32, (2.0f32).ln(), (5.0f32).ln()];
        let found = shares(PLAIN, &logits);
        for (f, e) in found.iter().zip([1.0 / 8.0, 2.0 / 8.0, 5.0 / 8.0]) {
            assert!((f - e).abs() < 0.02, "{found:?}");
        }
        // Temperature 1/2 squares the odds.
        let found = shares(Sampling { temperature: 0.5, ..PLAIN }, &logits);
        assert!((found[2] - 25.0 / 30.0).abs() < 0.02, "{found:?}");
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [0.0f32, (2.0f32).ln(), (5.0f32).ln()];
        assert_eq!(shares(Sampling { top_k: 2, ..PLAIN }, &logits)[0], 0.0);
        assert_eq!(
            shares(Sampling { top_p: 0.6, ..PLAIN }, &logits),
            [0.0, 0.0, shares(Sampling { top_k: 1, ..PLAIN }, &logits)[2]]
        );
        assert_eq!(shares(Sampling { top_p: 0.7, ..PLAIN }, &logits)[0], 0.0);
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_likeliest() {
        assert_eq!(Sampling { temperature: 0.0, ..PLAIN }.choose(&[1.0, 3.0, 3.0, 2.0], 0), 1);
    }
}
