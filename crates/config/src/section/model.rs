//! `[model]`: the model to train, either described here or taken from a Hugging Face folder.
//!
//! [`ModelConfig`] holds the keys of the file; a [`Description`] has every number. The defaults that depend
//! on other keys are computed in one place, [`ModelConfig::describe`].

use super::ExpertsConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_model::{Description, Family};

/// The base of the paper that introduced RoPE (arXiv 2104.09864).
const ROPE_THETA: f64 = 10_000.0;
const NORM_EPS: f64 = 1e-6;

section! {
    /// The keys of `[model]`. The section is described at [`Config::model`](crate::Config).
    pub struct ModelConfig {
        /// Hugging Face folder (config.json, safetensors, tokenizer) to continue from. The architecture keys
        /// may then be left out; those that are given must agree with the folder, except
        /// `max_position_embeddings`, `rope_theta` and `rope_scaling`, which replace the folder's to extend
        /// the context.
        #[schemars(extend("format" = "path"))]
        #[schemars(extend("x-example" = "models/Qwen3-0.6B"))]
        pub init_from: Option<String> = None,
        /// Model family: determines the block and the names of tensors in an export.
        #[schemars(extend("x-default" = "`\"qwen3\"`"))]
        pub family: Option<Family> = None,
        /// Width of the residual stream.
        #[schemars(range(min = 1, max = 1_048_576))]
        #[schemars(extend("x-unit" = "features"))]
        #[schemars(extend("x-default" = "required without `init_from`"))]
        #[schemars(extend("x-example" = 512))]
        pub dim: Option<usize> = None,
        /// Number of transformer blocks.
        #[schemars(range(min = 1, max = 1024))]
        #[schemars(extend("x-unit" = "blocks"))]
        #[schemars(extend("x-default" = "required without `init_from`"))]
        #[schemars(extend("x-example" = 8))]
        pub layers: Option<usize> = None,
        /// Number of query heads of each attention.
        #[schemars(range(min = 1, max = 65_536))]
        #[schemars(extend("x-unit" = "heads", "x-default" = "required without `init_from`", "x-example" = 8))]
        pub heads: Option<usize> = None,
        /// Number of key and value heads (grouped-query attention). Must divide `heads`.
        #[schemars(range(min = 1, max = 65_536))]
        #[schemars(extend("x-unit" = "heads", "x-default" = "`heads`", "x-example" = 2))]
        pub kv_heads: Option<usize> = None,
        /// Width of one head. Even, because RoPE rotates pairs. `heads * head_dim` need not equal `dim`.
        #[schemars(range(min = 2, max = 65_536))]
        #[schemars(extend("x-unit" = "features", "x-default" = "`dim / heads`", "x-example" = 64))]
        pub head_dim: Option<usize> = None,
        /// Width inside the SwiGLU feed-forward.
        #[schemars(range(min = 1, max = 16_777_216))]
        #[schemars(extend("x-unit" = "features"))]
        #[schemars(extend("x-default" = "`8/3 * dim`, rounded up to a multiple of 64"))]
        pub ffn_dim: Option<usize> = None,
        /// Rows of the embedding and the head. May be larger than the tokenizer's vocabulary, as padding;
        /// never smaller.
        #[schemars(range(min = 2, max = 16_777_216))]
        #[schemars(extend("x-unit" = "tokens", "x-default" = "the tokenizer's"))]
        pub vocab_size: Option<usize> = None,
        /// Longest sequence that the model claims to serve: written to config.json. At least `data.seq_len`.
        #[schemars(range(min = 1, max = 1_073_741_824))]
        #[schemars(extend("x-unit" = "tokens", "x-default" = "`data.seq_len`, or the `init_from` folder's"))]
        pub max_position_embeddings: Option<usize> = None,
        /// Base of the rotary position frequencies.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-default" = format!("`{ROPE_THETA:?}`")))]
        pub rope_theta: Option<f64> = None,
        /// Stretches the rotary frequencies for contexts longer than the model was first trained on.
        #[schemars(extend("x-example" = {
            "type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192
        }))]
        pub rope_scaling: Option<RopeScaling> = None,
        /// Added to the mean square inside every RMSNorm.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-default" = format!("`{NORM_EPS:?}`")))]
        pub norm_eps: Option<f64> = None,
        /// Shares the embedding's weights with the output head.
        #[schemars(extend("x-default" = "`false`"))]
        pub tie_embeddings: Option<bool> = None,
        /// Gives the query, key and value projections biases.
        #[schemars(extend("x-default" = true_for(Family::qkv_bias)))]
        pub qkv_bias: Option<bool> = None,
        /// Normalises each query and key head by an RMSNorm before RoPE.
        #[schemars(extend("x-default" = true_for(Family::qk_norm)))]
        pub qk_norm: Option<bool> = None,
        /// Probability of dropping an element after the embedding and at the end of each residual branch,
        /// while training.
        #[schemars(range(max = 0.99), extend("minimum" = 0.0))]
        pub dropout: f64 = 0.0,
        /// Standard deviation of the normal distribution that random weights start from; projections into the
        /// residual stream get `init_std / sqrt(2 * layers)`. Not used with `init_from`.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        pub init_std: f64 = 0.02,
        /// Weight of the z-loss, `z_loss * log(sum(exp(logits)))^2` a token, which keeps logits from
        /// drifting. 0 leaves it out.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        pub z_loss: f64 = 0.0,
    }
}

