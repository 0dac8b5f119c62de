//! dots.llm1 (arXiv 2506.05767): Qwen3's attention with the experts of DeepSeek-V3 (arXiv 2412.19437).

use super::experts::{ExpertRules, QWEN_MODULES, count, first_broken, per_token, width, written};
use super::windows::{self, Windows};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules};
use crate::keys::{Keys, fail};
use crate::layer::is_positive_f32;
use crate::{BlockSet, Mixture, ModelError, Router, Score};
use serde_json::{Value, json};

const COUNT: [&str; 2] = ["n_routed_experts", "num_local_experts"];

static EXPERTS: ExpertRules = ExpertRules {
    modules: QWEN_MODULES,
    router: Router { score: Score::Sigmoid, biased: true, ..Router::SOFTMAX_TOP2 },
    shares: true,
    refused: |mixture| {
        let is_prefix = mixture.dense.iter().eq(0..mixture.dense.len());
        let shared = mixture.shared_ffn_dim;
        let groups = mixture.router.groups;
        // transformers, modeling_dots1.py: torch.topk(2) of each group.
        let has_pairs = mixture.count / groups.max(1) >= 2;
        let pairs_of = if groups > 1 { "groups" } else { "count" };
        let is_multiple = shared.is_multiple_of(mixture.ffn_dim.max(1));
        first_broken(&[
            (mixture.router.score == Score::Sigmoid, ("score", "scores must be \"sigmoid\"")),
            (shared > 0, ("shared_ffn_dim", "there must be a shared expert")),
            (
                is_multiple,
                (
                    "shared_ffn_dim",
                    "the width of the shared expert must be a multiple of `experts.ffn_dim` (of `model.ffn_dim` if that is not set)",
                ),
            ),
            (is_prefix, ("dense_blocks", "dense blocks must be the first ones")),
            (
                has_pairs,
                (
                    pairs_of,
                    "a group must have at least 2 experts, because its score is the sum of its best two",
                ),
            ),
        ])
    },
};

pub(super) static RULES: Rules = Rules {
    name: "dots1",
    about: "dots.llm1 (arXiv 2506.05767): Qwen3's attention with the experts of DeepSeek-V3.",
    class: "Dots1ForCausalLM",
    qkv_bias: false,
    qk_norm: true,
    experts: Some(&EXPERTS),
    // transformers 5, configuration_dots1.py.
    defaults: Defaults { kv_heads: Some(32), ..DEFAULTS },
    windows: Windows { switched: false, absent: windows::ABSENT, first: Some(62) },
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &[
        "first_k_dense_replace",
        "max_window_layers",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_local_experts",
        "routed_scaling_factor",
        "router_aux_loss_coef",
        "scoring_func",
        "topk_group",
        "topk_method",
    ],
    without_effect: &["output_router_logits"],
    read: |file, model| {
        refuse_other_routing(file)?;
        let dense = file.size("first_k_dense_replace")?.unwrap_or(0);
        if dense > model.layers {
            let layers = model.layers;
            return Err(fail(format!(
                "`first_k_dense_replace` is {dense}, but the model has {layers} layers"
            )));
        }
        let (count, ffn_dim) = (count(file, COUNT, None)?, width(file, 1408)?);
        let shared = file.size("n_shared_experts")?.ok_or_else(|| fail("`n_shared_experts` is missing"))?;
        let scale = file.number("routed_scaling_factor")?.unwrap_or(1.0);
        if !is_positive_f32(scale) {
            return Err(fail(format!(
                "`routed_scaling_factor` is {scale:?}; it must be a positive number within f32"
            )));
        }
        model.mixture = Some(Mixture {
            count,
            ffn_dim,
            router: Router {
                top_k: per_token(file, None, count)?,
                normalise: file.flag("norm_topk_prob")?.unwrap_or(false),
                scale: scale as f32,
                groups: file.size("n_group")?.unwrap_or(1),
                top_groups: file.size("topk_group")?.unwrap_or(1),
                ..EXPERTS.router
            },
            shared_ffn_dim: shared
                .checked_mul(ffn_dim)
                .ok_or_else(|| fail(format!("`n_shared_experts` is {shared}; check it for a typo")))?,
            dense: BlockSet::from_iter(0..dense),
        });
        Ok(())
    },
    written: |model| {
        let mut keys = written(model, COUNT);
        if let Some(mixture) = &model.mixture {
            let Router { normalise, scale, groups, top_groups, .. } = mixture.router;
            // A number of its own type, so that 2.5 stays 2.5 and 0.1 stays 0.1.
            let scale: Value = serde_json::from_str(&format!("{scale:?}")).unwrap_or(json!(scale));
            keys["moe_intermediate_size"] = json!(mixture.ffn_dim);
            keys["n_shared_experts"] = json!(mixture.shared_experts());
            keys["first_k_dense_replace"] = json!(mixture.dense.len());
            keys["norm_topk_prob"] = json!(normalise);
            keys["routed_scaling_factor"] = scale;
            keys["n_group"] = json!(groups);
            keys["topk_group"] = json!(top_groups);
        }
        keys["sliding_window"] = json!(null);
        keys["attention_bias"] = json!(false);
        keys
    },
    filled: |model| {
        json!({
            "topk_method": "noaux_tc", "moe_layer_freq": 1, "scoring_func": "sigmoid", "max_window_layers": model.layers,
            "output_router_logits": false,
        })
    },
};

/// Refuses keys of DeepSeek-V3's routing, which vLLM reads, with values that mean another routing.
fn refuse_other_routing(file: &Keys<'_>) -> Result<(), ModelError> {
    // The published dots.llm1 has "noaux_tc" as the score as well, and llama.cpp reads it as a sigmoid.
    let known = [
        ("topk_method", vec![json!("noaux_tc")]),
        ("moe_layer_freq", vec![json!(1)]),
        ("scoring_func", vec![json!("sigmoid"), json!("noaux_tc")]),
    ];
    for (key, values) in known {
        if let Some(value) = file.get(key).filter(|value| !values.contains(value)) {
            return Err(fail(format!("`{key}` = {value}: only {} is supported", values[0])));
        }
    }
    Ok(())
}
