//! A layer of a model as data: its mixer, its feed-forward, and the linear layers of both. Layers of a model
//! may differ.
//!
//! The linear layers are one list ([`Layer::linears`]): parameters, tracing, precision recipes, plans and
//! exports read it.

use crate::init::Init;
use crate::{Capacity, ExpertRanks, FixedRouting, ModelError};
use std::any::Any;
use xtrain_ops::dispatch::{Dispatch, DispatchOwn};
use xtrain_ops::groups::Groups;
use xtrain_ops::qk_norm_rope::RopeScaling;
use xtrain_ops::route::Router;
use xtrain_ops::swiglu::Swiglu;
use xtrain_program::{CutBy, Op};
use xtrain_tensor::TILE;

/// Stands for the number of an expert in the names of its modules.
pub(crate) const EXPERT: &str = "{expert}";

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
    /// One for all tokens.
    Dense(Mlp),
    /// Many, of which each token passes through some.
    Experts(Experts),
}

impl FeedForward {
    /// The one for all tokens, if it is that.
    pub fn dense(&self) -> Option<&Mlp> {
        match self {
            FeedForward::Dense(mlp) => Some(mlp),
            FeedForward::Experts(_) => None,
        }
    }

    /// The experts, if it has some.
    pub fn experts(&self) -> Option<&Experts> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }
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

/// A norm of the residual stream: before each half-block, and after the blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Norm {
    /// Division by the root of the mean square, and a weight for each column (arXiv 1910.07467).
    Rms {
        /// Added to the mean square; positive.
        eps: f64,
    },
}

impl Norm {
    /// The number that it adds to the mean square.
    pub(crate) const fn eps(self) -> f64 {
        match self {
            Norm::Rms { eps } => eps,
        }
    }

    /// The key of config.json that has this number.
    pub(crate) const fn eps_key(self) -> &'static str {
        match self {
            Norm::Rms { .. } => "rms_norm_eps",
        }
    }

    /// The ends of the names of its parameters, which have a number for each column, and their initial
    /// values.
    pub(crate) const fn parameters(self) -> &'static [(&'static str, Init)] {
        match self {
            Norm::Rms { .. } => &[("weight", Init::Ones)],
        }
    }
}

/// A function between the projections of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// SiLU of the gate, times up (arXiv 2002.05202).
    Swiglu,
}

impl Activation {
    /// The end of its site, as dumps name it: `mlp.swiglu`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Activation::Swiglu => "swiglu",
        }
    }

    /// Its name in messages, and those in `hidden_act` of config.json; exports have the first.
    pub(crate) const fn names_in_files(self) -> (&'static str, &'static [&'static str]) {
        match self {
            Activation::Swiglu => ("SwiGLU", &["silu", "swish"]),
        }
    }

    /// Columns of its input for each column of its output: gate and up lie side by side.
    pub(crate) fn input_columns(self) -> usize {
        match self {
            Activation::Swiglu => 2,
        }
    }

    /// The activation that `op` computes, if it is one.
    pub(crate) fn from_op(op: &dyn Op) -> Option<Activation> {
        (op as &dyn Any).is::<Swiglu>().then_some(Activation::Swiglu)
    }
}

/// An activation between two projections.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// Columns of the gate and of the up projection.
    pub width: usize,
    /// The activation.
    pub activation: Activation,
}

/// A mixture of experts: a router chooses feed-forwards for each token, and their outputs are added, each
/// times its gate (arXiv 2401.04088, 2412.19437).
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// The experts to choose from.
    pub count: usize,
    /// Columns of the gate and of the up projection of each.
    pub ffn_dim: usize,
    /// The activation of each.
    pub activation: Activation,
    /// The number that a token passes through, and the rule by which it is chosen.
    pub router: Router,
    /// A feed-forward that every token passes through besides.
    pub shared: Option<Mlp>,
    /// Their names in Hugging Face folders.
    pub modules: &'static ExpertModules,
}

