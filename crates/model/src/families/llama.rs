//! Llama 2 and 3 (arXiv 2307.09288, 2407.21783).

use super::windows::IF_GIVEN;
use super::{ATTENTION_BIAS, DEFAULTS, MLP_BIAS, Rules, fill_nothing, read_nothing};
use serde_json::json;

pub(super) static RULES: Rules = Rules {
    name: "llama",
    about: "Llama 2 and 3 (arXiv 2307.09288, 2407.21783).",
    class: "LlamaForCausalLM",
    qkv_bias: false,
    qk_norm: false,
    experts: None,
    // transformers 5, configuration_llama.py.
    defaults: DEFAULTS,
    // Its layers have none in training, but those of the cache in generation do.
    windows: IF_GIVEN,
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &[],
    without_effect: &[],
    read: read_nothing,
    written: |_| json!({ "attention_bias": false, "mlp_bias": false }),
    filled: fill_nothing,
};
