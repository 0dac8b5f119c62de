//! Generation: prefill in chunks, then one token at a time over a key/value cache.
//!
//! Invariant: no token is ever at a position past the model's context, which the model has not learned to
//! read. When the context is full, the older half is dropped and the newer half is read again from position
//! 0, so the continuation is that of a fresh prompt. A sliding window is not computed: generation ends when
//! it is full.

mod sampling;

pub use sampling::Sampling;

use crate::error::LearnError;
use crate::programs;
use crate::weights::Weights;
use std::ops::ControlFlow;
use std::time::Instant;
use xtrain_model::Architecture;
use xtrain_model::decoder::{Batch, Context, io};
use xtrain_runtime::{Part, ProgramId};
use xtrain_tensor::{DType, vectorized};

/// Granularity of prefill runs, in tokens.
const PREFILL_TOKENS: usize = 64;

/// A generated token, and the logits from which it was chosen.
#[derive(Clone, Copy, Debug)]
pub struct GeneratedToken<'a> {
    /// Its id.
    pub token: u32,
    /// The logits for this position, one for each row of the vocabulary.
    pub logits: &'a [f32],
}

/// A model loaded for generation: one sequence at a time.
pub struct Generator {
    prefill: ProgramId,
    /// Tokens of one prefill run.
    prefill_tokens: usize,
    decode: ProgramId,
    capacity: usize,
    /// The element type of logits and cache.
    dtype: DType,
    /// The tokens in the cache; the index is the position.
    held: Vec<u32>,
    /// The logits after the last of them.
    logits: Vec<f32>,
    pace: Pace,
}

/// Duration of prefill and decoding.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// Tokens processed in prefill.
    pub prompt_tokens: usize,
    /// Seconds of prefill.
    pub prompt_seconds: f64,
    /// Tokens generated one at a time.
    pub tokens: usize,
    /// Seconds of generation.
    pub seconds: f64,
    /// Bytes read from memory during generation: for each token every weight, and the filled part of the
    /// cache.
    pub bytes: f64,
}

impl Pace {
    /// Tokens generated per second; `None` without any.
    pub fn tokens_per_second(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.tokens as f64 / self.seconds.max(1e-9))
    }

    /// Bytes read per second during generation; `None` without any.
    pub fn bytes_per_second(&self) -> Option<f64> {
        (self.tokens > 0).then(|| self.bytes / self.seconds.max(1e-9))
    }
}

impl Generator {
    /// Loads prefill and decode over `weights`. The capacity is `tokens` of prompt and continuation together,
    /// or [`Architecture::context`] if that is less.
    pub fn new(weights: &mut Weights, tokens: usize) -> Result<Self, LearnError> {
        let capacity = tokens.clamp(1, weights.model().context().max(1));
        let prefill_tokens = weights.engine().busy_rows().min(capacity).next_multiple_of(PREFILL_TOKENS);
        // Padding of the last prefill chunk is written after the prompt.
        let ranks = weights.layout().ranks();
        let context = Context::Cache { capacity: capacity + prefill_tokens, ranks };
        let mut load = |seq_len| {
            let batch = Batch { sequences: 1, seq_len };
            let program =
                programs::logits(weights.model(), weights.numerics(), weights.layout(), batch, context, 1)?;
            weights.load(program).map_err(|e| e.advising("ask for fewer tokens, or use a smaller model"))
        };
        let (prefill, decode) = (load(prefill_tokens)?, load(1)?);
        let dtype = weights.numerics().recipe.precision().compute;
        let (held, logits, pace) = (Vec::new(), Vec::new(), Pace::default());
        Ok(Generator { prefill, prefill_tokens, decode, capacity, dtype, held, logits, pace })
    }

    /// Durations so far.
    pub fn pace(&self) -> Pace {
        self.pace
    }

    /// The tokens in the cache, oldest first.
    pub fn held(&self) -> &[u32] {
        &self.held
    }

    /// Number of tokens that can be generated after a prompt of this length until the cache is full.
    pub fn room_after(&self, prompt_tokens: usize) -> usize {
        // The last one is not read again.
        (self.capacity + 1).saturating_sub(prompt_tokens)
    }

    /// Forgets all tokens.
    pub fn reset(&mut self) {
        self.held.clear();
    }

