//! Seed-OSS (ByteDance, 2025): Llama's block with biases on q, k and v, which config.json may turn off.

use super::settings::{Effect, Harmless, Setting};
use super::windows::IF_GIVEN;
use super::{DEFAULTS, Defaults, MLP_BIAS, Rules, fill_nothing};
use serde_json::json;

const OUT_BIAS: Setting = Setting {
    key: "attention_out_bias",
    harmless: Harmless::False,
    otherwise: Effect::Refused("a bias on attention's output projection is not supported"),
};

pub(super) static RULES: Rules = Rules {
    name: "seed_oss",
    about: "Seed-OSS: biases on q, k and v, heads of 128.",
    class: "SeedOssForCausalLM",
    qkv_bias: true,
    qk_norm: false,
    experts: None,
    // transformers 5, configuration_seed_oss.py.
    defaults: Defaults {
        kv_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 524_288,
        ..DEFAULTS
    },
    windows: IF_GIVEN,
    settings: &[OUT_BIAS, MLP_BIAS],
    keys: &["attention_bias"],
    without_effect: &[],
    read: |file, model| {
        model.qkv_bias = file.flag("attention_bias")?.unwrap_or(true);
        Ok(())
    },
    written: |model| json!({ "attention_bias": model.qkv_bias, "attention_out_bias": false, "mlp_bias": false }),
    filled: fill_nothing,
};
