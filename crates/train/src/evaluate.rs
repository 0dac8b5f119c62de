//! The loss of held-out text.

use crate::error::{LearnError, RunError};
use crate::learner::{IN_FLIGHT, feed};
use crate::programs;
use crate::weights::Weights;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use xtrain_data::{Batch as TokenBatch, Validation};
use xtrain_model::decoder::{Batch, io};
use xtrain_runtime::{Part, ProgramId, Ticket};

/// The forward program of one batch shape.
#[derive(Clone, Copy, Debug)]
pub struct Evaluator {
    id: ProgramId,
    batch: Batch,
    document_mask: bool,
}

impl Evaluator {
    /// Loads the program; the logits of `chunk_tokens` tokens exist at one time.
    pub fn new(
        weights: &mut Weights,
        batch: Batch,
        document_mask: bool,
        chunk_tokens: usize,
    ) -> Result<Self, LearnError> {
        let program =
            programs::evaluation(weights.model(), weights.numerics(), batch, document_mask, chunk_tokens)?;
        Ok(Evaluator { id: weights.load(program)?, batch, document_mask })
    }

    /// Launches a batch.
    fn put(&self, weights: &mut Weights, batch: &TokenBatch) -> Result<Ticket, LearnError> {
        let engine = weights.engine();
        feed(engine, self.id, batch, self.document_mask, 1)?;
        engine.run(self.id, Part::Whole)?;
        Ok(engine.fetch(self.id)?)
    }

    /// Waits for the sum of the cross-entropies of the batch's targets, in nats.
    fn collect(&self, weights: &mut Weights, ticket: Ticket) -> Result<f64, LearnError> {
        let outputs = weights.engine().collect(ticket)?;
        Ok(bytemuck::pod_read_unaligned::<f32>(outputs.get(io::LOSS)?).into())
    }

    /// Adds the sequences of `validation` that `tally` does not contain yet. `go_on` is called before each
    /// batch; [`ControlFlow::Break`] leaves the rest for a later call, and the final sum has the same bits.
    pub fn add(
        &self,
        weights: &mut Weights,
        validation: &Validation,
        tally: &mut Tally,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, RunError> {
        let all = validation.window_count();
        if tally.of != all {
            *tally = Tally { of: all, ..Tally::default() };
        }
        let (mut next, mut ended) = (tally.sequences, ControlFlow::Continue(()));
        let mut flying = VecDeque::new();
        loop {
            if next < all && ended.is_continue() {
                ended = go_on();
            }
            let is_more = next < all && ended.is_continue();
            if is_more {
                let batch = validation.batch(next, self.batch.sequences)?;
                flying.push_back((self.put(weights, &batch)?, batch.valid_targets));
                next = all.min(next + self.batch.sequences as u64);
            }
            // Collect the oldest batch: of more than may be in flight, or of the remaining ones.
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some((ticket, targets)) = flying.pop_front()
            {
                tally.loss_sum += self.collect(weights, ticket)?;
                tally.targets += targets;
                tally.sequences = all.min(tally.sequences + self.batch.sequences as u64);
            }
            if !is_more && flying.is_empty() {
                return Ok(ended);
            }
        }
    }
}

/// State of an evaluation, small enough for a checkpoint in the middle of one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tally {
    /// Sequences of the whole evaluation. A tally with another number starts again.
    pub of: u64,
    /// Sequences added so far.
    pub sequences: u64,
    /// Their number of targets.
    pub targets: usize,
    /// Sum of the targets' cross-entropies, in nats.
    pub loss_sum: f64,
}

impl Tally {
    /// Mean cross-entropy of these targets, in nats; 0 without any.
    pub fn mean(&self) -> f64 {
        self.loss_sum / self.targets.max(1) as f64
    }
}
