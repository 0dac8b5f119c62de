//! The parameters of a model: names, shapes, groups, initial values, and their names in Hugging Face folders.
//!
//! The list is the one place for all of it; tracing declares parameters from it by name.

use crate::adapter::{DOWN, UP};
use crate::layer::{EXPERT, ROUTER};
use crate::{Adapter, Architecture, FeedForward, Init, Layer, LinearSpec, Mixer};
use std::collections::HashMap;
use xtrain_program::CutBy;
use xtrain_tensor::{NamePart, NameWhole};

/// A parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    /// Its name.
    pub name: String,
    /// Its extents, outermost first.
    pub shape: Vec<usize>,
    /// Its role, by which optimizers treat it.
    pub group: ParameterGroup,
    /// Its initial values.
    pub init: Init,
    /// The experts to which its rows belong, in equal runs; `None` if it belongs to every token.
    pub experts: Option<usize>,
    /// True if it is held as it was loaded: adapters are trained in its place.
    pub is_frozen: bool,
    /// How ranks of a tensor group cut it; `None` if each computes with the whole.
    pub tensor_cut: Option<CutBy>,
    /// The tensors of a Hugging Face folder that it consists of.
    pub parts: HfParts,
    /// Another form in which a folder may hold it.
    pub whole: Option<NameWhole>,
}

/// The tensors of a Hugging Face folder that a parameter consists of, stacked along the first dimension: q, k
/// and v of a fused projection, gate and up of each expert.
///
/// A large mixture has tens of thousands of them, so they are listed on demand.
#[derive(Clone, Debug, PartialEq)]
pub struct HfParts {
    /// The tensors of one expert, with [`EXPERT`] where their names have its number; or all of them.
    of_expert: Vec<NamePart>,
    experts: usize,
}

impl HfParts {
    /// The number of tensors.
    pub fn count(&self) -> usize {
        self.of_expert.len() * self.experts
    }

    /// Rows of each tensor of one expert, or of all.
    pub fn of_expert(&self) -> Vec<usize> {
        self.of_expert.iter().map(|part| part.rows).collect()
    }

    /// All of them, in order.
    pub fn list(&self) -> Vec<NamePart> {
        let of_expert = |expert: usize| {
            let number = expert.to_string();
            let numbered = move |part: &NamePart| NamePart {
                hf_name: part.hf_name.replace(EXPERT, &number),
                rows: part.rows,
            };
            self.of_expert.iter().map(numbered)
        };
        (0..self.experts).flat_map(of_expert).collect()
    }

    fn one(hf_name: impl Into<String>, rows: usize) -> HfParts {
        HfParts { of_expert: vec![NamePart { hf_name: hf_name.into(), rows }], experts: 1 }
    }
}

/// The role of a parameter in a model. Optimizers treat the parameters of a group equally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParameterGroup {
    /// The table of token embeddings, even if the head reads it too.
    Embedding,
    /// The weights of a linear layer in a block.
    Matrix,
    /// The weights of an untied head.
    Head,
    /// The weights of a norm.
    Norm,
    /// The bias of a linear layer.
    Bias,
    /// The bias on the scores of a router. The balancing of loads moves it, no gradient does.
    RouterBias,
    /// A or B of the adapters of a linear layer.
    Adapter,
}

impl ParameterSpec {
    /// True if gradients train it.
    pub fn is_trained(&self) -> bool {
        !self.is_frozen && self.group.has_gradient()
    }

    /// True if it is part of an adapter, not of the model.
    pub fn is_adapter(&self) -> bool {
        self.group == ParameterGroup::Adapter
    }
}

impl ParameterGroup {
    /// True if the loss depends on it by a gradient.
    pub fn has_gradient(self) -> bool {
        self != ParameterGroup::RouterBias
    }
}

/// The name of a site in a block: `blocks.3.attn.o_proj`.
pub fn in_block(block: usize, site: &str) -> String {
    format!("blocks.{block}.{site}")
}

/// The block of a parameter of this name; None outside of the blocks.
pub(crate) fn block_of(name: &str) -> Option<usize> {
    name.strip_prefix("blocks.")?.split_once('.')?.0.parse().ok()
}

/// Names of the parameters outside of the blocks.
pub(crate) mod names {
    pub(crate) const EMBED: &str = "embed.weight";
    pub(crate) const FINAL_NORM: &str = "norm";
    pub(crate) const HEAD: &str = "lm_head.weight";
}

impl Architecture {
    /// Outputs and inputs of the linear layers, the head among them, by their names: `blocks.3.attn.o_proj`.
    pub fn linear_shapes(&self) -> HashMap<String, [usize; 2]> {
        let head = self.head();
        let in_blocks = self.linears().map(|(block, linear)| (in_block(block, linear.site), linear));
        let all = in_blocks.chain([(head.site.to_owned(), head)]);
        all.map(|(name, linear)| (name, [linear.outputs(), linear.inputs])).collect()
    }

