//! The format in which tokens travel to the ranks of their experts (`experts.wire`).

use crate::error::PlanError;
use xtrain_config::Wire;
use xtrain_model::{Experts, Recipe};
use xtrain_program::LinearGemm;
use xtrain_step::linear_gemms::linear_gemms;
use xtrain_step::training_spec::TrainingSpec;

/// True if the tokens of the step `spec` are cast to FP8 before they travel, as `wire` says.
///
/// # Errors
/// `wire` asks for FP8, and no GEMM would read it.
pub(crate) fn is_fp8(spec: &TrainingSpec, wire: Wire) -> Result<bool, PlanError> {
    match wire {
        Wire::Bf16 => Ok(false),
        Wire::Auto => {
            let is_usual = spec.parallel.expert > 1 && !spec.parallel.reduce.is_any_world();
            Ok(is_usual && why_bf16(spec).is_none())
        }
        Wire::Fp8 => match why_bf16(spec) {
            None => Ok(true),
            Some(why) => Err(PlanError::Refused(format!(
                "[experts] wire = \"fp8\" sends tokens as the FP8 operands of their experts' GEMMs, but {why}; leave it out, or \
                 take it back with --set experts.wire=auto"
            ))),
        },
    }
}

/// The reason why tokens travel in bf16, if they must.
fn why_bf16(spec: &TrainingSpec) -> Option<String> {
    let recipe = spec.recipe.name();
    match spec.recipe {
        Recipe::Fp32 | Recipe::Bf16 => {
            return Some(format!("{recipe} has none: choose fp8-block or fp8-delayed"));
        }
        Recipe::Fp8Row => {
            return Some(format!("{recipe} computes experts in bf16: choose fp8-block or fp8-delayed"));
        }
        Recipe::Fp8Current => {
            return Some(format!(
                "the scale of {recipe} is that of the tokens of all ranks, which is not known before they travel: choose \
                 fp8-block or fp8-delayed"
            ));
        }
        Recipe::Fp8Block if spec.fp8.pow2_scales == Some(false) => {
            return Some("wgrad needs scales that are powers of two: leave out precision.pow2_scales".into());
        }
        Recipe::Fp8Block | Recipe::Fp8Delayed => {}
    }
    let gemms = linear_gemms(spec);
    // X is an operand of fprop and wgrad, and dy one of dgrad and wgrad.
    let is_fp8 = |site: &str, gemm: LinearGemm| {
        let of_site = gemms.iter().filter(|layer| layer.site == site);
        of_site
            .map(|layer| &layer.gemms)
            .any(|of| of[gemm as usize].is_ok() && of[LinearGemm::Wgrad as usize].is_ok())
    };
    let dim = spec.model.dim;
    let is_sent = |experts: &Experts| {
        is_fp8(experts.gate_up_proj(dim).site, LinearGemm::Fprop)
            || is_fp8(experts.down_proj(dim).site, LinearGemm::Dgrad)
    };
    let mut experts = spec.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    if experts.any(is_sent) {
        return None;
    }
    let of_experts = gemms.iter().filter(|layer| layer.experts.is_some()).flat_map(|layer| &layer.gemms);
    let reason = of_experts.filter_map(|gemm| gemm.as_ref().err()).next();
    Some(match reason {
        Some(reason) => format!("these stay in bf16 ({reason})"),
        None => "the model has no experts".into(),
    })
}
