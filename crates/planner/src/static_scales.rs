//! Static scales of a planned step: those of its file, if they fit its model and are complete.

use crate::error::PlanError;
use std::sync::Arc;
use xtrain_config::{Resolved, ScalesFile};
use xtrain_model::{StaticScales, in_block};
use xtrain_program::{CastOperand, LinearGemm};
use xtrain_step::linear_gemms::linear_gemms;
use xtrain_step::training_spec::TrainingSpec;

/// The key that names the file of the scales.
pub const KEY: &str = "precision.static_scales";

/// The scales of `resolved` for a step of `spec`, whose formats are complete but for them.
///
/// # Errors
/// The scales have not been read, are of another model, are no powers of two although `pow2_scales` is set,
/// or lack a tensor that the step casts. While it is open which layers stay in bf16 because FP8 is slower,
/// that is left to [`complete`], and the step has no static scales.
pub(crate) fn check(
    resolved: &Resolved,
    spec: &TrainingSpec,
) -> Result<Option<Arc<StaticScales>>, PlanError> {
    let Some(name) = &resolved.config.precision.static_scales else { return Ok(None) };
    if spec.parallel.pipeline > 1 {
        return Err(PlanError::Refused(format!(
            "{KEY} is not supported yet with parallel.pipeline = {}: casts of other stages would saturate without a report; leave one of \
             the keys out",
            spec.parallel.pipeline
        )));
    }
    let Some(file) = &resolved.static_scales else {
        return Err(PlanError::Refused(format!("{KEY}: the scales in {name} have not been read")));
    };
    file.check(&spec.model, spec.fp8.pow2_scales == Some(true))?;
    let missing = missing(file, spec);
    match (missing.is_empty(), &resolved.config.precision.skip_slower) {
        (true, _) => Ok(Some(file.scales.clone())),
        (false, None) => Ok(None),
        (false, Some(_)) => Err(file.missing(&missing).into()),
    }
}

/// Refuses scales that lack a tensor of a step whose layers are all decided.
pub(crate) fn complete(file: Option<&ScalesFile>, spec: &TrainingSpec) -> Result<(), PlanError> {
    match file {
        Some(file) if spec.fp8.static_scales.is_none() => Err(file.missing(&missing(file, spec)).into()),
        _ => Ok(()),
    }
}

/// The tensors that a step casts and `file` has no scale for.
fn missing(file: &ScalesFile, spec: &TrainingSpec) -> Vec<(String, CastOperand)> {
    tensors(spec).into_iter().filter(|(layer, of)| file.scales.get(layer, *of).is_none()).collect()
}

/// The tensors that the linear layers of a step cast to FP8: layer and operand, in the order of the blocks.
fn tensors(spec: &TrainingSpec) -> Vec<(String, CastOperand)> {
    let mut all = Vec::new();
    for linear in linear_gemms(spec) {
        let is_fp8 = |gemm: LinearGemm| linear.gemms[gemm as usize].is_ok();
        let [fprop, dgrad, wgrad] = LinearGemm::ALL.map(is_fp8);
        // Without a scale of its own, the input of wgrad has that of the input.
        let of_wgrad = if linear.is_head() { CastOperand::Input } else { CastOperand::WgradInput };
        let operands = [
            (fprop, CastOperand::Input),
            (wgrad && !fprop, of_wgrad),
            (fprop || dgrad, CastOperand::Weight),
            (dgrad || wgrad, CastOperand::OutputGradient),
        ];
        let operands = operands.into_iter().filter(|(is_cast, _)| *is_cast);
        let blocks = linear.blocks.clone().map(Some).chain(linear.is_head().then_some(None));
        for (block, (_, operand)) in blocks.flat_map(|block| operands.clone().map(move |of| (block, of))) {
            let layer = block.map_or_else(|| linear.site.clone(), |block| in_block(block, &linear.site));
            all.push((block, layer, operand));
        }
    }
    // The head comes last.
    all.sort_by_key(|(block, ..)| block.unwrap_or(usize::MAX));
    all.into_iter().map(|(_, layer, operand)| (layer, operand)).collect()
}
