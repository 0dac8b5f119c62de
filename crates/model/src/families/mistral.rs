//! Mistral: Llama's block with other defaults, and a sliding window, which 7B has none of from v0.2 on.

use super::windows::{self, Windows};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules, fill_nothing, read_nothing};
use serde_json::json;

pub(super) static RULES: Rules = Rules {
    name: "mistral",
    about: "Mistral (arXiv 2310.06825), in sequences within its sliding window if it has one.",
    class: "MistralForCausalLM",
    qkv_bias: false,
    qk_norm: false,
    experts: None,
    // transformers 5, configuration_mistral.py.
    defaults: Defaults { kv_heads: Some(8), max_position_embeddings: 131_072, ..DEFAULTS },
    windows: Windows { switched: false, absent: windows::ABSENT, first: None },
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &[],
    without_effect: &[],
    read: read_nothing,
    written: |_| json!({ "sliding_window": null }),
    filled: fill_nothing,
};
