//! dots.llm1 (arXiv 2506.05767): Qwen3's attention with the experts of DeepSeek-V3 (arXiv 2412.19437).

use super::experts::{ExpertRules, QWEN_MODULES, count, written};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules};
use crate::keys::{Keys, fail};
use crate::{BlockSet, Description, Mixture, ModelError, Router, Score};
use serde_json::{Value, json};

const COUNT: [&str; 2] = ["n_routed_experts", "num_local_experts"];

static EXPERTS: ExpertRules = ExpertRules {
    modules: QWEN_MODULES,
    router: Router { score: Score::Sigmoid, biased: true, ..Router::SOFTMAX_TOP2 },
    shares: true,
    refused: |mixture| {
        let is_prefix = mixture.dense.iter().eq(0..mixture.dense.len());
        let shared = mixture.shared_ffn_dim;
        let rules = [
            (mixture.router.score == Score::Sigmoid, "scores must be \"sigmoid\""),
            (shared > 0, "there must be a shared expert"),
            (shared.is_multiple_of(mixture.ffn_dim.max(1)), "a shared expert must be a multiple as wide"),
            (is_prefix, "dense blocks must be the first ones"),
        ];
        rules.into_iter().find(|(holds, _)| !holds).map(|(_, why)| why)
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
    refused: &[ATTENTION_BIAS, MLP_BIAS],
    read: |file, model| {
        refuse_window(file, model)?;
        let need = |key: &str| file.size(key)?.ok_or_else(|| fail(format!("`{key}` is missing")));
        let ffn_dim = file.size("moe_intermediate_size")?.unwrap_or(1408);
        let shared = need("n_shared_experts")?;
        model.mixture = Some(Mixture {
            count: count(file, COUNT, None)?,
            ffn_dim,
            router: Router {
                top_k: need("num_experts_per_tok")?,
                normalise: file.flag("norm_topk_prob")?.unwrap_or(false),
                scale: file.number("routed_scaling_factor")?.unwrap_or(1.0) as f32,
                groups: file.size("n_group")?.unwrap_or(1),
                top_groups: file.size("topk_group")?.unwrap_or(1),
                ..EXPERTS.router
            },
            shared_ffn_dim: shared
                .checked_mul(ffn_dim)
                .ok_or_else(|| fail(format!("`n_shared_experts` is {shared}; check it for a typo")))?,
            dense: BlockSet::of(0..file.size("first_k_dense_replace")?.unwrap_or(0)),
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
        keys["scoring_func"] = json!("sigmoid");
        keys["sliding_window"] = json!(null);
        keys["attention_bias"] = json!(false);
        keys
    },
    filled: |model| json!({ "max_window_layers": model.layers, "output_router_logits": false }),
};

/// Refuses a window that some block has: those from `max_window_layers` on.
fn refuse_window(file: &Keys<'_>, model: &Description) -> Result<(), ModelError> {
    let without = file.size("max_window_layers")?.unwrap_or(62);
    let window = match file.value("sliding_window") {
        Some(Value::Null) => return Ok(()),
        Some(window) => window.to_string(),
        None => "4096, its default".to_owned(),
    };
    match model.layers <= without {
        true => Ok(()),
        false => Err(fail(format!(
            "`sliding_window` is {window} from block {without} on: sliding-window attention is not supported; if the model has none, \
             set it to null"
        ))),
    }
}