/// Scaling of rotary frequencies for long contexts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum RopeScaling {
    /// Divides every frequency by `factor` (position interpolation).
    Linear {
        /// Ratio of the new context to the original one.
        #[schemars(extend("minimum" = 1.0))]
        #[schemars(extend("x-example" = 4.0))]
        factor: f64,
    },
    /// Llama 3.1's rule: divides low frequencies by `factor`, leaves high ones, and blends those between.
    Llama3 {
        /// Ratio of the new context to the original one.
        #[schemars(extend("minimum" = 1.0))]
        #[schemars(extend("x-example" = 8.0))]
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are divided by `factor`.
        #[serde(default = "llama3_low_freq_factor")]
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-example" = 1.0))]
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are unchanged.
        #[serde(default = "llama3_high_freq_factor")]
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-example" = 4.0))]
        high_freq_factor: f64,
        /// Context length that the unscaled model was trained on, in tokens.
        #[schemars(range(min = 1, max = 1_073_741_824))]
        #[schemars(extend("x-unit" = "tokens", "x-example" = 8192))]
        original_max_position_embeddings: usize,
    },
}

fn llama3_low_freq_factor() -> f64 {
    1.0
}

fn llama3_high_freq_factor() -> f64 {
    4.0
}

impl From<RopeScaling> for xtrain_model::RopeScaling {
    fn from(scaling: RopeScaling) -> Self {
        match scaling {
            RopeScaling::Linear { factor } => Self::Linear { factor },
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings },
        }
    }
}

impl RopeScaling {
    /// The key's value for the scaling of a model; `None` without scaling.
    fn from_model(scaling: xtrain_model::RopeScaling) -> Option<Self> {
        match scaling {
            xtrain_model::RopeScaling::None => None,
            xtrain_model::RopeScaling::Linear { factor } => Some(Self::Linear { factor }),
            xtrain_model::RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => Some(Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            }),
        }
    }
}

/// The default of an option of the block, in words.
fn true_for(has: fn(Family) -> bool) -> String {
    format!("true for {}, else false", Family::listing(has, "`"))
}

impl ModelConfig {
    /// The family given, or the default one.
    pub fn family(&self) -> Family {
        self.family.unwrap_or(Family::QWEN3)
    }

    /// `kv_heads`, or as many as there are query heads.
    pub fn kv_heads(&self) -> Option<usize> {
        self.kv_heads.or(self.heads)
    }

    /// `head_dim`, or `dim / heads`, rounded down (a remainder is an error when the file is read).
    pub fn head_dim(&self) -> Option<usize> {
        self.head_dim.or_else(|| self.dim?.checked_div(self.heads?))
    }

    /// The model described by the keys and those of `experts` alone, or `None` while `dim`, `layers`,
    /// `heads`, `vocab_size` or, in a family with experts, their number is not known.
    ///
    /// `vocab_size` and `seq_len` (tokens) replace `vocab_size` and `max_position_embeddings` if these are
    /// not given.
    pub fn describe(
        &self,
        experts: &ExpertsConfig,
        vocab_size: Option<usize>,
        seq_len: usize,
    ) -> Option<Description> {
        let dim = self.dim?;
        let family = self.family();
        let ffn_dim = self.ffn_dim.unwrap_or_else(|| (8 * dim).div_ceil(3).next_multiple_of(64));
        let mixture = experts.describe(family, ffn_dim);
        if family.has_experts() && mixture.is_none() {
            return None;
        }
        Some(Description {
            family,
            dim,
            layers: self.layers?,
            heads: self.heads?,
            kv_heads: self.kv_heads()?,
            head_dim: self.head_dim()?,
            ffn_dim,
            mixture,
            vocab_size: self.vocab_size.or(vocab_size)?,
            max_position_embeddings: self.max_position_embeddings.unwrap_or(seq_len),
            window: None,
            attention_scale: None,
            rope_theta: self.rope_theta.unwrap_or(ROPE_THETA),
            rope_scaling: self.rope_scaling.map_or(xtrain_model::RopeScaling::None, Into::into),
            norm_eps: self.norm_eps.unwrap_or(NORM_EPS),
            tie_embeddings: self.tie_embeddings.unwrap_or(false),
            qkv_bias: self.qkv_bias.unwrap_or(family.qkv_bias()),
            qk_norm: self.qk_norm.unwrap_or(family.qk_norm()),
        })
    }

    /// Writes every number of `model` into the keys, as the resolved configuration shows them.
    pub(crate) fn fill_from(&mut self, model: &Description) {
        let Description { family, dim, layers, heads, kv_heads, head_dim, ffn_dim, vocab_size, .. } = *model;
        self.family = Some(family);
        self.dim = Some(dim);
        self.layers = Some(layers);
        self.heads = Some(heads);
        self.kv_heads = Some(kv_heads);
        self.head_dim = Some(head_dim);
        self.ffn_dim = Some(ffn_dim);
        self.vocab_size = Some(vocab_size);
        self.max_position_embeddings = Some(model.max_position_embeddings);
        self.rope_theta = Some(model.rope_theta);
        self.rope_scaling = RopeScaling::from_model(model.rope_scaling);
        self.norm_eps = Some(model.norm_eps);
        self.tie_embeddings = Some(model.tie_embeddings);
        self.qkv_bias = Some(model.qkv_bias);
        self.qk_norm = Some(model.qk_norm);
    }
}
