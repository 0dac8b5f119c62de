//! A short description of a run's model, and warnings: of layers that unexpectedly stay in bf16 under an FP8
//! recipe, and of tokens that travel between nodes.

use crate::estimate::Network;
use xtrain_model::Bf16Reason;
use xtrain_program::LinearGemm;
use xtrain_step::linear_gemms::{LinearGemms, fp8_share, linear_gemms};
use xtrain_step::training_spec::TrainingSpec;

/// A short description of the model.
pub fn describe(spec: &TrainingSpec) -> String {
    let fp8 = match spec.recipe.is_fp8() {
        true => {
            let layers = linear_gemms(spec);
            let share = 100.0 * fp8_share(&layers);
            let has_head = layers.iter().any(|p| p.is_head() && p.is_all_fp8());
            let head = if has_head { " and the head" } else { "" };
            let scales = if spec.fp8.static_scales.is_some() { " with static scales" } else { "" };
            format!(", {}{scales} ({share:.0}% of the linear layers{head})", spec.recipe.name())
        }
        false => String::new(),
    };
    format!("{}{fp8}", spec.model.title())
}

/// Warns of an FP8 recipe that leaves all GEMMs in bf16, which no other output of the run shows.
pub fn warn_of_no_fp8(spec: &TrainingSpec) {
    let layers = linear_gemms(spec);
    warn_of_bf16_head(spec, &layers);
    if !spec.recipe.is_fp8() || layers.iter().flat_map(|linear| &linear.gemms).any(Result::is_ok) {
        return;
    }
    let why = layers.iter().flat_map(|linear| &linear.gemms).find_map(|product| product.as_ref().err());
    tracing::warn!(
        "precision.recipe = {}, but no GEMM of a linear layer is in FP8{}; xtrain plan gives the reason for each",
        spec.recipe.name(),
        why.map(|why| format!(" ({why})")).unwrap_or_default()
    );
}

/// Warns of ranks that share experts or matrices and are on several nodes.
pub fn warn_of_distant_ranks(spec: &TrainingSpec, network: &Network) {
    let parallel = &spec.parallel;
    for (key, groups) in [("expert", parallel.expert_groups()), ("tensor", parallel.tensor_groups())] {
        if let Some(text) = network.warning_of_distance(key, groups, parallel.rank.world_size) {
            tracing::warn!("{text}");
        }
    }
}

/// Warns of a head that the run puts in FP8 although its size does not allow it.
fn warn_of_bf16_head(spec: &TrainingSpec, layers: &[LinearGemms]) {
    let Some(head) = layers.iter().find(|p| p.is_head() && spec.fp8.head && spec.recipe.is_fp8()) else {
        return;
    };
    let (m, tokens) = (&spec.model, spec.own_tokens());
    let explained = |why: &Bf16Reason| match why {
        Bf16Reason::Size(size) if *size == m.vocab_size => {
            format!(
                "{why}: the vocabulary, which model.vocab_size can enlarge if a model begins from random weights"
            )
        }
        Bf16Reason::Size(size) if *size == m.dim => format!("{why}: model.dim"),
        Bf16Reason::Size(size) if *size == tokens => format!("{why}: the tokens of a rank's micro-batch"),
        _ => why.to_string(),
    };
    let of = LinearGemm::ALL.into_iter().zip(&head.gemms);
    let whys: Vec<String> = of
        .filter_map(|(gemm, product)| {
            Some(format!("{} ({})", gemm.name(), explained(product.as_ref().err()?)))
        })
        .collect();
    if !whys.is_empty() {
        tracing::warn!("precision.head = \"fp8\", but GEMMs of the head are in bf16: {}", whys.join(", "));
    }
}
