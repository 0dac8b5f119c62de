//! Scores of sequences: the log-probabilities of their last tokens.
//!
//! Invariant: a sequence starts at position 0 of a row of its own, in a program whose shape follows from its
//! own lengths alone. What stands in the other rows does not change its score, except where one scale of FP8
//! belongs to a whole tensor.

use crate::error::LearnError;
use crate::programs;
use crate::scored_shape::{CHUNK_TOKENS, ScoredLength, ScoredShape};
use crate::weights::Weights;
use std::collections::HashMap;
use xtrain_model::decoder::io;
use xtrain_ops::linear_cross_entropy::IGNORED;
use xtrain_runtime::{Part, ProgramId, Ticket};

/// Tokens of a batch over the rows that saturate the device.
const BUSY_TIMES: usize = 16;

/// Sequences that are scored together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScoredBatch {
    shape: ScoredShape,
    /// Rows of the batch. Those behind the items are padding.
    sequences: usize,
    /// Indices of the sequences. May be empty.
    pub items: Vec<usize>,
}

impl ScoredBatch {
    /// True if both have the same program.
    pub fn is_like(&self, other: &ScoredBatch) -> bool {
        (self.shape, self.sequences) == (other.shape, other.sequences)
    }

    /// A batch without sequences that has the same program.
    pub fn without_items(&self) -> ScoredBatch {
        ScoredBatch { items: Vec::new(), ..*self }
    }
}

/// The score of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// The sum of the log-probabilities of its targets, in nats.
    pub logprob: f64,
    /// True if each target is the likeliest token.
    pub is_greedy: bool,
}

/// A batch that has been launched.
pub struct FlyingBatch {
    /// `None` if nothing is to be computed.
    ticket: Option<Ticket>,
    batch: ScoredBatch,
    targets: Vec<usize>,
}

/// Scores sequences with the weights of a model.
#[derive(Debug)]
pub struct Scorer {
    /// Tokens of a batch, about.
    tokens: usize,
    programs: HashMap<ScoredShape, LoadedProgram>,
}

#[derive(Clone, Copy, Debug)]
struct LoadedProgram {
    id: ProgramId,
    /// True if ranks exchange weights in it, so that all run it equally often.
    is_collective: bool,
}

impl Scorer {
    /// Scores in batches of about `tokens` tokens.
    pub fn new(tokens: usize) -> Scorer {
        Scorer { tokens, programs: HashMap::new() }
    }

    /// Scores in batches that keep the device busy.
    pub fn busy(weights: &mut Weights) -> Scorer {
        Scorer::new(BUSY_TIMES * weights.engine().busy_rows())
    }

    /// Tokens of a batch, about.
    pub fn batch_tokens(&self) -> usize {
        self.tokens
    }

    /// The batches that score sequences of these lengths, a pure function of the lengths and
    /// [`Scorer::batch_tokens`].
    pub fn batches(&self, lengths: &[ScoredLength]) -> Vec<ScoredBatch> {
        let mut order: Vec<(ScoredShape, usize)> =
            lengths.iter().enumerate().map(|(item, &length)| (ScoredShape::of(length), item)).collect();
        order.sort_unstable();
        let mut batches: Vec<ScoredBatch> = Vec::new();
        for (shape, item) in order {
            match batches.last_mut() {
                Some(last) if last.shape == shape && last.items.len() < last.sequences => {
                    last.items.push(item);
                }
                _ => batches.push(ScoredBatch {
                    shape,
                    sequences: shape.sequences(self.tokens),
                    items: vec![item],
                }),
            }
        }
        batches
    }