/// The modules of a mixture in a Hugging Face model, by their names within the block.
#[derive(Debug, PartialEq)]
pub struct ExpertModules {
    /// The router.
    pub router: &'static str,
    /// The list of experts, which are numbered.
    pub experts: &'static str,
    /// The gate, up and down projections of an expert.
    pub projections: [&'static str; 3],
    /// The shared expert.
    pub shared: &'static str,
}

/// A linear layer of a block, or the head.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    /// Its place in a block, e.g. `attn.o_proj`, or [`HEAD`].
    pub site: &'static str,
    /// Columns of its input.
    pub inputs: usize,
    /// The module of a Hugging Face model whose parts it fuses, by its name within the block; empty if the
    /// names of the parts are whole.
    pub module: &'static str,
    /// The parts that it fuses, each with its share of the outputs. Experts have these each.
    pub parts: Vec<(&'static str, usize)>,
    /// A bias on the outputs.
    pub bias: bool,
    /// True if its output is added to the residual stream.
    pub is_residual: bool,
    /// The experts to which its outputs belong, in equal parts; `None` if it belongs to every token.
    pub experts: Option<ExpertShare>,
    /// The tensor of a Hugging Face folder that may hold its weights as a whole, by its name within the
    /// block. Transformers writes experts so if it is asked to keep the form that it computes with.
    pub whole: Option<&'static str>,
}

/// The part of a linear layer of experts that a token is multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertShare {
    /// Experts of the layer.
    pub count: usize,
    /// Experts of a token.
    pub top_k: usize,
}

/// The site of the linear layer after the blocks, by which recipes name it.
pub const HEAD: &str = "lm_head";

/// The beginning of the sites of experts' linear layers.
pub const EXPERTS: &str = "mlp.experts.";

/// The site of attention's output projection, whose input recipes may save in fewer bits.
pub(crate) const O_PROJ: &str = "attn.o_proj";

/// The site of the router of experts, which no recipe computes in FP8.
pub const ROUTER: &str = "mlp.router";

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
            FeedForward::Experts(experts) => {
                all.extend([experts.gate_up_proj(dim), experts.down_proj(dim)]);
                all.extend(experts.shared_linears(dim).into_iter().flatten());
            }
        }
        all
    }

    /// The linear layer to the logits of experts, which is always computed in bf16 or more.
    pub fn router(&self, dim: usize) -> Option<LinearSpec> {
        match &self.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts.router_proj(dim)),
        }
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
            FeedForward::Experts(e) => {
                sizes.extend([("experts.count", e.count), ("experts.ffn_dim", e.ffn_dim)]);
                sizes.extend([("experts.per_token", e.router.top_k)]);
                sizes.extend(e.shared.as_ref().map(|shared| ("experts.shared_ffn_dim", shared.width)));
            }
        }
        sizes
    }

    /// Checks the conditions that sizes alone do not show.
    pub(crate) fn validate(&self) -> Result<(), ModelError> {
        match &self.mixer {
            Mixer::Attention(attention) => attention.validate()?,
        }
        match &self.feed_forward {
            FeedForward::Dense(_) => Ok(()),
            FeedForward::Experts(experts) => experts.validate(),
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
            module: "self_attn",
            parts: vec![("q_proj", q), ("k_proj", kv), ("v_proj", kv)],
            bias: self.qkv_bias,
            is_residual: false,
            experts: None,
            whole: None,
        }
    }

    /// The projection of attention's output.
    pub fn o_proj(&self, dim: usize) -> LinearSpec {
        LinearSpec {
            site: O_PROJ,
            inputs: self.query_dim(),
            module: "self_attn",
            parts: vec![("o_proj", dim)],
            bias: false,
            is_residual: true,
            experts: None,
            whole: None,
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
        self.gate_up_at("mlp.gate_up_proj", "mlp", dim)
    }

    /// The projection back to the residual stream.
    pub fn down_proj(&self, dim: usize) -> LinearSpec {
        self.down_at("mlp.down_proj", "mlp", dim)
    }

    fn gate_up_at(&self, site: &'static str, module: &'static str, dim: usize) -> LinearSpec {
        LinearSpec {
            site,
            inputs: dim,
            module,
            parts: vec![("gate_proj", self.width), ("up_proj", self.width)],
            bias: false,
            is_residual: false,
            experts: None,
            whole: None,
        }
    }

    fn down_at(&self, site: &'static str, module: &'static str, dim: usize) -> LinearSpec {
        LinearSpec {
            site,
            inputs: self.width,
            module,
            parts: vec![("down_proj", dim)],
            bias: false,
            is_residual: true,
            experts: None,
            whole: None,
        }
    }
}

/// Tokens up to which rows of experts are not aligned: a batch of generation, of which an expert has few.
/// Sums over rows depend on where these begin, so with sums for any world all rows are aligned.
const SMALL_BATCH: usize = 64;

impl Experts {
    /// How the rows of so many tokens are arranged by experts, of which a rank has all.
    pub fn dispatch(&self, tokens: usize, ranks: ExpertRanks) -> Dispatch {
        self.share().dispatch(tokens, ranks)
    }

    /// How the rows of the tokens of all `ranks` are arranged by the experts of one of them, for so many
    /// tokens of each.
    pub fn dispatch_own(&self, tokens: usize, ranks: ExpertRanks) -> DispatchOwn {
        self.share().dispatch_own(tokens, ranks)
    }

