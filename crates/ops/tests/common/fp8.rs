//! FP8 GEMMs that GPUs before compute capability 9.0 refuse. Casts to FP8 run on all GPUs.

use libtest_mimic::Failed;
use std::any::Any;
use xtrain_cuda::Arch;
use xtrain_ops::linear_cross_entropy::ScaledLinearCrossEntropy;
use xtrain_ops::scaled_matmul::ScaledMatmul;
use xtrain_program::Op;
use xtrain_runtime::EngineError;
use xtrain_tensor::{Scaling, TILE, TensorType};

/// Sizes of FP8 GEMMs are multiples of it. Other GEMMs run in bf16.
const MULTIPLE: usize = 16;

/// True if a GPU of this architecture lacks a GEMM of `op`. FP8 with a scale for each tensor needs 8.9, FP8
/// with scales of rows, tiles and blocks needs 9.0.
pub(crate) fn must_refuse(op: &dyn Op, inputs: &[TensorType], arch: Arch) -> bool {
    let needs = |scaling: [Scaling; 2]| match scaling {
        [Scaling::Tensor, Scaling::Tensor] => Arch::SM89,
        _ => Arch::SM90,
    };
    scalings(op, inputs).into_iter().any(|scaling| arch < needs(scaling))
}

/// The scalings of the GEMMs that `op` runs in FP8.
fn scalings(op: &dyn Op, inputs: &[TensorType]) -> Vec<[Scaling; 2]> {
    let op: &dyn Any = op;
    let is_supported = |sizes: &[usize]| sizes.iter().all(|size| size.is_multiple_of(MULTIPLE));
    if let Some(op) = op.downcast_ref::<ScaledMatmul>() {
        let [m, k, n] = [inputs[0].shape[0], inputs[0].shape[1], inputs[2].shape[0]];
        return if is_supported(&[m, n, k]) { vec![op.scaling] } else { Vec::new() };
    }
    let Some(op) = op.downcast_ref::<ScaledLinearCrossEntropy>() else { return Vec::new() };
    // All chunks of tokens except for the last one have a supported size, because they are whole tiles.
    let [tokens, width] = [inputs[0].shape[0], inputs[0].shape[1]];
    let has_whole_chunk = tokens.div_ceil(TILE) > (op.grad.loss.chunk_tokens / TILE).max(1);
    if !is_supported(&[width]) || !(has_whole_chunk || is_supported(&[tokens])) {
        return Vec::new();
    }
    let is_run = [true, op.grad.dx, op.grad.dw.is_some()];
    let gemms = op.gemms.into_iter().zip(is_run).filter_map(|(gemm, is_run)| gemm.filter(|_| is_run));
    gemms.map(|gemm| gemm.operands.map(|operand| operand.scaling)).collect()
}

/// Checks the error of an op that a GPU must refuse.
pub(crate) fn assert_refused(what: &str, error: Option<EngineError>) -> Result<(), Failed> {
    let error = error.ok_or_else(|| format!("{what} runs on a GPU that lacks it"))?.to_string();
    let reason = "FP8 needs compute capability 8.9 or newer, scales of rows, tiles and blocks 9.0";
    assert!(error.contains(reason) && error.contains("choose another precision.recipe"), "{what}: {error}");
    Ok(())
}
