//! Qwen2 and 2.5 (arXiv 2407.10671): biases on q, k and v.

use super::windows::{self, Windows};
use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules, read_nothing};
use serde_json::json;

pub(super) static RULES: Rules = Rules {
    name: "qwen2",
    about: "Qwen2 and 2.5 (arXiv 2407.10671): biases on q, k and v.",
    class: "Qwen2ForCausalLM",
    qkv_bias: true,
    qk_norm: false,
    experts: None,
    // transformers 5, configuration_qwen2.py.
    defaults: Defaults { kv_heads: Some(32), max_position_embeddings: 32_768, ..DEFAULTS },
    windows: Windows { switched: true, absent: windows::ABSENT, first: Some(28) },
    settings: &[ATTENTION_BIAS, MLP_BIAS],
    keys: &["max_window_layers"],
    without_effect: &[],
    read: read_nothing,
    written: |_| json!({ "use_sliding_window": false }),
    // candle insists on both, though the window is off.
    filled: |model| json!({ "max_window_layers": model.layers, "sliding_window": model.max_position_embeddings }),
};
