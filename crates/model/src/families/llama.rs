//! Llama 2 and 3 (arXiv 2307.09288, 2407.21783).

use super::{ATTENTION_BIAS, Defaults, MLP_BIAS, Rules, fill_nothing, read_nothing};
use serde_json::json;

pub(super) static RULES: Rules = Rules {
    name: "llama",
    about: "Llama 2 and 3 (arXiv 2307.09288, 2407.21783).",
    class: "LlamaForCausalLM",
    qkv_bias: false,
    qk_norm: false,
    // transformers 5, configuration_llama.py.
    defaults: Defaults { kv_heads: None, head_dim: None, max_position_embeddings: 2048 },
    refused: &[ATTENTION_BIAS, MLP_BIAS],
    read: read_nothing,
    written: |_| json!({ "attention_bias": false, "mlp_bias": false }),
    filled: fill_nothing,
};
