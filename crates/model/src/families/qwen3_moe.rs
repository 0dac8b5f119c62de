//! Qwen3-MoE (arXiv 2505.09388): Qwen3's block with experts.

use super::experts::{ExpertRules, QWEN_MODULES, count, other_than_softmax, per_token, width, written};
use super::windows::{self, Windows};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules};
use crate::keys::{Keys, fail};
use crate::{BlockSet, Description, Mixture, ModelError, Router};
use serde_json::{Value, json};

const COUNT: [&str; 2] = ["num_experts", "num_local_experts"];

static EXPERTS: ExpertRules = ExpertRules {
    modules: QWEN_MODULES,
    router: Router::SOFTMAX_TOP2,
    shares: false,
    refused: other_than_softmax,
};

pub(super) static RULES: Rules = Rules {
    name: "qwen3_moe",
    about: "Qwen3-MoE (arXiv 2505.09388): Qwen3 with experts.",
    class: "Qwen3MoeForCausalLM",
    qkv_bias: false,
    qk_norm: true,
    experts: Some(&EXPERTS),
    // transformers 5, configuration_qwen3_moe.py.
    defaults: Defaults { kv_heads: Some(4), max_position_embeddings: 32_768, ..DEFAULTS },
    windows: Windows { switched: true, absent: windows::ABSENT, first: None },
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &[
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
        "router_aux_loss_coef",
    ],
    without_effect: &["max_window_layers", "output_router_logits"],
    read: |file, model| {
        let count = count(file, COUNT, Some(128))?;
        model.mixture = Some(Mixture {
            count,
            ffn_dim: width(file, 768)?,
            router: Router {
                top_k: per_token(file, Some(8), count)?,
                normalise: file.flag("norm_topk_prob")?.unwrap_or(false),
                ..Router::SOFTMAX_TOP2
            },
            shared_ffn_dim: 0,
            dense: dense(file, model)?,
        });
        Ok(())
    },
    written: |model| {
        let mut keys = written(model, COUNT);
        if let Some(mixture) = &model.mixture {
            keys["moe_intermediate_size"] = json!(mixture.ffn_dim);
            keys["norm_topk_prob"] = json!(mixture.router.normalise);
        }
        keys["attention_bias"] = json!(false);
        keys["use_sliding_window"] = json!(false);
        keys
    },
    filled: |model| {
        // Both say which blocks are dense; those of a folder say it in their own way.
        let dense: Vec<usize> = model.mixture.iter().flat_map(|mixture| mixture.dense.iter()).collect();
        json!({
            "mlp_only_layers": dense, "decoder_sparse_step": 1, "max_window_layers": model.layers, "sliding_window": null,
            "output_router_logits": false, "router_aux_loss_coef": 0.001,
        })
    },
};

/// The blocks without experts: those of a list, and all but every n-th.
fn dense(file: &Keys<'_>, model: &Description) -> Result<BlockSet, ModelError> {
    let block = |value: &Value| value.as_u64().and_then(|block| usize::try_from(block).ok());
    let list = |value: &Value| value.as_array()?.iter().map(block).collect::<Option<Vec<usize>>>();
    let listed =
        BlockSet::from_iter(file.read("mlp_only_layers", "a list of layers", list)?.unwrap_or_default());
    let step = file.size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(fail("`decoder_sparse_step` is 0; it must be at least 1"));
    }
    let is_dense = |block: &usize| listed.contains(*block) || !(block + 1).is_multiple_of(step);
    Ok(BlockSet::from_iter((0..model.layers).filter(is_dense)))
}
