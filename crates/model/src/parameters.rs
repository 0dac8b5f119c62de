//! The parameters of a model: names, shapes, how they start, whether they decay, and what they are called elsewhere.
//!
//! The list is the one place for all of it: tracing declares by name what it finds here ([`Parameters`]).

use crate::Architecture;
use std::collections::HashMap;
use xtrain_program::{Tracer, ValueId};
use xtrain_tensor::{DType, Shape, TensorType};

/// A parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Our name.
    pub name: String,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// How it starts.
    pub init: Init,
    /// Whether weight decay applies: matrices, but not embeddings.
    pub decay: bool,
    /// The tensors of a Hugging Face folder that it consists of, stacked along the first dimension.
    pub parts: Vec<Part>,
}

/// A tensor of a Hugging Face folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its name there.
    pub name: String,
    /// How many of our rows it is.
    pub rows: usize,
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All ones: norms.
    Ones,
    /// All zeros: biases.
    Zeros,
    /// Normal numbers; the standard deviation as a multiple of the run's `init_std`.
    Normal(f32),
}

/// Names of the parameters within a block, and of those outside.
pub(crate) mod names {
    pub(crate) const EMBED: &str = "embed.weight";
    pub(crate) const FINAL_NORM: &str = "norm.weight";
    pub(crate) const HEAD: &str = "lm_head.weight";

    pub(crate) fn block(layer: usize, rest: &str) -> String {
        format!("blocks.{layer}.{rest}")
    }
}

/// The parameters of a model by name, to be declared while it is traced.
pub(crate) struct Parameters {
    shapes: HashMap<String, Vec<usize>>,
}

impl Parameters {
    pub(crate) fn of(model: &Architecture) -> Self {
        Parameters { shapes: model.parameters().into_iter().map(|p| (p.name, p.shape)).collect() }
    }

    /// The parameter called `name`, in f32.
    ///
    /// # Panics
    /// If the model's list does not have it: a parameter that is not initialised, saved and exported would be a bug.
    pub(crate) fn declare(&self, t: &mut Tracer, name: &str) -> ValueId {
        let shape = self
            .shapes
            .get(name)
            .unwrap_or_else(|| panic!("`{name}` is not in the model's list of parameters"));
        t.parameter(name, TensorType::new(DType::F32, Shape::new(shape)))
    }
}

impl Architecture {
    /// All parameters, in the order in which the model uses them.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let d = self.dim;
        let whole = |theirs: String, rows: usize| vec![Part { name: theirs, rows }];
        let norm = |name: String, width: usize, theirs: String| ParameterSpec {
            name,
            shape: vec![width],
            init: Init::Ones,
            decay: false,
            parts: whole(theirs, width),
        };
        // GPT-2's rule (Radford et al. 2019, section 2.3): what adds to the residual stream starts smaller by sqrt(additions).
        let residual = Init::Normal(1.0 / (2.0 * self.layers.max(1) as f32).sqrt());
        let matrix = |name: String, rows: usize, cols: usize, init: Init, parts: Vec<Part>| ParameterSpec {
            name,
            shape: vec![rows, cols],
            init,
            decay: true,
            parts,
        };
        let mut all = vec![ParameterSpec {
            decay: false,
            ..matrix(
                names::EMBED.into(),
                self.vocab_size,
                d,
                Init::Normal(1.0),
                whole("model.embed_tokens.weight".into(), self.vocab_size),
            )
        }];
        let (q, kv) = (self.attention_dim(), self.kv_heads * self.head_dim);
        for layer in 0..self.layers {
            let ours = |rest: &str| names::block(layer, rest);
            let theirs = |rest: &str| format!("model.layers.{layer}.{rest}");
            let qkv = |what: &str| {
                let part = |n: &str, rows| Part { name: theirs(&format!("self_attn.{n}_proj.{what}")), rows };
                vec![part("q", q), part("k", kv), part("v", kv)]
            };
            all.push(norm(ours("attn_norm.weight"), d, theirs("input_layernorm.weight")));
            all.push(matrix(
                ours("attn.qkv_proj.weight"),
                self.qkv_dim(),
                d,
                Init::Normal(1.0),
                qkv("weight"),
            ));
            if self.qkv_bias {
                all.push(ParameterSpec {
                    name: ours("attn.qkv_proj.bias"),
                    shape: vec![self.qkv_dim()],
                    init: Init::Zeros,
                    decay: false,
                    parts: qkv("bias"),
                });
            }
            if self.qk_norm {
                all.push(norm(ours("attn.q_norm.weight"), self.head_dim, theirs("self_attn.q_norm.weight")));
                all.push(norm(ours("attn.k_norm.weight"), self.head_dim, theirs("self_attn.k_norm.weight")));
            }
            let o_proj = whole(theirs("self_attn.o_proj.weight"), d);
            all.push(matrix(ours("attn.o_proj.weight"), d, q, residual, o_proj));
            all.push(norm(ours("mlp_norm.weight"), d, theirs("post_attention_layernorm.weight")));
            let gate_up = ["gate", "up"]
                .map(|n| Part { name: theirs(&format!("mlp.{n}_proj.weight")), rows: self.ffn_dim });
            all.push(matrix(
                ours("mlp.gate_up_proj.weight"),
                2 * self.ffn_dim,
                d,
                Init::Normal(1.0),
                gate_up.to_vec(),
            ));
            let down = whole(theirs("mlp.down_proj.weight"), d);
            all.push(matrix(ours("mlp.down_proj.weight"), d, self.ffn_dim, residual, down));
        }
        all.push(norm(names::FINAL_NORM.into(), d, "model.norm.weight".into()));
        if !self.tie_embeddings {
            let parts = whole("lm_head.weight".into(), self.vocab_size);
            all.push(matrix(names::HEAD.into(), self.vocab_size, d, Init::Normal(1.0), parts));
        }
        all
    }
}
