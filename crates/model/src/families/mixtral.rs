//! Mixtral (arXiv 2401.04088): Mistral's block with experts.

use super::experts::{ExpertRules, count, other_than_softmax, per_token, written};
use super::settings::{Effect, Harmless, Setting};
use super::windows::IF_GIVEN;
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules};
use crate::layer::ExpertModules;
use crate::{BlockSet, Mixture, Router};
use serde_json::json;

const COUNT: [&str; 2] = ["num_local_experts", "num_experts"];

static EXPERTS: ExpertRules = ExpertRules {
    modules: ExpertModules {
        router: "block_sparse_moe.gate",
        experts: "block_sparse_moe.experts",
        projections: ["w1", "w3", "w2"],
        shared: "block_sparse_moe.shared_experts",
    },
    router: Router::SOFTMAX_TOP2,
    shares: false,
    refused: |mixture| match mixture.router.normalise {
        false => Some(("normalise", "gates must be normalised")),
        true if !mixture.dense.is_empty() => Some(("dense_blocks", "no block can be dense")),
        true => other_than_softmax(mixture),
    },
};

const JITTER: Setting = Setting {
    key: "router_jitter_noise",
    harmless: Harmless::Zero,
    otherwise: Effect::Training("noise on routers is not supported, and xtrain trains without it"),
};

pub(super) static RULES: Rules = Rules {
    name: "mixtral",
    about: "Mixtral (arXiv 2401.04088): experts in every block.",
    class: "MixtralForCausalLM",
    qkv_bias: false,
    qk_norm: false,
    experts: Some(&EXPERTS),
    // transformers 5, configuration_mixtral.py.
    defaults: Defaults {
        kv_heads: Some(8),
        max_position_embeddings: 131_072,
        rope_theta: 1e6,
        norm_eps: 1e-5,
        ..DEFAULTS
    },
    windows: IF_GIVEN,
    settings: &[ATTENTION_BIAS, MLP_BIAS, JITTER],
    keys: &["num_experts", "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef"],
    without_effect: &["max_window_layers", "norm_topk_prob", "output_router_logits"],
    read: |file, model| {
        let count = count(file, COUNT, Some(8))?;
        model.mixture = Some(Mixture {
            count,
            ffn_dim: model.ffn_dim,
            router: Router { top_k: per_token(file, Some(2), count)?, ..Router::SOFTMAX_TOP2 },
            shared_ffn_dim: 0,
            dense: BlockSet::default(),
        });
        Ok(())
    },
    written: |model| {
        let mut keys = written(model, COUNT);
        keys["intermediate_size"] = json!(model.mixture.map(|mixture| mixture.ffn_dim));
        keys["sliding_window"] = json!(null);
        keys
    },
    filled: |_| json!({ "output_router_logits": false, "router_aux_loss_coef": 0.001 }),
};