    /// All parameters, in the order in which the model uses them. With adapters those of the model are
    /// frozen.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let mut list = List { model: self, parameters: Vec::new() };
        list.matrix(
            ParameterGroup::Embedding,
            names::EMBED,
            [self.vocab_size, self.dim],
            Init::Normal(1.0),
            HfParts::one("model.embed_tokens.weight", self.vocab_size),
        );
        for (block, layer) in self.layers.iter().enumerate() {
            list.layer(block, layer);
        }
        list.stream_norm(names::FINAL_NORM, "model.norm");
        if !self.tie_embeddings {
            let parts = HfParts::one(names::HEAD, self.vocab_size);
            let shape = [self.vocab_size, self.dim];
            list.matrix(ParameterGroup::Head, names::HEAD, shape, Init::Normal(1.0), parts);
        }
        if self.adapter.is_some() {
            list.parameters.iter_mut().for_each(|p| p.is_frozen = !p.is_adapter());
        }
        list.parameters
    }

    /// Numbers of the model with which it computes by gradients, tied weights counted once and adapters not.
    pub fn parameter_count(&self) -> usize {
        self.count(|p| p.group.has_gradient() && !p.is_adapter())
    }

    /// Trained numbers, tied weights counted once.
    pub fn trained_count(&self) -> usize {
        self.count(ParameterSpec::is_trained)
    }

    fn count(&self, counts: impl Fn(&ParameterSpec) -> bool) -> usize {
        let counted = self.parameters().into_iter().filter(|p| counts(p));
        counted.map(|p| p.shape.iter().product::<usize>()).sum()
    }

    /// Parameters that a token is multiplied with: all but an embedding that is not the head too, and but the
    /// experts that are not the token's.
    pub fn multiplied_parameters(&self) -> usize {
        let embedding = if self.tie_embeddings { 0 } else { self.vocab_size * self.dim };
        self.active_parameter_count() - embedding
    }

    /// Parameters that the output for a token depends on: all but the experts that are not the token's.
    pub fn active_parameter_count(&self) -> usize {
        let left_out =
            |(_, linear): (usize, LinearSpec)| linear.inputs * linear.rows() - linear.active_size();
        self.parameter_count() - self.linears().map(left_out).sum::<usize>()
    }

    /// Floating-point operations of training on one token, as PaLM counts them (arXiv 2204.02311, appendix
    /// B): 6 per parameter but the input embedding's, and 12 * attention width * sequence length for the
    /// attention scores of each layer, without subtracting what the causal mask leaves out. MFU is this times
    /// tokens per second over the device's dense peak. A parameter that is not trained has 4: no gradient of
    /// it is computed.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let scores: usize =
            self.layers.iter().map(|Layer { mixer: Mixer::Attention(a), .. }| a.query_dim()).sum();
        let parameters = match self.adapter {
            None => 6.0 * self.multiplied_parameters() as f64,
            Some(_) => 4.0 * self.multiplied_parameters() as f64 + 6.0 * self.trained_count() as f64,
        };
        parameters + 12.0 * scores as f64 * seq_len as f64
    }
}

impl Architecture {
    /// The part of each block in [`Architecture::flops_per_token`], without its norms and its router.
    pub(crate) fn block_flops(&self, seq_len: usize) -> Vec<f64> {
        let mut flops: Vec<f64> = self
            .layers
            .iter()
            .map(|Layer { mixer: Mixer::Attention(a), .. }| 12.0 * a.query_dim() as f64 * seq_len as f64)
            .collect();
        self.linears().for_each(|(block, linear)| flops[block] += 6.0 * linear.active_size() as f64);
        flops
    }

    /// The part of the head in [`Architecture::flops_per_token`].
    pub(crate) fn head_flops(&self) -> f64 {
        6.0 * (self.vocab_size * self.dim) as f64
    }
}

/// The list while it is built.
struct List<'a> {
    model: &'a Architecture,
    parameters: Vec<ParameterSpec>,
}

