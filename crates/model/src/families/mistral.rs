//! Mistral without its sliding window, as 7B from v0.2 on: Llama's block with other defaults.

use super::{ATTENTION_BIAS, DEFAULTS, Defaults, MLP_BIAS, Rules, fill_nothing};
use crate::keys::fail;
use serde_json::{Value, json};

pub(super) static RULES: Rules = Rules {
    name: "mistral",
    about: "Mistral (arXiv 2310.06825) without sliding windows, as 7B from v0.2 on.",
    class: "MistralForCausalLM",
    qkv_bias: false,
    qk_norm: false,
    experts: None,
    // transformers 5, configuration_mistral.py.
    defaults: Defaults { kv_heads: Some(8), max_position_embeddings: 131_072, ..DEFAULTS },
    refused: &[ATTENTION_BIAS, MLP_BIAS],
    read: |file, _| match file.value("sliding_window") {
        Some(Value::Null) => Ok(()),
        Some(window) => Err(fail(format!(
            "`sliding_window` = {window}: sliding-window attention is not supported, only null is"
        ))),
        None => Err(fail(
            "`sliding_window` is missing, which means 4096: sliding-window attention is not supported; if the model has none, set it to \
             null",
        )),
    },
    written: |_| json!({ "sliding_window": null }),
    filled: fill_nothing,
};
