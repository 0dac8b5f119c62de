//! A model without its weights: its widths, its layers, and the sizes that follow from them.

use crate::layer::{HEAD, is_positive_f32};
use crate::{Adapter, Family, FeedForward, Layer, LinearSpec, Mixer, ModelError, Norm};
use std::fmt;
use xtrain_program::Parallel;

/// Everything that determines a model but its weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Architecture {
    /// The family under whose name the model is exported.
    pub family: Family,
    /// Width of the residual stream.
    pub dim: usize,
    /// The transformer blocks, first to last; at least one.
    pub layers: Vec<Layer>,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The longest sequence that the model is meant for, in tokens.
    pub max_position_embeddings: usize,
    /// The longest sequence in which sliding windows of the model's layers change nothing, in tokens; `None`
    /// without windows. Longer ones are refused, because windows are not computed.
    pub window: Option<usize>,
    /// The norm before each half-block and after the blocks.
    pub norm: Norm,
    /// The head reads the embedding's weights.
    pub tie_embeddings: bool,
    /// The adapters that are trained in place of the model; None if it is trained itself.
    pub adapter: Option<Adapter>,
}

impl Architecture {
    /// Upper bound of every other size: `i32` indices in kernels and files.
    const MAX_SIZE: usize = i32::MAX as usize;

    /// The most blocks; the deepest models that were ever trained have a thousand, and plans of more would
    /// take minutes.
    pub const MAX_LAYERS: usize = 1024;

    /// The most parameters: a hundred thousand times today's models, and few enough that no count of bytes
    /// overflows.
    const MAX_PARAMETERS: u128 = 1 << 57;

    /// Checks that the sizes fit each other.
    pub fn validate(&self) -> Result<(), ModelError> {
        let fail = |message: String| Err(ModelError::Sizes(message));
        let own = [
            ("dim", self.dim),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        let sizes = || self.layers.iter().flat_map(Layer::sizes).chain(own);
        if let Some((name, _)) =
            [("layers", self.layers.len())].into_iter().chain(sizes()).find(|(_, n)| *n == 0)
        {
            return fail(format!("{name} is 0; it must be at least 1"));
        }
        Self::check_layers(self.layers.len())?;
        let bounded = sizes().find(|(_, size)| *size > Self::MAX_SIZE);
        if let Some((name, size)) = bounded {
            return Err(too_large(name, size, Self::MAX_SIZE));
        }
        let parameters = self.parameter_estimate();
        if parameters > Self::MAX_PARAMETERS {
            return fail(format!(
                "the sizes make a model of {:.1e} parameters; check them for a typo",
                parameters as f64
            ));
        }
        self.layers.iter().try_for_each(Layer::validate)?;
        let eps = self.norm.eps();
        if !is_positive_f32(eps) {
            return fail(format!("norm_eps is {eps:?}; it must be a positive number within f32"));
        }
        Ok(())
    }

    /// The longest sequence that the model can be run on, in tokens.
    pub fn context(&self) -> usize {
        Self::context_of(self.max_position_embeddings, self.window)
    }

    /// The longest sequence for a model with so many positions and this window.
    pub(crate) fn context_of(max_position_embeddings: usize, window: Option<usize>) -> usize {
        window.map_or(max_position_embeddings, |window| window.min(max_position_embeddings))
    }

    /// Refuses a number of layers that no model has.
    pub(crate) fn check_layers(layers: usize) -> Result<(), ModelError> {
        match layers <= Self::MAX_LAYERS {
            true => Ok(()),
            false => Err(too_large("layers", layers, Self::MAX_LAYERS)),
        }
    }

    /// The parameters of the matrices, in numbers that no sizes overflow.
    fn parameter_estimate(&self) -> u128 {
        let matrix = |linear: LinearSpec| linear.inputs as u128 * linear.rows() as u128;
        let routers = self.layers.iter().filter_map(|layer| layer.router(self.dim));
        let linears = self.linears().map(|(_, linear)| linear).chain(routers);
        linears.map(matrix).sum::<u128>() + 2 * matrix(self.head())
    }

    /// The linear layers of the blocks with the number of their block, in the order in which the model
    /// applies them.
    pub fn linears(&self) -> impl Iterator<Item = (usize, LinearSpec)> {
        let of = |(block, layer): (usize, &Layer)| {
            layer.linears(self.dim).into_iter().map(move |linear| (block, linear))
        };
        self.layers.iter().enumerate().flat_map(of)
    }

    /// The extents that the ranks of a tensor group divide among them, with their names.
    pub fn tensor_extents(&self) -> Vec<(usize, &'static str)> {
        let mut extents = Vec::new();
        for layer in &self.layers {
            let Mixer::Attention(attention) = &layer.mixer;
            extents.push((attention.kv_heads, "key/value heads"));
            extents.push((attention.heads, "heads"));
            extents.extend(match &layer.feed_forward {
                FeedForward::Dense(mlp) => Some((mlp.width, "columns of the feed-forward (ffn_dim)")),
                FeedForward::Experts(experts) => {
                    let shared = experts.shared.as_ref();
                    shared.map(|mlp| (mlp.width, "columns of the shared expert (shared_ffn_dim)"))
                }
            });
        }
        extents
    }

    /// The parts in which ranks compute each block: as many as there are tensor ranks or, for equal bits on
    /// all meshes ([`AnyMesh`](xtrain_program::Reduce::AnyMesh)), [`Architecture::mesh_parts`].
    pub fn parts(&self, parallel: &Parallel) -> usize {
        if parallel.reduce.is_any_mesh() { self.mesh_parts() } else { parallel.tensor }
    }

    /// The parts in which each block is computed on all meshes alike: the most, at most 8, that divide what
    /// the ranks of a tensor group divide.
    pub fn mesh_parts(&self) -> usize {
        let extents = self.tensor_extents();
        let divides = |n: &usize| extents.iter().all(|(extent, _)| extent.is_multiple_of(*n));
        [8, 4, 2].into_iter().find(divides).unwrap_or(1)
    }

    /// The sites of the blocks' linear layers, each once, in the order in which they first appear.
    pub fn linear_sites(&self) -> Vec<&'static str> {
        let mut sites = Vec::new();
        for (_, linear) in self.linears() {
            if !sites.contains(&linear.site) {
                sites.push(linear.site);
            }
        }
        sites
    }