impl List<'_> {
    fn layer(&mut self, block: usize, layer: &Layer) {
        let dim = self.model.dim;
        let ours = |site: &str| in_block(block, site);
        let theirs = |module: &str| format!("model.layers.{block}.{module}.weight");
        self.stream_norm(&ours("attn_norm"), &format!("model.layers.{block}.input_layernorm"));
        match &layer.mixer {
            Mixer::Attention(attention) => {
                self.linear(block, &attention.qkv_proj(dim));
                if attention.qk_norm {
                    for (site, module) in [
                        ("attn.q_norm.weight", "self_attn.q_norm"),
                        ("attn.k_norm.weight", "self_attn.k_norm"),
                    ] {
                        self.norm(&ours(site), attention.head_dim, &theirs(module), Init::Ones);
                    }
                }
                self.linear(block, &attention.o_proj(dim));
            }
        }
        self.stream_norm(&ours("mlp_norm"), &format!("model.layers.{block}.post_attention_layernorm"));
        match &layer.feed_forward {
            FeedForward::Dense(mlp) => {
                self.linear(block, &mlp.gate_up_proj(dim));
                self.linear(block, &mlp.down_proj(dim));
            }
            FeedForward::Experts(experts) => {
                self.linear(block, &experts.router_proj(dim));
                if experts.router.biased {
                    let hf_name =
                        format!("model.layers.{block}.{}.e_score_correction_bias", experts.modules.router);
                    self.parameters.push(ParameterSpec {
                        name: ours(&format!("{ROUTER}.bias")),
                        shape: vec![experts.count],
                        group: ParameterGroup::RouterBias,
                        init: Init::Zeros,
                        experts: None,
                        is_frozen: false,
                        tensor_cut: None,
                        parts: HfParts::one(hf_name, experts.count),
                        whole: None,
                    });
                }
                self.linear(block, &experts.gate_up_proj(dim));
                self.linear(block, &experts.down_proj(dim));
                experts.shared_linears(dim).iter().flatten().for_each(|linear| self.linear(block, linear));
            }
        }
    }

    /// The weights of a linear layer, and its bias.
    fn linear(&mut self, block: usize, linear: &LinearSpec) {
        let name = |of: &str| format!("{}.{of}", in_block(block, linear.site));
        let parts = |of: &str| {
            let part = |(module, rows): (String, usize)| NamePart {
                hf_name: format!("model.layers.{block}.{module}.{of}"),
                rows,
            };
            let of_expert = linear.modules().into_iter().map(part).collect();
            HfParts { of_expert, experts: linear.experts.map_or(1, |experts| experts.count) }
        };
        // GPT-2's rule (Radford et al. 2019, section 2.3): weights whose output is added to the residual
        // stream start smaller by sqrt(additions).
        let scale = match linear.is_residual {
            true => 1.0 / (2.0 * self.model.layers.len().max(1) as f32).sqrt(),
            false => 1.0,
        };
        let shape = [linear.rows(), linear.inputs];
        self.matrix(ParameterGroup::Matrix, &name("weight"), shape, Init::Normal(scale), parts("weight"));
        let whole = |hf_name: &&str| NameWhole {
            hf_name: format!("model.layers.{block}.{hf_name}"),
            groups: linear.experts.map(|experts| experts.count),
        };
        if let Some(last) = self.parameters.last_mut() {
            last.whole = linear.whole.as_ref().map(whole);
            last.experts = linear.experts.map(|experts| experts.count);
            last.tensor_cut = linear.tensor_cut();
        }
        if linear.bias {
            self.parameters.push(ParameterSpec {
                name: name("bias"),
                shape: vec![linear.rows()],
                group: ParameterGroup::Bias,
                init: Init::Zeros,
                experts: linear.experts.map(|experts| experts.count),
                is_frozen: false,
                tensor_cut: linear.tensor_cut(),
                parts: parts("bias"),
                whole: None,
            });
        }
        self.adapters(block, linear);
    }

    /// A and B of the adapters of a linear layer, named as in a folder of PEFT's.
    fn adapters(&mut self, block: usize, linear: &LinearSpec) {
        let Some(adapter) = &self.model.adapter else { return };
        let Some((of_layer, parts)) = adapter.of(block, linear) else { return };
        let modules = linear.modules();
        let list = |matrix: &str, rows: &dyn Fn(usize) -> usize| {
            let part = |&part: &usize| NamePart {
                hf_name: format!("base_model.model.model.layers.{block}.{}.{matrix}.weight", modules[part].0),
                rows: rows(part),
            };
            HfParts { of_expert: parts.iter().map(part).collect(), experts: 1 }
        };
        let name = |of: &str| format!("{}.{of}", in_block(block, linear.site));
        let (rank, of_a, of_b) = (adapter.rank, Adapter::init(linear), Init::Zeros);
        let (a, b) = (list("lora_A", &|_| rank), list("lora_B", &|part| modules[part].1));
        let [a_shape, b_shape] = [[of_layer.width(), linear.inputs], [of_layer.rows(), rank]];
        self.matrix(ParameterGroup::Adapter, &name(DOWN), a_shape, of_a, a);
        self.matrix(ParameterGroup::Adapter, &name(UP), b_shape, of_b, b);
    }

    fn matrix(&mut self, group: ParameterGroup, name: &str, shape: [usize; 2], init: Init, parts: HfParts) {
        let (name, shape, whole) = (name.into(), shape.to_vec(), None);
        let (experts, tensor_cut, is_frozen) = (None, None, false);
        let spec = ParameterSpec { name, shape, group, init, experts, is_frozen, tensor_cut, parts, whole };
        self.parameters.push(spec);
    }

    /// The parameters of a norm of the residual stream.
    fn stream_norm(&mut self, ours: &str, theirs: &str) {
        for &(end, init) in self.model.norm.parameters() {
            self.norm(&format!("{ours}.{end}"), self.model.dim, &format!("{theirs}.{end}"), init);
        }
    }

    fn norm(&mut self, name: &str, width: usize, theirs: &str, init: Init) {
        self.parameters.push(ParameterSpec {
            name: name.into(),
            shape: vec![width],
            group: ParameterGroup::Norm,
            init,
            experts: None,
            is_frozen: false,
            tensor_cut: None,
            parts: HfParts::one(theirs, width),
            whole: None,
        });
    }
}
