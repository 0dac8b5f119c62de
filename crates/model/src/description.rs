//! A model as config.json and run files describe it: one number for each size, from which all layers follow.

use crate::{
    Architecture, BlockSet, Experts, Family, FeedForward, Layer, Mixer, Mixture, Mlp, ModelError, Rotary,
    SelfAttention,
};
use xtrain_ops::qk_norm_rope::RopeScaling;

/// The sizes and options of a model whose layers are equal, but that some may be mixtures of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Description {
    /// The family under whose name the model is exported.
    pub family: Family,
    /// Width of the residual stream.
    pub dim: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads of each attention.
    pub heads: usize,
    /// Key and value heads of each attention.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Width of the feed-forward's gate and up projections, in blocks without experts.
    pub ffn_dim: usize,
    /// The experts, if the family has them.
    pub mixture: Option<Mixture>,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// The longest sequence that the model is meant for, in tokens.
    pub max_position_embeddings: usize,
    /// The longest sequence in which sliding windows of the model's layers change nothing, in tokens; `None`
    /// without windows.
    pub window: Option<usize>,
    /// The factor on the products of queries and keys; `None` is 1 / sqrt(`head_dim`).
    pub attention_scale: Option<f32>,
    /// Base of the rotation frequencies.
    pub rope_theta: f64,
    /// Stretching of the frequencies for longer contexts.
    pub rope_scaling: RopeScaling,
    /// Added to the mean square in every norm.
    pub norm_eps: f64,
    /// The head reads the embedding's weights.
    pub tie_embeddings: bool,
    /// Biases on the q, k and v projections.
    pub qkv_bias: bool,
    /// An RMSNorm on each query and key head.
    pub qk_norm: bool,
}

impl Description {
    /// The longest sequence that the model can be run on, in tokens.
    pub fn context(&self) -> usize {
        Architecture::context_of(self.max_position_embeddings, self.window)
    }

    /// The model that it describes; [`Architecture::validate`] checks its sizes.
    ///
    /// # Errors
    /// More layers than a model can have; experts that [`Mixture::check`] refuses.
    pub fn architecture(&self) -> Result<Architecture, ModelError> {
        Architecture::check_layers(self.layers)?;
        let attention = SelfAttention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.attention_scale,
            rotary: Rotary { theta: self.rope_theta, scaling: self.rope_scaling },
            qkv_bias: self.qkv_bias,
            qk_norm: self.qk_norm,
        };
        let dense = FeedForward::Dense(Mlp { width: self.ffn_dim, activation: self.family.activation() });
        let experts = match &self.mixture {
            None => None,
            Some(mixture) => {
                let modules = mixture.modules(self.family, self.layers).map_err(|(_, error)| error)?;
                Some((mixture.dense, FeedForward::Experts(mixture.layer(modules, self.family.activation()))))
            }
        };
        let layer = |block: usize| {
            let feed_forward = match &experts {
                Some((dense_blocks, experts)) if !dense_blocks.contains(block) => experts.clone(),
                _ => dense.clone(),
            };
            Layer { mixer: Mixer::Attention(attention.clone()), feed_forward }
        };
        Ok(Architecture {
            family: self.family,
            dim: self.dim,
            layers: (0..self.layers).map(layer).collect(),
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            window: self.window,
            norm: self.family.norm(self.norm_eps),
            tie_embeddings: self.tie_embeddings,
            adapter: None,
        })
    }
}

