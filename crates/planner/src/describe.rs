//! A short description of a run's model, and warnings: of layers that unexpectedly stay in bf16 under an FP8
//! recipe, of tokens that travel between nodes, of stages that wait, and of bits that depend on the ranks.

use crate::estimate::{Network, micro_batches};
use crate::planned::Planned;
use xtrain_config::{Config, OrAuto};
use xtrain_model::Bf16Reason;
use xtrain_program::{Parallel, Reduce};
use xtrain_report::metrics::format;
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
    let adapter = spec.model.adapter.as_ref();
    let adapters = adapter.map_or(String::new(), |adapter| format!(", adapters of rank {}", adapter.rank));
    format!("{}{adapters}{fp8}", spec.model.title())
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

/// Warns of parts of matrices whose sizes leave in bf16 what FP8 would take as a whole.
pub fn warn_of_parts_in_bf16(spec: &TrainingSpec) {
    if let Some(text) = parts_in_bf16(spec) {
        tracing::warn!("{text}");
    }
}

fn parts_in_bf16(spec: &TrainingSpec) -> Option<String> {
    let parts = spec.ranks().tensor.size;
    if parts == 1 || !spec.recipe.is_fp8() {
        return None;
    }
    let parallel = Parallel { tensor: 1, reduce: Reduce::SameWorld, ..spec.parallel };
    let [layers, whole] =
        [spec, &TrainingSpec { parallel, ..spec.clone() }].map(|spec: &TrainingSpec| linear_gemms(spec));
    let [share, of_whole] = [&layers, &whole].map(|layers| format::percent(fp8_share(layers), 1));
    if fp8_share(&layers) >= fp8_share(&whole) || share == of_whole {
        return None;
    }
    let mut sizes: Vec<String> = Vec::new();
    for layer in &layers {
        let of_site = whole.iter().filter(|of| of.site == layer.site).flat_map(|of| &of.gemms);
        let known: Vec<&Bf16Reason> = of_site.filter_map(|gemm| gemm.as_ref().err()).collect();
        let reasons = layer.gemms.iter().filter_map(|gemm| gemm.as_ref().err());
        for reason in reasons.filter(|reason| !known.contains(reason)) {
            let text = format!("{}: {reason}", layer.site);
            if !sizes.contains(&text) {
                sizes.push(text);
            }
        }
    }
    let why = match spec.parallel.reduce.is_any_mesh() {
        true => "parallel.reduce = \"any-mesh\"".to_owned(),
        false => format!("parallel.tensor = {parts}"),
    };
    Some(format!(
        "{why} computes blocks in {parts} parts, of which {} has {share} of the linear layers in FP8 instead of {of_whole} ({})",
        spec.recipe.name(),
        sizes.join("; ")
    ))
}

/// Warns of a step with fewer micro-batches than stages.
pub fn warn_of_few_micro_batches(planned: &Planned) {
    if let Some(text) = few_micro_batches(planned.micro_steps(), planned.spec.parallel.pipeline) {
        tracing::warn!("{text}");
    }
}

fn few_micro_batches(micro_steps: usize, stages: usize) -> Option<String> {
    let rounds = micro_steps + stages - 1;
    let share = format::percent((stages - 1) as f64 / rounds as f64, 0);
    (micro_steps < stages).then(|| {
        format!(
            "a step has {} for {stages} stages, so each stage waits in {} of {rounds} rounds, {share} of the time \
             (the bubble); a smaller train.micro_batch_size, a larger train.batch_size or a smaller parallel.pipeline shortens it",
            micro_batches(micro_steps),
            stages - 1
        )
    })
}

/// Warns of sums for any world whose bits depend on a size that the run file leaves open. Such runs are not
/// refused, because those with equally many ranks and equal memory have equal bits anyway.
pub fn warn_of_open_micro_batch(config: &Config, planned: &Planned) {
    let is_open = config.train.micro_batch_size.and_then(OrAuto::number).is_none();
    if config.parallel.reduce == Reduce::AnyWorld && is_open {
        tracing::warn!(
            "parallel.reduce = \"any-world\" has equal bits only with equal train.micro_batch_size, which is not set and depends on ranks \
             and memory (here {}); set it to compare numbers of ranks",
            planned.spec.batch.sequences
        );
    }
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
    let whys: Vec<String> = head
        .computed()
        .filter_map(|(gemm, product)| {
            Some(format!("{} ({})", gemm.name(), explained(product.as_ref().err()?)))
        })
        .collect();
    if !whys.is_empty() {
        tracing::warn!("precision.head = \"fp8\", but GEMMs of the head are in bf16: {}", whys.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_rank::Rank;
    use xtrain_step::engine::Target;

    fn spec(sets: &[&str], ranks: usize) -> TrainingSpec {
        let run = "[model]\ndim = 64\nlayers = 2\nheads = 4\nkv_heads = 4\nffn_dim = 48\n[data]\ntrain = 'a.txt'\ntokenizer = 'bytes'\n\
                   seq_len = 64\n[train]\nsteps = 1\nmicro_batch_size = 1\n[precision]\nrecipe = 'fp8-delayed'\n";
        let parsed = Config::parse(Path::new("run.toml"), run.as_bytes(), sets).expect("a run file");
        plan_alone(&parsed, Target::Cpu, Rank::first_of(ranks)).expect("a plan").spec
    }

    #[test]
    fn parts_whose_sizes_fp8_does_not_take_are_named() {
        let warning = parts_in_bf16(&spec(&["parallel.reduce=any-mesh"], 1)).expect("a warning");
        assert!(warning.contains("any-mesh") && warning.contains("4 parts"), "{warning}");
        assert!(warning.contains("mlp.down_proj: 12 is"), "{warning}");
        let warning = parts_in_bf16(&spec(&["parallel.tensor=4"], 4)).expect("a warning");
        assert!(warning.contains("tensor = 4 computes"), "{warning}");
        for sets in [
            &["parallel.reduce=any-world"][..],
            &["parallel.reduce=any-mesh", "model.ffn_dim=64", "model.head_dim=16"],
            &["parallel.reduce=any-mesh", "precision.recipe=bf16"],
        ] {
            assert_eq!(parts_in_bf16(&spec(sets, 1)), None, "{sets:?}");
        }
    }

    #[test]
    fn a_step_with_fewer_micro_batches_than_stages_names_its_bubble() {
        for (micro_steps, stages) in [(1, 1), (4, 4), (8, 4)] {
            assert_eq!(few_micro_batches(micro_steps, stages), None);
        }
        let warning = few_micro_batches(2, 4).expect("a warning");
        assert!(warning.contains("2 micro-batches for 4"), "{warning}");
        assert!(warning.contains("3 of 5 rounds, 60%"), "{warning}");
        assert!(few_micro_batches(1, 2).is_some_and(|text| text.contains("1 micro-batch for 2 ")));
    }
}
