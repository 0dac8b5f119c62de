//! Inputs of a program that reads a batch: tokens and the random key of dropout.

use crate::batch_share::BatchShare;
use xtrain_data::{Batch as TokenBatch, IGNORED_TARGET, TokenCounts};
use xtrain_model::decoder::io;
use xtrain_runtime::{Engine, EngineError, ProgramId};

/// Writes a batch into the inputs of a program, which computes this share of it. The loss is divided by the
/// trained targets of `counts`, losses of routers by its inputs.
pub fn feed(
    engine: &mut dyn Engine,
    id: ProgramId,
    batch: &TokenBatch,
    document_mask: bool,
    counts: TokenCounts,
    share: &BatchShare,
) -> Result<(), EngineError> {
    if share.stage.is_first() {
        engine.write_input(id, io::TOKENS, bytemuck::cast_slice(&share.of(&batch.tokens, 0)))?;
    }
    engine.write_input(id, io::POSITIONS, bytemuck::cast_slice(&batch.positions))?;
    if document_mask {
        engine.write_input(id, io::DOC_START, bytemuck::cast_slice(&batch.doc_start))?;
    }
    if engine.program(id).input(io::PADDING).is_some() {
        engine.write_input(id, io::PADDING, bytemuck::cast_slice(&share.of(&padding(batch), -1)))?;
    }
    let inverse = |count: u64| 1.0 / count.max(1) as f32;
    if engine.program(id).input(io::INV_TOKENS).is_some() {
        engine.write_input(id, io::INV_TOKENS, bytemuck::bytes_of(&inverse(counts.inputs)))?;
    }
    if share.stage.is_last() {
        let targets = share.of(&batch.targets, IGNORED_TARGET);
        engine.write_input(id, io::TARGETS, bytemuck::cast_slice(&targets))?;
        engine.write_input(id, io::INV_TARGETS, bytemuck::bytes_of(&inverse(counts.trained)))?;
    }
    Ok(())
}

/// -1 for each position after the inputs of its sequence, else 0.
fn padding(batch: &TokenBatch) -> Vec<i32> {
    let mut padding = vec![0; batch.tokens.len()];
    for (&inputs, padding) in batch.row_inputs.iter().zip(padding.chunks_mut(batch.seq_len)) {
        padding[inputs..].fill(-1);
    }
    padding
}

/// The Philox key of dropout in a step, for tokens from this one of the global batch on.
pub fn draws(seed: u64, step: u64, first_token: usize) -> [u32; 4] {
    [seed as u32, (seed >> 32) as u32, step as u32, first_token as u32]
}