    /// Launches a batch; `tokens_of` gives all tokens of an item, and how many of the last ones are targets.
    /// A batch without items is computed only if other ranks need this one.
    ///
    /// # Errors
    /// Too little memory for the batch.
    pub fn launch<'a>(
        &mut self,
        weights: &mut Weights,
        batch: ScoredBatch,
        tokens_of: impl Fn(usize) -> (&'a [u32], usize),
    ) -> Result<FlyingBatch, LearnError> {
        let ScoredShape { seq_len, rows } = batch.shape;
        let sequences = batch.sequences;
        let LoadedProgram { id, is_collective } = self.load(weights, batch.shape)?;
        if batch.items.is_empty() && !is_collective {
            return Ok(FlyingBatch { ticket: None, batch, targets: Vec::new() });
        }
        let mut tokens = vec![0_i32; sequences * seq_len];
        let (mut scored, mut targets) = (vec![0_i32; sequences * rows], vec![IGNORED; sequences * rows]);
        let mut counts = Vec::with_capacity(batch.items.len());
        for (sequence, &item) in batch.items.iter().enumerate() {
            let (ids, count) = tokens_of(item);
            let inputs = ids.len() - 1;
            let first = sequence * seq_len;
            for (token, &id) in tokens[first..].iter_mut().zip(&ids[..inputs]) {
                *token = id as i32;
            }
            let of_head = sequence * rows..sequence * rows + count;
            for (n, (row, target)) in
                scored[of_head.clone()].iter_mut().zip(&mut targets[of_head]).enumerate()
            {
                *row = (first + inputs - count + n) as i32;
                *target = ids[ids.len() - count + n] as i32;
            }
            counts.push(count);
        }
        let positions: Vec<i32> = (0..tokens.len()).map(|token| (token % seq_len) as i32).collect();
        let share = weights.layout().share(tokens.len());
        let stage = share.stage;
        let engine = weights.engine();
        if stage.is_first() {
            engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&share.of(&tokens, 0)))?;
        }
        engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&positions))?;
        let chunks = if stage.is_last() { scored.len().div_ceil(CHUNK_TOKENS) } else { 0 };
        for (chunk, (rows, targets)) in
            scored.chunks(CHUNK_TOKENS).zip(targets.chunks(CHUNK_TOKENS)).enumerate().take(chunks)
        {
            engine.write_input(id, &io::scored_rows(chunk), bytemuck::cast_slice(rows))?;
            engine.write_input(id, &io::scored_targets(chunk), bytemuck::cast_slice(targets))?;
        }
        engine.run(id, Part::Whole)?;
        Ok(FlyingBatch { ticket: Some(engine.fetch(id)?), batch, targets: counts })
    }

    /// Waits for a batch: the score of each of its items; of a pipeline, on the last stage alone.
    pub fn collect(
        &self,
        weights: &mut Weights,
        flying: FlyingBatch,
    ) -> Result<Vec<(usize, Score)>, LearnError> {
        let FlyingBatch { ticket, batch, targets } = flying;
        let Some(ticket) = ticket else { return Ok(Vec::new()) };
        let outputs = weights.engine().collect(ticket)?;
        if !weights.layout().stage().is_last() {
            return Ok(Vec::new());
        }
        let (mut logprobs, mut ranks) = (Vec::<f32>::new(), Vec::<i32>::new());
        let rows = batch.shape.rows;
        for chunk in 0..(batch.sequences * rows).div_ceil(CHUNK_TOKENS) {
            logprobs.extend(bytemuck::pod_collect_to_vec::<u8, f32>(outputs.get(&io::logprobs(chunk))?));
            ranks.extend(bytemuck::pod_collect_to_vec::<u8, i32>(outputs.get(&io::ranks(chunk))?));
        }
        let score = |(sequence, (&item, count)): (usize, (&usize, usize))| {
            let of_head = sequence * rows..sequence * rows + count;
            let logprob = logprobs[of_head.clone()].iter().map(|&logprob| f64::from(logprob)).sum();
            (item, Score { logprob, is_greedy: ranks[of_head].iter().all(|&rank| rank == 0) })
        };
        Ok(batch.items.iter().zip(targets).enumerate().map(score).collect())
    }

    /// Loads the program of a shape, unless it is loaded.
    ///
    /// # Errors
    /// Too little memory for it.
    pub fn prepare(&mut self, weights: &mut Weights, shape: ScoredShape) -> Result<(), LearnError> {
        self.load(weights, shape).map(drop)
    }

    fn load(&mut self, weights: &mut Weights, shape: ScoredShape) -> Result<LoadedProgram, LearnError> {
        if let Some(&loaded) = self.programs.get(&shape) {
            return Ok(loaded);
        }
        let sequences = shape.sequences(self.tokens);
        let (model, numerics, layout) = (weights.model(), weights.numerics(), weights.layout());
        let program = programs::scores(model, numerics, layout, shape, sequences)?;
        let is_collective = program.instances.iter().any(|i| i.code.op().collective().is_some());
        let loaded = LoadedProgram { id: weights.load(program)?, is_collective };
        self.programs.insert(shape, loaded);
        Ok(loaded)
    }
}