    /// Rows that belong to tokens on the rank with the most by a fixed routing, if each of `ranks` has so
    /// many tokens.
    pub fn most_rows(&self, tokens: usize, ranks: ExpertRanks, routing: FixedRouting) -> usize {
        self.share().most_rows(tokens, ranks.count, routing)
    }

    /// Rows that the experts of the rank with the most take by a fixed routing, with those between experts,
    /// if each of `ranks` has so many tokens.
    pub fn needed_rows(&self, tokens: usize, ranks: ExpertRanks, routing: FixedRouting) -> usize {
        let DispatchOwn { experts, align, by_source, .. } = self.dispatch_own(tokens, ranks);
        // A rank has equally many tokens of each other.
        let rows = |load: &usize| match by_source {
            true => ranks.count * load.next_multiple_of(align),
            false => (ranks.count * load).next_multiple_of(align),
        };
        let loads = routing.loads(tokens, self.count, self.router.top_k);
        loads.chunks(experts).map(|own| own.iter().map(rows).sum()).max().unwrap_or(0)
    }

    /// The smallest capacity with room for so many rows, those between experts among them, if each of `ranks`
    /// has so many tokens.
    pub fn capacity_for(&self, rows: usize, tokens: usize, ranks: ExpertRanks) -> Capacity {
        let copies = tokens * self.router.top_k;
        let least = self.dispatch_own(tokens, ranks).least_copies(rows, copies * ranks.count);
        Capacity::of_copies(least, copies)
    }

    /// The capacity with room for every routing: all tokens of all ranks have experts of one rank, as many as
    /// it has.
    pub fn capacity_for_all(&self, ranks: ExpertRanks) -> Capacity {
        let own = self.count / ranks.count;
        Capacity::of_copies(ranks.count * self.router.top_k.min(own), self.router.top_k)
    }

    /// Rows by experts that a rank allocates, if each of `ranks` has so many tokens.
    pub fn ragged_rows(&self, tokens: usize, ranks: ExpertRanks) -> usize {
        self.share().ragged_rows(tokens, ranks)
    }

    /// The experts, and those of a token.
    fn share(&self) -> ExpertShare {
        ExpertShare { count: self.count, top_k: self.router.top_k }
    }

    /// The projection to a logit for each expert.
    pub fn router_proj(&self, dim: usize) -> LinearSpec {
        LinearSpec {
            site: ROUTER,
            inputs: dim,
            module: "",
            parts: vec![(self.modules.router, self.count)],
            bias: false,
            is_residual: false,
            experts: None,
            whole: (self.modules.router != "mlp.gate").then_some("mlp.gate.weight"),
        }
    }

    /// The fused gate and up projections of all experts, expert after expert.
    pub fn gate_up_proj(&self, dim: usize) -> LinearSpec {
        let [gate, up, _] = self.modules.projections;
        let parts = vec![(gate, self.ffn_dim), (up, self.ffn_dim)];
        self.linear("mlp.experts.gate_up_proj", dim, parts, false)
    }

    /// The projections of all experts back to the residual stream, expert after expert.
    pub fn down_proj(&self, dim: usize) -> LinearSpec {
        let [.., down] = self.modules.projections;
        self.linear("mlp.experts.down_proj", self.ffn_dim, vec![(down, dim)], true)
    }

    /// The two projections of the shared expert.
    pub fn shared_linears(&self, dim: usize) -> Option<[LinearSpec; 2]> {
        let (shared, module) = (self.shared.as_ref()?, self.modules.shared);
        let gate_up = shared.gate_up_at("mlp.shared.gate_up_proj", module, dim);
        Some([gate_up, shared.down_at("mlp.shared.down_proj", module, dim)])
    }

    /// The linear layer of all experts at `site`, by which name transformers knows its weights too.
    fn linear(
        &self,
        site: &'static str,
        inputs: usize,
        parts: Vec<(&'static str, usize)>,
        is_residual: bool,
    ) -> LinearSpec {
        LinearSpec {
            site,
            inputs,
            module: self.modules.experts,
            parts,
            bias: false,
            is_residual,
            experts: Some(self.share()),
            whole: Some(site),
        }
    }

    fn validate(&self) -> Result<(), ModelError> {
        let scale = self.router.scale;
        if !is_positive_f32(f64::from(scale)) {
            return Err(ModelError::Sizes(format!(
                "experts.scale is {scale:?}; it must be a positive number"
            )));
        }
        self.router.check(self.count).map_err(|error| ModelError::Sizes(error.0))
    }
}

impl ExpertShare {
    fn dispatch(self, tokens: usize, ranks: ExpertRanks) -> Dispatch {
        let align = if tokens > SMALL_BATCH || ranks.any_world { TILE } else { 1 };
        Dispatch { experts: self.count, align }
    }