impl Architecture {
    /// The description that gives this model.
    ///
    /// # Errors
    /// Layers that differ otherwise than some being mixtures: no config.json of our families describes them.
    pub fn description(&self) -> Result<Description, ModelError> {
        let differ = || {
            ModelError::Sizes(format!(
                "the {} layers differ, which config.json of a {} model cannot describe",
                self.layers.len(),
                self.family.name()
            ))
        };
        let Some(Layer { mixer: Mixer::Attention(attention), .. }) = self.layers.first() else {
            return Err(differ());
        };
        let feed_forwards = || self.layers.iter().map(|layer| &layer.feed_forward);
        let mlps = || feed_forwards().filter_map(FeedForward::dense);
        let mixtures = || feed_forwards().filter_map(FeedForward::experts);
        let (mlp, experts) = (mlps().next(), mixtures().next());
        let is_alike = self.layers.iter().all(|layer| layer.mixer == self.layers[0].mixer)
            && mlps().all(|own| Some(own) == mlp)
            && mixtures().all(|own| Some(own) == experts);
        let Some(ffn_dim) = mlp.map(|mlp| mlp.width).or(experts.map(|e| e.ffn_dim)).filter(|_| is_alike)
        else {
            return Err(differ());
        };
        let dense = || feed_forwards().enumerate().filter(|(_, own)| own.dense().is_some());
        let mixture = |experts: &Experts| Mixture {
            count: experts.count,
            ffn_dim: experts.ffn_dim,
            router: experts.router,
            shared_ffn_dim: experts.shared.as_ref().map_or(0, |shared| shared.width),
            dense: BlockSet::from_iter(dense().map(|(block, _)| block)),
        };
        Ok(Description {
            family: self.family,
            dim: self.dim,
            layers: self.layers.len(),
            heads: attention.heads,
            kv_heads: attention.kv_heads,
            head_dim: attention.head_dim,
            ffn_dim,
            mixture: experts.map(mixture),
            vocab_size: self.vocab_size,
            max_position_embeddings: self.max_position_embeddings,
            window: self.window,
            attention_scale: attention.scale,
            rope_theta: attention.rotary.theta,
            rope_scaling: attention.rotary.scaling,
            norm_eps: self.norm.eps(),
            tie_embeddings: self.tie_embeddings,
            qkv_bias: attention.qkv_bias,
            qk_norm: attention.qk_norm,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Activation;

    fn small() -> Description {
        Description {
            family: Family::QWEN3,
            dim: 20,
            layers: 3,
            heads: 4,
            kv_heads: 2,
            head_dim: 6,
            ffn_dim: 28,
            mixture: None,
            vocab_size: 37,
            max_position_embeddings: 64,
            window: None,
            attention_scale: None,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            norm_eps: 1e-6,
            tie_embeddings: false,
            qkv_bias: true,
            qk_norm: true,
        }
    }

    #[test]
    fn a_description_and_its_model_say_the_same() {
        let model = small().architecture().expect("a model");
        assert_eq!(model.validate(), Ok(()));
        assert_eq!(model.description(), Ok(small()));
        assert_eq!(model.to_string(), "qwen3, 3 layers, dim 20, 4/2 heads of 6, ffn 28, vocabulary 37");
        assert_eq!(model.title(), "qwen3, 3 layers, dim 20, 4 heads");
    }

    #[test]
    fn layers_may_differ_and_are_then_no_description() {
        let mut model = small().architecture().expect("a model");
        model.layers[0].feed_forward = FeedForward::Dense(Mlp { width: 90, activation: Activation::Swiglu });
        let Mixer::Attention(last) = &mut model.layers[2].mixer;
        last.heads = 2;
        last.scale = Some(0.25);
        last.qk_norm = false;
        assert_eq!(model.validate(), Ok(()));
        assert!(model.description().is_err_and(|e| e.to_string().contains("differ")));
        let shape = |name: &str| {
            let all = model.parameters();
            all.into_iter().find(|p| p.name == name).map(|p| p.shape)
        };
        assert_eq!(shape("blocks.0.mlp.down_proj.weight"), Some(vec![20, 90]));
        assert_eq!(shape("blocks.1.mlp.down_proj.weight"), Some(vec![20, 28]));
        assert_eq!(shape("blocks.1.attn.qkv_proj.weight"), Some(vec![48, 20]));
        assert_eq!(shape("blocks.2.attn.qkv_proj.weight"), Some(vec![36, 20]));
        assert_eq!(shape("blocks.2.attn.q_norm.weight"), None);
        assert_eq!(
            model.to_string(),
            "qwen3, 3 layers, dim 20, 1 with 4/2 heads of 6, ffn 90, 1 with 4/2 heads of 6, ffn 28, 1 with 2/2 heads of 6, ffn 28, \
             vocabulary 37"
        );
    }

    #[test]
    fn numbers_of_layers_that_no_model_has_are_refused() {
        for (layers, message) in [(0, "layers is 0"), (1 << 60, "more than a model can have (1024)")] {
            let model = Description { layers, ..small() }.architecture().and_then(|model| model.validate());
            assert!(model.is_err_and(|e| e.to_string().contains(message)), "{layers}");
        }
    }
}
