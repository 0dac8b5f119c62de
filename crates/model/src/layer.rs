//! A layer of a model as data: its mixer, its feed-forward, and the linear layers of both. Layers of a model
//! may differ.
//!
//! The linear layers are one list ([`Layer::linears`]): parameters, tracing, precision recipes, plans and
//! exports read it.

use crate::ModelError;
use xtrain_ops::qk_norm_rope::RopeScaling;

/// A transformer block: the mixer reads other tokens, the feed-forward each token by itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// The first half-block.
    pub mixer: Mixer,
    /// The second half-block.
    pub feed_forward: FeedForward,
}

/// The half-block in which tokens see each other.
#[derive(Clone, Debug, PartialEq)]
pub enum Mixer {
    /// Causal self-attention.
    Attention(SelfAttention),
}

/// The half-block that computes on each token separately.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForward {
    /// One SwiGLU for all tokens.
    Dense(Mlp),
}

/// Grouped-query attention with rotary embeddings.
#[derive(Clone, Debug, PartialEq)]
pub struct SelfAttention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even. Need not be `dim / heads`.
    pub head_dim: usize,
    /// The positive factor on the products of queries and keys; `None` is 1 / sqrt(`head_dim`).
    pub scale: Option<f32>,
    /// The table of rotation angles.
    pub rotary: Rotary,
    /// Biases on the q, k and v projections (Qwen2).
    pub qkv_bias: bool,
    /// An RMSNorm on each query and key head (Qwen3).
    pub qk_norm: bool,
}

/// Rotary position embeddings (arXiv 2104.09864).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotary {
    /// Base of the rotation frequencies; positive.
    pub theta: f64,
    /// Stretching of the frequencies for longer contexts.
    pub scaling: RopeScaling,
}

/// SwiGLU between two projections (arXiv 2002.05202).
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// Columns of the gate and of the up projection.
    pub width: usize,
}

/// A linear layer of a block, or the head.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    /// Its place in a block, e.g. `attn.o_proj`, or [`HEAD`].
    pub site: &'static str,
    /// Columns of its input.
    pub inputs: usize,
    /// The modules of a Hugging Face model that it fuses, by their names within the block, each with its
    /// share of the outputs.
    pub modules: Vec<(&'static str, usize)>,
    /// A bias on the outputs.
    pub bias: bool,
    /// True if its output is added to the residual stream.
    pub is_residual: bool,
}

/// The site of the linear layer after the blocks, by which recipes name it.
pub const HEAD: &str = "lm_head";

/// The site of attention's output projection, whose input recipes may save in fewer bits.
pub(crate) const O_PROJ: &str = "attn.o_proj";

impl Layer {
    /// The linear layers of the block, in the order in which it applies them; `dim` is the width of the
    /// residual stream.
    pub fn linears(&self, dim: usize) -> Vec<LinearSpec> {
        let mut all = Vec::new();
        match &self.mixer {
            Mixer::Attention(attention) => all.extend([attention.qkv_proj(dim), attention.o_proj(dim)]),
        }
        match &self.feed_forward {
            FeedForward::Dense(mlp) => all.extend([mlp.gate_up_proj(dim), mlp.down_proj(dim)]),
        }
        all
    }

    /// Numbers that the key/value cache holds for a token.
    pub fn cached_numbers(&self) -> usize {
        match &self.mixer {
            Mixer::Attention(attention) => 2 * attention.kv_heads * attention.head_dim,
        }
    }

    /// Sizes by the names of run files, each at least 1 and within `i32`.
    pub(crate) fn sizes(&self) -> Vec<(&'static str, usize)> {
        let mut sizes = Vec::new();
        match &self.mixer {
            Mixer::Attention(a) => {
                sizes.extend([("heads", a.heads), ("kv_heads", a.kv_heads), ("head_dim", a.head_dim)]);
            }
        }
        match &self.feed_forward {
            FeedForward::Dense(mlp) => sizes.push(("ffn_dim", mlp.width)),
        }
        sizes
    }

    /// Checks the conditions that sizes alone do not show.
    pub(crate) fn validate(&self) -> Result<(), ModelError> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.validate(),
        }
    }
}

impl SelfAttention {
    /// Columns of the queries of all heads, and of attention's output.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// The fused projection to queries, keys and values.
    pub fn qkv_proj(&self, dim: usize) -> LinearSpec {
        let (q, kv) = (self.query_dim(), self.kv_heads * self.head_dim);
        LinearSpec {
            site: "attn.qkv_proj",
            inputs: dim,
            modules: vec![("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)],
            bias: self.qkv_bias,
            is_residual: false,
        }
    }

    /// The projection of attention's output.
    pub fn o_proj(&self, dim: usize) -> LinearSpec {
        LinearSpec {
            site: O_PROJ,
            inputs: self.query_dim(),
            modules: vec![("self_attn.o_proj", dim)],
            bias: false,
            is_residual: true,
        }
    }

    fn validate(&self) -> Result<(), ModelError> {
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ModelError::Sizes(format!(
                "heads ({}) must be a multiple of kv_heads ({})",
                self.heads, self.kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(ModelError::Sizes(format!(
                "head_dim is {}; rotary embeddings rotate pairs, so it must be even",
                self.head_dim
            )));
        }
        if let Some(scale) = self.scale.filter(|&scale| !is_positive_f32(f64::from(scale))) {
            return Err(ModelError::Sizes(format!(
                "attention's scale is {scale:?}; it must be a positive number"
            )));
        }
        self.rotary.validate()
    }
}

impl Mlp {
    /// The fused gate and up projections.
    pub fn gate_up_proj(&self, dim: usize) -> LinearSpec {
        LinearSpec {
            site: "mlp.gate_up_proj",
            inputs: dim,
            modules: vec![("mlp.gate_proj", self.width), ("mlp.up_proj", self.width)],
            bias: false,
            is_residual: false,
        }
    }

    /// The projection back to the residual stream.
    pub fn down_proj(&self, dim: usize) -> LinearSpec {
        LinearSpec {
            site: "mlp.down_proj",
            inputs: self.width,
            modules: vec![("mlp.down_proj", dim)],
            bias: false,
            is_residual: true,
        }
    }
}

impl LinearSpec {
    /// Columns of its output.
    pub fn outputs(&self) -> usize {
        self.modules.iter().map(|(_, rows)| rows).sum()
    }
}

impl Rotary {
    fn validate(&self) -> Result<(), ModelError> {
        let fail = |message: String| Err(ModelError::Sizes(message));
        let largest = i32::MAX as usize;
        // Kernels compute angles in f32: position / theta must not overflow it.
        if !is_positive_f32(self.theta) || !is_positive_f32(largest as f64 / self.theta) {
            return fail(format!("rope_theta is {:?}; it must be a positive number within f32", self.theta));
        }
        let factor = match self.scaling {
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
        } = self.scaling
        {
            if !is_positive_f32(low) || high as f32 <= low as f32 || !(high as f32).is_finite() {
                return fail(format!(
                    "rope_scaling.low_freq_factor is {low:?} and high_freq_factor {high:?}; both must be positive, and the \
                     second the larger"
                ));
            }
            if !(1..=largest).contains(&context) {
                return fail(format!(
                    "rope_scaling.original_max_position_embeddings is {context}; it must be at least 1 and at most {largest}"
                ));
            }
        }
        Ok(())
    }
}

/// True if a number is positive and finite in f32, in which kernels compute with it.
pub(crate) fn is_positive_f32(x: f64) -> bool {
    x as f32 > 0.0 && (x as f32).is_finite()
}