    /// The linear layer after the blocks.
    pub fn head(&self) -> LinearSpec {
        LinearSpec {
            site: HEAD,
            inputs: self.dim,
            module: "",
            parts: vec![("lm_head", self.vocab_size)],
            bias: false,
            is_residual: false,
            experts: None,
            whole: None,
        }
    }

    /// The first `layers` blocks of the model, with its embedding and head.
    pub fn truncated(&self, layers: usize) -> Architecture {
        Architecture { layers: self.layers.iter().take(layers).cloned().collect(), ..self.clone() }
    }

    /// Columns of the widest activation.
    pub fn widest(&self) -> usize {
        let linears = self.linears().flat_map(|(_, linear)| [linear.inputs, linear.outputs()]);
        linears.chain([self.dim, self.vocab_size]).max().unwrap_or_default()
    }

    /// Numbers that the key/value caches of all layers hold for a token.
    pub fn cached_numbers(&self) -> usize {
        self.layers.iter().map(Layer::cached_numbers).sum()
    }

    /// All that kernels' times depend on, as the key of a cache on disk.
    pub fn key(&self) -> String {
        let alike: Vec<String> = (self.layers.chunk_by(|a, b| a == b))
            .map(|layers| {
                let Mixer::Attention(a) = &layers[0].mixer;
                let scale = a.scale.map(|scale| format!(", scale {scale:?}")).unwrap_or_default();
                let (bias, norm) = (a.qkv_bias, a.qk_norm);
                format!("{} x ({}, qkv_bias {bias}, qk_norm {norm}{scale})", layers.len(), layers[0])
            })
            .collect();
        let (dim, vocab_size, tied) = (self.dim, self.vocab_size, self.tie_embeddings);
        format!("dim {dim}, vocab_size {vocab_size}, tie_embeddings {tied}, {}", alike.join(", "))
    }

    /// The model in a few words: `qwen3, 4 layers, dim 192, 6 heads`.
    pub fn title(&self) -> String {
        let mut heads = Vec::new();
        for Layer { mixer: Mixer::Attention(attention), .. } in &self.layers {
            let own = attention.heads.to_string();
            if heads.last() != Some(&own) {
                heads.push(own);
            }
        }
        format!(
            "{}, {} layers, dim {}, {} heads",
            self.family.name(),
            self.layers.len(),
            self.dim,
            heads.join(" then ")
        )
    }
}

/// All sizes of the model in a line.
impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {} layers, dim {}, ", self.family.name(), self.layers.len(), self.dim)?;
        let mut kinds: Vec<(&Layer, usize)> = Vec::new();
        for layer in &self.layers {
            match kinds.iter_mut().find(|(of, _)| *of == layer) {
                Some((_, count)) => *count += 1,
                None => kinds.push((layer, 1)),
            }
        }
        for (layer, count) in &kinds {
            if kinds.len() > 1 {
                write!(f, "{count} with ")?;
            }
            write!(f, "{layer}, ")?;
        }
        write!(f, "vocabulary {}", self.vocab_size)
    }
}

/// The sizes of the layer: `32/8 heads of 128, ffn 14336`.
impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.mixer {
            Mixer::Attention(a) => write!(f, "{}/{} heads of {}", a.heads, a.kv_heads, a.head_dim)?,
        }
        match &self.feed_forward {
            FeedForward::Dense(mlp) => write!(f, ", ffn {}", mlp.width),
            FeedForward::Experts(e) => {
                write!(f, ", {} of {} experts of {}", e.router.top_k, e.count, e.ffn_dim)?;
                match &e.shared {
                    Some(shared) => write!(f, " and a shared one of {}", shared.width),
                    None => Ok(()),
                }
            }
        }
    }
}

fn too_large(name: &str, size: usize, most: usize) -> ModelError {
    ModelError::Sizes(format!("{name} = {size} is more than a model can have ({most}); check for a typo"))
}