    fn dispatch_own(self, tokens: usize, ranks: ExpertRanks) -> DispatchOwn {
        let Dispatch { experts, align } = self.dispatch(tokens, ranks);
        let ExpertRanks { count: ranks, any_world: by_source, capacity } = ranks;
        let every = DispatchOwn { experts: experts / ranks, ranks, align, room: None, by_source };
        let top_k = self.top_k;
        // A small batch has room for every routing: FP8 takes rows in multiples, which its room may not be.
        let room = capacity.filter(|_| align > 1).map(|capacity| {
            let copies = tokens * top_k;
            every.room_for(capacity.rows(copies), copies * ranks)
        });
        DispatchOwn { room: room.filter(|room| *room < every.capacity(tokens * ranks, top_k)), ..every }
    }

    fn ragged_rows(self, tokens: usize, ranks: ExpertRanks) -> usize {
        match ranks.count {
            1 => self.dispatch(tokens, ranks).capacity(tokens * self.top_k),
            count => self.dispatch_own(tokens, ranks).ragged_rows(count * tokens, self.top_k),
        }
    }

    /// The groups of rows of a rank that has its share of the experts, if each of `ranks` has so many tokens.
    /// Those that belong to tokens are the mean over ranks, or with a fixed routing those of the rank with
    /// the most.
    pub(crate) fn groups(self, tokens: usize, ranks: ExpertRanks, routing: Option<FixedRouting>) -> Groups {
        let Dispatch { experts, align } = self.dispatch(tokens, ranks);
        let live_rows = match routing {
            Some(routing) => self.most_rows(tokens, ranks.count, routing),
            None => tokens * self.top_k,
        };
        Groups { experts: experts / ranks.count, align, live_rows }
    }

    /// Rows that belong to tokens on the rank with the most, by a fixed routing.
    fn most_rows(self, tokens: usize, ranks: usize, routing: FixedRouting) -> usize {
        let shares = routing.shares_of_ranks(self.count, self.top_k, ranks);
        let most = shares.into_iter().fold(0.0, f64::max);
        (most * (ranks * tokens) as f64).round() as usize
    }
}

impl LinearSpec {
    /// How the ranks of a tensor group cut its weights: by outputs, or by inputs if its output is added to
    /// the residual stream. None for a layer of which each rank computes the whole.
    pub fn tensor_cut(&self) -> Option<CutBy> {
        match (self.site, self.experts, self.is_residual) {
            (ROUTER | HEAD, ..) | (_, Some(_), _) => None,
            (.., true) => Some(CutBy::Columns),
            (.., false) => Some(CutBy::Rows(self.parts.iter().map(|(_, rows)| *rows).collect())),
        }
    }

    /// The part of one of so many ranks of a tensor group, which divide it.
    pub fn part_of_rank(&self, ranks: usize) -> LinearSpec {
        let mut part = self.clone();
        match self.tensor_cut() {
            Some(CutBy::Rows(_)) => part.parts.iter_mut().for_each(|(_, rows)| *rows /= ranks),
            Some(CutBy::Columns) => part.inputs /= ranks,
            None => {}
        }
        part
    }

    /// Rows of its input on a rank with a batch of so many tokens: those by its experts, if it belongs to
    /// experts, which these ranks share.
    pub fn input_rows(&self, tokens: usize, ranks: ExpertRanks) -> usize {
        self.experts.map_or(tokens, |share| share.ragged_rows(tokens, ranks))
    }

    /// Rows of its weight.
    pub fn rows(&self) -> usize {
        self.outputs() * self.experts.map_or(1, |share| share.count)
    }

    /// Columns of its output: the rows of its weight, or those of one expert.
    pub fn outputs(&self) -> usize {
        self.parts.iter().map(|(_, rows)| rows).sum()
    }

    /// The modules of a Hugging Face model that it fuses, by their names within the block, with their rows.
    /// Those of an expert have [`EXPERT`] in place of its number.
    pub(crate) fn modules(&self) -> Vec<(String, usize)> {
        let name = |part: &str| match (self.experts, self.module) {
            (Some(_), module) => format!("{module}.{EXPERT}.{part}"),
            (None, "") => part.to_owned(),
            (None, module) => format!("{module}.{part}"),
        };
        self.parts.iter().map(|&(part, rows)| (name(part), rows)).collect()
    }

    /// Numbers of its weight that a token is multiplied with.
    pub fn active_size(&self) -> usize {
        self.inputs * self.outputs() * self.experts.map_or(1, |share| share.top_k)
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
