//! Inputs of a program that reads a batch: tokens and the random key of dropout.

use crate::training_spec::TrainingSpec;
use xtrain_data::{Batch as TokenBatch, IGNORED_TARGET};
use xtrain_model::decoder::io;
use xtrain_runtime::{Engine, EngineError, ProgramId};

/// Writes a batch into a program's inputs; the loss is divided by `valid_targets`.
pub fn feed(
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
    if engine.program(id).input(io::PADDING).is_some() {
        engine.write_input(id, io::PADDING, bytemuck::cast_slice(&padding(batch)))?;
    }
    let inverse = 1.0 / valid_targets.max(1) as f32;
    engine.write_input(id, io::INV_TARGETS, bytemuck::bytes_of(&inverse))
}

/// -1 for each token after the last target of its sequence, else 0. No loss depends on what such a token
/// computes, because tokens read only earlier ones.
fn padding(batch: &TokenBatch) -> Vec<i32> {
    let mut padding = vec![0; batch.targets.len()];
    let sequences = batch.targets.chunks(batch.seq_len).zip(padding.chunks_mut(batch.seq_len));
    for (targets, padding) in sequences {
        let end = targets.iter().rposition(|&target| target != IGNORED_TARGET).map_or(0, |last| last + 1);
        padding[end..].fill(-1);
    }
    padding
}

/// The Philox key of dropout in the `n`-th micro-batch of a step, those of all ranks counted.
pub fn draws(spec: &TrainingSpec, seed: u64, step: u64, n: usize) -> [u32; 4] {
    let first_token = n * spec.batch.sequences * spec.batch.seq_len;
    [seed as u32, (seed >> 32) as u32, step as u32, first_token as u32]
}