    /// Appends `tokens` and returns the logits after the last of them, one for each row of the vocabulary. If
    /// they do not fit, all but the newest half of the capacity is dropped, and that half is processed again
    /// from position 0.
    ///
    /// # Panics
    ///
    /// If `tokens` is empty.
    pub fn append(&mut self, weights: &mut Weights, tokens: &[u32]) -> Result<&[f32], LearnError> {
        assert!(!tokens.is_empty(), "there are no logits before the first token");
        if self.held.len() + tokens.len() <= self.capacity {
            self.read(weights, tokens)?;
        } else {
            let mut kept = std::mem::take(&mut self.held);
            kept.extend(tokens);
            kept.drain(..kept.len() - self.capacity.div_ceil(2));
            self.read(weights, &kept)?;
        }
        Ok(&self.logits)
    }

    /// Processes tokens that fit.
    fn read(&mut self, weights: &mut Weights, tokens: &[u32]) -> Result<(), LearnError> {
        let begun = Instant::now();
        let mut last = self.decode;
        for chunk in tokens.chunks(self.prefill_tokens) {
            let (id, width) =
                if chunk.len() == 1 { (self.decode, 1) } else { (self.prefill, self.prefill_tokens) };
            let share = weights.layout().share(width);
            let engine = weights.engine();
            let mut ids = vec![0i32; width];
            ids.iter_mut().zip(chunk).for_each(|(i, &t)| *i = t as i32);
            let first = self.held.len();
            let positions: Vec<i32> = (first..first + width).map(|p| p as i32).collect();
            if share.stage.is_first() {
                engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&share.of(&ids, 0)))?;
            }
            engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&positions))?;
            if share.stage.is_last() {
                engine.write_input(id, io::ROWS, bytemuck::bytes_of(&(chunk.len() as i32 - 1)))?;
            }
            engine.run(id, Part::Whole)?;
            self.held.extend(chunk);
            last = id;
        }
        let outputs = weights.engine().outputs(last)?;
        widen(self.dtype, outputs.get(io::LOGITS)?, &mut self.logits);
        let took = begun.elapsed().as_secs_f64();
        if tokens.len() == 1 {
            self.pace.tokens += 1;
            self.pace.seconds += took;
            self.pace.bytes += token_bytes(weights.model(), self.dtype, self.held.len());
        } else {
            self.pace.prompt_tokens += tokens.len();
            self.pace.prompt_seconds += took;
        }
        Ok(())
    }
}

/// Widens the numbers in `bytes` to f32.
///
/// # Panics
///
/// If no model computes in this type.
fn widen(dtype: DType, bytes: &[u8], to: &mut Vec<f32>) {
    to.resize(bytes.len() / dtype.bytes(1), 0.0);
    vectorized(|| match dtype {
        DType::F32 => to.iter_mut().zip(bytes.as_chunks().0).for_each(|(x, &b)| *x = f32::from_le_bytes(b)),
        DType::BF16 => {
            for (x, &b) in to.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_bits(u32::from(u16::from_le_bytes(b)) << 16);
            }
        }
        other => panic!("models compute in f32 and bf16, not {other}"),
    });
}

/// Bytes read for one token when the cache holds `held` tokens: every weight once (a single row of an untied
/// embedding is neglected), and the keys and values so far.
fn token_bytes(model: &Architecture, dtype: DType, held: usize) -> f64 {
    dtype.bytes(model.multiplied_parameters() + model.cached_numbers() * held) as f64
}

impl Generator {
    /// Continues `prompt` by at most `max_tokens` tokens, and ends before a token in `stop` and where the
    /// next one would need more than the model's sliding window. Each token is also passed to `on_token`,
    /// which may end the generation. Returns the new tokens.
    ///
    /// # Errors
    ///
    /// Logits that are not finite: the model is broken, and samples would be noise.
    pub fn generate(
        &mut self,
        weights: &mut Weights,
        prompt: &[u32],
        max_tokens: usize,
        sampling: Sampling,
        stop: &[u32],
        on_token: &mut dyn FnMut(GeneratedToken<'_>) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, LearnError> {
        let mut made = Vec::new();
        if max_tokens == 0 {
            return Ok(made);
        }
        self.append(weights, prompt)?;
        loop {
            let begun = Instant::now();
            if !sampling::are_finite(&self.logits) {
                let bad = self.logits.iter().find(|x| !x.is_finite());
                return Err(LearnError::Logits(bad.copied().unwrap_or(f32::NAN)));
            }
            let token = sampling.choose(&self.logits, made.len() as u64);
            self.pace.seconds += begun.elapsed().as_secs_f64();
            if stop.contains(&token) {
                return Ok(made);
            }
            made.push(token);
            let asked_to_end = on_token(GeneratedToken { token, logits: &self.logits }).is_break();
            let is_full = weights.model().window.is_some_and(|window| self.held.len() >= window);
            if asked_to_end || is_full || made.len() == max_tokens {
                return Ok(made);
            }
            self.append(weights, &[token])?;
        }
    }
}
