//! Qwen3 (arXiv 2505.09388): norms on q and k.

use super::windows::{self, Windows};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules, read_nothing};
use serde_json::json;

pub(super) static RULES: Rules = Rules {
    name: "qwen3",
    about: "Qwen3 (arXiv 2505.09388): norms on q and k.",
    class: "Qwen3ForCausalLM",
    qkv_bias: false,
    qk_norm: true,
    experts: None,
    // transformers 5, configuration_qwen3.py.
    defaults: Defaults {
        kv_heads: Some(32),
        head_dim: Some(128),
        max_position_embeddings: 32_768,
        ..DEFAULTS
    },
    windows: Windows { switched: true, absent: windows::ABSENT, first: Some(28) },
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &["max_window_layers"],
    without_effect: &[],
    read: read_nothing,
    written: |_| json!({ "attention_bias": false, "use_sliding_window": false }),
    // candle insists on it, though the window is off.
    filled: |model| json!({ "max_window_layers": model.layers }),
};
