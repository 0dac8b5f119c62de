//! The formats in which the ranks of a tensor group gather the tokens of FP8 GEMMs.

use super::line;
use xtrain_model::Recipe;
use xtrain_program::{Collective, Gather, Payload, Program, Role};
use xtrain_step::training_spec::TrainingSpec;
use xtrain_tensor::{DType, TILE};

/// Layers whose tokens, or gradients of outputs, are gathered in a type.
struct GatheredTokens<'a> {
    is_gradient: bool,
    dtype: DType,
    sites: Vec<&'a str>,
}

/// The line of the plan; none without tensor ranks.
pub(super) fn text(spec: &TrainingSpec, program: &Program) -> String {
    let mut all: Vec<GatheredTokens<'_>> = Vec::new();
    let is_cut = |site: &str| {
        spec.model.linears().any(|(_, linear)| linear.site == site && linear.tensor_cut().is_some())
    };
    for instance in program.instances.iter().filter(|i| Payload::from_instance(i) == Payload::Tokens) {
        let Some((Collective::AllGather { .. }, _)) = instance.code.op().collective() else { continue };
        let (site, dtype) = (&*instance.origin.site, program.ty(instance.outputs[0].value).dtype);
        // Scales are f32.
        if dtype == DType::F32 || instance.origin.block.is_none() || !is_cut(site) {
            continue;
        }
        let is_gradient = instance.origin.role == Role::Dgrad;
        match all.iter_mut().find(|of| of.is_gradient == is_gradient && of.dtype == dtype) {
            Some(of) if of.sites.contains(&site) => {}
            Some(of) => of.sites.push(site),
            None => all.push(GatheredTokens { is_gradient, dtype, sites: vec![site] }),
        }
    }
    if spec.parallel.tensor == 1 || all.is_empty() {
        return String::new();
    }
    let of = |of: &GatheredTokens<'_>| {
        let gradients = if of.is_gradient { "gradients of " } else { "" };
        let why = if of.dtype == DType::BF16 { format!(" ({})", why_bf16(spec, of)) } else { String::new() };
        format!("{gradients}{} in {}{why}", of.sites.join(", "), of.dtype)
    };
    line("tensor ranks gather tokens", &all.iter().map(of).collect::<Vec<_>>().join("; "))
}

/// The reason why these tokens are cast after they are gathered, if at all.
fn why_bf16(spec: &TrainingSpec, gathered: &GatheredTokens<'_>) -> String {
    // With sums for any mesh, those of a part, of which a rank may have several.
    let (own, parts) = (spec.own_tokens(), spec.ranks().tensor.size);
    let [one, all] = if spec.parallel.reduce.is_any_mesh() { ["part", "parts"] } else { ["rank", "ranks"] };
    if spec.parallel.gather != Gather::Auto {
        return "by parallel.gather".into();
    }
    if gathered.is_gradient && matches!(spec.recipe, Recipe::Fp8Row | Recipe::Fp8Block) {
        return "dgrad and wgrad read two casts, together as many bytes".into();
    }
    if spec.recipe == Recipe::Fp8Block && !own.is_multiple_of(TILE) {
        return format!("{own} tokens of a {one} are not a multiple of {TILE}");
    }
    match own * parts == spec.batch.tokens() {
        true => "a GEMM reads them in bf16".into(),
        false => format!("{parts} {all} do not divide {} tokens", spec.batch.tokens()),
    }
}
