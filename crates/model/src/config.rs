//! The sizes and options of a model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use xtrain_ops::qk_norm_rope::RopeScaling;

/// Everything that determines a model but its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// Under which name the model goes elsewhere.
    pub family: Family,
    /// Width of the residual stream.
    pub dim: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads` (grouped-query attention).
    pub kv_heads: usize,
    /// Width of a head; even. Need not be `dim / heads`.
    pub head_dim: usize,
    /// Width of the feed-forward's gate and up projections.
    pub ffn_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The longest sequence that the model is meant for, in tokens.
    pub max_position_embeddings: usize,
    /// Base of the rotation frequencies; positive.
    pub rope_theta: f64,
    /// How the frequencies are stretched for longer contexts.
    pub rope_scaling: RopeScaling,
    /// Added to the mean square in every norm; positive.
    pub norm_eps: f64,
    /// Whether the head reads the embedding's weights.
    pub tie_embeddings: bool,
    /// Whether the q, k and v projections have biases (Qwen2).
    pub qkv_bias: bool,
    /// Whether q and k are normed per head (Qwen3).
    pub qk_norm: bool,
}

/// The families that share this decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama 2 and 3 (arXiv 2307.09288, 2407.21783).
    Llama,
    /// Qwen2 and 2.5 (arXiv 2407.10671): biases on q, k and v.
    Qwen2,
    /// Qwen3 (arXiv 2505.09388): norms on q and k.
    Qwen3,
}

/// What is wrong with a model's description, and what to do.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ModelError {
    /// Sizes that contradict each other.
    #[error("{0}")]
    Sizes(String),
    /// A file of a Hugging Face folder that cannot be taken as it is.
    #[error("{file}: {message}")]
    HuggingFace {
        /// `config.json` or `generation_config.json`.
        file: &'static str,
        /// What is wrong with it.
        message: String,
    },
}

impl Family {
    /// The name in config files and Hugging Face's `model_type`.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Qwen3 => "qwen3",
        }
    }

    /// Whether the family's query, key and value projections have biases.
    pub const fn qkv_bias(self) -> bool {
        matches!(self, Family::Qwen2)
    }

    /// Whether the family norms each query and key head.
    pub const fn qk_norm(self) -> bool {
        matches!(self, Family::Qwen3)
    }
}

impl Architecture {
    /// The largest of every other size: what `i32` indices in kernels and files can name.
    const MAX_SIZE: usize = i32::MAX as usize;

    /// The most blocks; the deepest models that were ever trained have a thousand, and plans of more would take minutes.
    pub const MAX_LAYERS: usize = 1024;

    /// The most parameters: a hundred thousand times today's models, and few enough that no count of bytes overflows.
    const MAX_PARAMETERS: u128 = 1 << 57;

    /// Checks that the sizes fit each other.
    pub fn validate(&self) -> Result<(), ModelError> {
        let fail = |message: String| Err(ModelError::Sizes(message));
        let sizes = [
            ("dim", self.dim),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn_dim", self.ffn_dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = sizes.iter().find(|(_, n)| *n == 0) {
            return fail(format!("{name} is 0; it must be at least 1"));
        }
        let layers = [("layers", self.layers, Self::MAX_LAYERS)];
        let bounded = sizes.map(|(name, size)| (name, size, Self::MAX_SIZE));
        if let Some((name, size, most)) = layers.iter().chain(&bounded).find(|(_, n, most)| n > most) {
            return fail(format!("{name} = {size} is more than a model can have ({most}); check for a slip"));
        }
        let parameters = self.parameter_estimate();
        if parameters > Self::MAX_PARAMETERS {
            return fail(format!(
                "the sizes make a model of {:.1e} parameters; check them for a slip",
                parameters as f64
            ));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return fail(format!(
                "heads ({}) must be a multiple of kv_heads ({})",
                self.heads, self.kv_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return fail(format!(
                "head_dim is {}; rotary embeddings rotate pairs, so it must be even",
                self.head_dim
            ));
        }
        // Kernels compute with them in f32, and angles must not overflow it either.
        let positive = |x: f64| x as f32 > 0.0 && (x as f32).is_finite();
        if !positive(self.rope_theta) || !positive(Self::MAX_SIZE as f64 / self.rope_theta) {
            return fail(format!(
                "rope_theta is {:?}; it must be a positive number within f32",
                self.rope_theta
            ));
        }
        if !positive(self.norm_eps) {
            return fail(format!("norm_eps is {:?}; it must be a positive number within f32", self.norm_eps));
        }
        self.validate_scaling()
    }

    fn validate_scaling(&self) -> Result<(), ModelError> {
        let fail = |message: String| Err(ModelError::Sizes(message));
        let factor = match self.rope_scaling {
            RopeScaling::None => return Ok(()),
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } => factor,
        };
        if !(1.0..=f64::from(f32::MAX)).contains(&factor) {
            return fail(format!("rope_scaling.factor is {factor:?}; it must be at least 1 and within f32"));
        }
        if let RopeScaling::Llama3 {
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: context,
            ..
        } = self.rope_scaling
        {
            let apart = (low as f32) > 0.0 && (high as f32) > low as f32 && (high as f32).is_finite();
            if !apart {
                return fail(format!(
                    "rope_scaling.low_freq_factor is {low:?} and high_freq_factor {high:?}; both must be positive, and the \
                     second the larger"
                ));
            }
            if !(1..=Self::MAX_SIZE).contains(&context) {
                return fail(format!(
                    "rope_scaling.original_max_position_embeddings is {context}; it must be at least 1 and at most {}",
                    Self::MAX_SIZE
                ));
            }
        }
        Ok(())
    }

    /// The parameters of the matrices, in numbers that no sizes overflow.
    fn parameter_estimate(&self) -> u128 {
        let wide = |n: usize| n as u128;
        let attention = (2 * wide(self.heads) + 2 * wide(self.kv_heads)) * wide(self.head_dim);
        let block = (attention + 3 * wide(self.ffn_dim)) * wide(self.dim);
        wide(self.layers) * block + 2 * wide(self.vocab_size) * wide(self.dim)
    }

    /// Columns of the fused q, k, v projection.
    pub fn qkv_dim(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Columns of the attention's output before its projection.
    pub fn attention_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Trained numbers in all, tied weights counted once.
    pub fn parameter_count(&self) -> usize {
        self.parameters().iter().map(|p| p.shape.iter().product::<usize>()).sum()
    }

    /// Floating-point operations of training on one token, as PaLM counts them (arXiv 2204.02311, appendix B):
    /// 6 per parameter but the input embedding's, and 12 * layers * attention width * sequence length for attention's scores,
    /// without subtracting what the causal mask leaves out. MFU is this times tokens per second over the card's dense peak.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let embedding = if self.tie_embeddings { 0 } else { self.vocab_size * self.dim };
        let weights = (self.parameter_count() - embedding) as f64;
        6.0 * weights + 12.0 * (self.layers * self.attention_dim()) as f64 * seq_len as f64
    }
}
