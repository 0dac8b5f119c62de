//! The loss of held-out text.

use crate::programs;
use crate::run::RunError;
use crate::weights::{LearnError, Weights};
use xtrain_data::{Batch as TokenBatch, Validation};
use xtrain_model::decoder::{Batch, io};
use xtrain_program::Phase;
use xtrain_runtime::{Engine, EngineError, ProgramId};

/// The forward program of one batch shape.
#[derive(Clone, Copy, Debug)]
pub struct Evaluator {
    id: ProgramId,
    batch: Batch,
    document_mask: bool,
}

impl Evaluator {
    /// Loads the program; `chunk_tokens` is how many tokens' logits exist at one time.
    pub fn new(
        weights: &mut Weights,
        batch: Batch,
        document_mask: bool,
        chunk_tokens: usize,
    ) -> Result<Self, LearnError> {
        let program =
            programs::evaluation(weights.model(), weights.recipe(), batch, document_mask, chunk_tokens)?;
        Ok(Evaluator { id: weights.load(program)?, batch, document_mask })
    }

    /// The sum of the cross-entropies of a batch's targets, in nats.
    pub fn loss_sum(&self, weights: &mut Weights, batch: &TokenBatch) -> Result<f64, LearnError> {
        let engine = weights.engine();
        feed(engine, self.id, batch, self.document_mask, 1)?;
        engine.run(self.id, Phase::Micro, true)?;
        Ok(bytemuck::pod_read_unaligned::<f32>(&engine.read_output(self.id, io::LOSS)?).into())
    }

    /// The mean cross-entropy of all targets of `validation`, in nats, and how many they are.
    pub fn mean_loss(
        &self,
        weights: &mut Weights,
        validation: &Validation,
    ) -> Result<(f64, usize), RunError> {
        let (mut sum, mut targets) = (0.0, 0);
        for batch in validation.batches(self.batch.sequences) {
            let batch = batch?;
            sum += self.loss_sum(weights, &batch)?;
            targets += batch.valid_targets;
        }
        Ok((sum / targets.max(1) as f64, targets))
    }
}

/// Writes a batch into a program's inputs; `valid_targets` is what its loss is divided by.
pub(crate) fn feed(
    engine: &mut dyn Engine,
    id: ProgramId,
    batch: &TokenBatch,
    document_mask: bool,
    valid_targets: usize,
) -> Result<(), EngineError> {
    engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&batch.tokens))?;
    engine.write_input(id, io::TARGETS, bytemuck::cast_slice(&batch.targets))?;
    engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&batch.positions))?;
    if document_mask {
        engine.write_input(id, io::DOC_START, bytemuck::cast_slice(&batch.doc_start))?;
    }
    let inverse = 1.0 / valid_targets.max(1) as f32;
    engine.write_input(id, io::INV_TARGETS, bytemuck::bytes_of(&inverse))
}
