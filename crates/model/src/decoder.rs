//! Tracing the decoder: pre-norm blocks on a residual stream, each a mixer (grouped-query attention) and a
//! feed-forward (one, or a mixture of experts).
//!
//! Shape legend: t tokens of the batch (B sequences of S, flattened), d model width, v vocabulary. A rank of
//! a tensor group has a part of the tokens between the linear layers; t are then these.
//!
//! The residual addition at the end of a half-block is fused with the norm that follows it, so a block's
//! first instance finishes the block before; its sum is the boundary that recomputation saves.

mod declare;
mod experts;

use self::declare::Parameters;
use crate::adapter::{DOWN, UP};
use crate::layer::HEAD;
use crate::parameters::{in_block, names};
use crate::{
    Activation, Architecture, ExpertRanks, FeedForward, FixedRouting, Layer, LinearSpec, Mixer, Mlp,
    ModelRanks, Norm, PipelineStage, Rotary, SelfAttention,
};
use xtrain_ops::add::Add;
use xtrain_ops::attention::Attention;
use xtrain_ops::cached_attention::CachedAttention;
use xtrain_ops::dropout::Dropout;
use xtrain_ops::embedding::{Embedding, EmbeddingGrad};
use xtrain_ops::linear::{Linear, UnroundedLinear};
use xtrain_ops::linear_cross_entropy::{LinearCrossEntropy, Terms};
use xtrain_ops::lora::LoraAdd;
use xtrain_ops::pack_sums::PackSums;
use xtrain_ops::qk_norm_rope::{QkNormRope, RopeScaling, rotation_table};
use xtrain_ops::rms_norm::{AddRmsNorm, RmsNorm};
use xtrain_ops::scale::Scale;
use xtrain_ops::sequence::{GatherSequence, scatter};
use xtrain_ops::swiglu::Swiglu;
use xtrain_ops::token_logprobs::TokenLogprobs;
use xtrain_program::{CutBy, StateKind, TraceError, Tracer, ValueId};
use xtrain_tensor::{DType, HostTensor, Shape, TensorType};

/// The shape of a batch of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// B: sequences.
    pub sequences: usize,
    /// S: tokens of a sequence.
    pub seq_len: usize,
}

impl Batch {
    /// t: tokens in all.
    pub const fn tokens(self) -> usize {
        self.sequences * self.seq_len
    }
}

/// The earlier tokens that attention reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Context {
    /// Those of the sequence; with a document mask, those of the token's document.
    Sequence {
        /// The input `doc_start` bounds attention to documents.
        document_mask: bool,
        /// Attention's gradients are the same bits in every run.
        deterministic: bool,
        /// How ranks share the computation.
        ranks: ModelRanks,
    },
    /// Those in the key/value cache, and those before the token in this run.
    Cache {
        /// Tokens that the cache holds for each sequence.
        capacity: usize,
        /// How ranks share the computation.
        ranks: ModelRanks,
    },
}

impl Context {
    /// How ranks share the computation.
    const fn ranks(self) -> ModelRanks {
        match self {
            Context::Sequence { ranks, .. } | Context::Cache { ranks, .. } => ranks,
        }
    }

    /// This context, of what a rank of `ranks` computes.
    pub const fn with_ranks(self, ranks: ModelRanks) -> Context {
        match self {
            Context::Sequence { document_mask, deterministic, .. } => {
                Context::Sequence { document_mask, deterministic, ranks }
            }
            Context::Cache { capacity, .. } => Context::Cache { capacity, ranks },
        }
    }

    /// The ranks that share the experts of each block.
    const fn expert_ranks(self) -> ExpertRanks {
        self.ranks().experts
    }

    /// The blocks that are traced.
    pub const fn stage(self) -> PipelineStage {
        self.ranks().stage
    }
}

/// Settings of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Tokens whose logits exist at one time.
    pub chunk_tokens: usize,
    /// Weight of the squared log-sum-exp (PaLM, arXiv 2204.02311, section 5).
    pub z_loss: f32,
    /// Number of sources of the training text whose losses are summed separately; 0 sums all together.
    pub sources: usize,
    /// True if the targets that are the likeliest token are counted for each source. In evaluations alone.
    pub counts_matches: bool,
    /// The balancing of experts; `None` outside of training, where losses of routers are not computed.
    pub balancing: Option<Balancing>,
}

/// How the loads of experts are balanced. Losses of routers are means over the blocks with experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balancing {
    /// Weight of the balance loss.
    pub loss_weight: f32,
    /// Weight of the router z-loss.
    pub z_weight: f32,
    /// How much a step moves the biases of routers, if loads are balanced by them.
    pub bias_rate: Option<f32>,
}

/// Names of the inputs and outputs of the programs traced here.
pub mod io {
    /// `[t, d]`, in the stages of a pipeline after the first: the residual stream of the stage before.
    pub const STREAM: &str = "stream";
    /// `[t, d]`, in the stages before the last: the residual stream for the next stage.
    pub const NEXT_STREAM: &str = "next_stream";
    /// `i32[t]`: token ids.
    pub const TOKENS: &str = "tokens";
    /// `i32[t]`: the position of each token in its sequence or document.
    pub const POSITIONS: &str = "positions";
    /// `i32[t]`: the place in its sequence where each token's document starts.
    pub const DOC_START: &str = "doc_start";
    /// `i32[t]`: the token to predict at each place; -100 for none.
    pub const TARGETS: &str = "targets";
    /// `i32[t]`, in the loss of a model with experts: -1 for a token that only pads its sequence, else 0.
    pub const PADDING: &str = "padding";
    /// `f32[]`: one over the number of targets in the whole global batch.
    pub const INV_TARGETS: &str = "inv_targets";
    /// `f32[]`, if losses of routers are computed: one over the number of tokens in the whole global batch,
    /// padding not counted.
    pub const INV_TOKENS: &str = "inv_tokens";
    /// `u32[1]`, if ranks share experts: the place of this rank among them.
    pub const PLACE: &str = "place";
    /// `i32[t]`: the source of each token, if losses are summed by source.
    pub const SOURCES: &str = "sources";
    /// `u32[4]`: seed (low, high), step, index of the first token within the global batch.
    pub const RNG: &str = "rng";
    /// `i32[n]`: the tokens whose logits are computed.
    pub const ROWS: &str = "rows";
    /// Cross-entropy and z-loss of the head. With experts, training minimises its sum with all
    /// `router_objective`s.
    pub const OBJECTIVE: &str = "objective";
    /// The mean cross-entropy in nats.
    pub const LOSS: &str = "loss";
    /// `f32[n, 2]`: further sums, as [`SumsOf`](super::SumsOf) says; with counts of matches,
    /// `f32[sources, 3]`.
    pub const SUMS: &str = "sums";

    /// [`SUMS`], or the figures of the routers in a chunk before the last of its stage.
    pub fn sums(earlier_chunk: Option<usize>) -> String {
        earlier_chunk.map_or_else(|| SUMS.to_owned(), |chunk| format!("{SUMS}.{chunk}"))
    }
    /// `[n, v]`: the logits of these rows.
    pub const LOGITS: &str = "logits";

    /// `i32[n]`: the tokens of a chunk whose targets are scored.
    pub fn scored_rows(chunk: usize) -> String {
        format!("scored_rows.{chunk}")
    }

    /// `i32[n]`: the targets of these tokens; -100 for none.
    pub fn scored_targets(chunk: usize) -> String {
        format!("scored_targets.{chunk}")
    }

    /// `f32[n]`: their log-probabilities, in nats.
    pub fn logprobs(chunk: usize) -> String {
        format!("logprobs.{chunk}")
    }

    /// `i32[n]`: their ranks, from 0 for the likeliest token.
    pub fn ranks(chunk: usize) -> String {
        format!("ranks.{chunk}")
    }

    /// `f32[1]`, if the room for rows of experts may be too small: the rows that the block needs, of the
    /// micro-batch with the most.
    pub fn rows_needed(block: usize) -> String {
        format!("rows_needed.{block}")
    }

    /// `f32[]`: the term of a block's router in the number that training minimises.
    pub fn router_objective(block: usize) -> String {
        format!("router_objective.{block}")
    }
}

/// The numbers of the output [`io::SUMS`], in their order: for each source, the sums over its targets of
/// their terms in the objective and in the cross-entropy, in nats, not divided by the number of targets; then
/// for each block with experts its balance loss, its z-loss, and the tokens of each expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SumsOf {
    /// The number of sources.
    pub sources: usize,
    /// The experts of each block that has some, if losses of routers are computed.
    pub experts: Vec<usize>,
}

/// The figures of the experts of a block.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertSums {
    /// The balance loss: the number of experts of a token, if all have equally many tokens.
    pub balance: f32,
    /// The mean squared log-sum-exp of the router's logits.
    pub z_loss: f32,
    /// Tokens of each expert.
    pub tokens: Vec<f32>,
}

impl SumsOf {
    /// The sums of a loss of `model`.
    pub fn loss(model: &Architecture, loss: &Loss) -> SumsOf {
        let blocks = model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
        let experts = loss.balancing.map(|_| blocks.map(|experts| experts.count).collect());
        SumsOf { sources: loss.sources, experts: experts.unwrap_or_default() }
    }

    /// n: pairs of numbers; 0 if there is no such output.
    pub fn pairs(&self) -> usize {
        let of_experts: usize = self.experts.iter().map(|count| 2 + count).sum();
        self.sources + of_experts.div_ceil(2)
    }

    /// The place of the first load of each block with experts among the numbers.
    pub fn loads(&self) -> Vec<usize> {
        let mut next = 2 * self.sources;
        let place = |count: &usize| {
            let first = next + 2;
            next = first + count;
            first
        };
        self.experts.iter().map(place).collect()
    }

    /// The pairs of sources, and the figures of blocks with experts.
    ///
    /// # Panics
    /// If there are fewer numbers than [`SumsOf::pairs`] says.
    pub fn split(&self, numbers: &[f32]) -> (Vec<[f32; 2]>, Vec<ExpertSums>) {
        let (sources, mut rest) = numbers.split_at(2 * self.sources);
        let block = |&count: &usize| {
            let (own, after) = rest.split_at(2 + count);
            rest = after;
            ExpertSums { balance: own[0], z_loss: own[1], tokens: own[2..].to_vec() }
        };
        let experts = self.experts.iter().map(block).collect();
        (sources.chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect(), experts)
    }
}

/// Traces the model up to its loss. The outputs are [`io::OBJECTIVE`] and [`io::LOSS`], with sources or
/// losses of routers [`io::SUMS`], and with the latter an [`io::router_objective`] for each block with
/// experts. The objectives are the values to differentiate. `dropout` is the share of activations dropped
/// after the embedding and after each half-block in training; `None` in evaluation. `fixed_routing` is a
/// fixed routing for benchmarks. Routers still run; their choice is not used.
///
/// A stage of a pipeline has the objectives of its own parts of the model, and zeros in place of the other
/// sums. One before the last has [`io::NEXT_STREAM`] in place of objective and loss.
pub fn trace_loss(
    t: &mut Tracer,
    model: &Architecture,
    batch: Batch,
    context: Context,
    loss: Loss,
    dropout: Option<f32>,
    fixed_routing: Option<FixedRouting>,
) -> Result<(), TraceError> {
    let mut trace = Trace::new(model, batch, context, dropout.unwrap_or(0.0));
    trace.is_loss = true;
    trace.trains = dropout.is_some();
    trace.balancing = loss.balancing;
    trace.fixed_routing = fixed_routing;
    let hidden_td = trace.hidden(t)?;
    let of_sources = match context.stage().is_last() {
        true => trace.loss(t, &loss, hidden_td)?,
        false => {
            t.output(io::NEXT_STREAM, hidden_td);
            (loss.sources > 0).then(|| zeros(t, &[loss.sources, if loss.counts_matches { 3 } else { 2 }]))
        }
    };
    let of_routers = trace.router_sums;
    let earlier_chunk = context.stage().earlier_chunk();
    let is_needed = earlier_chunk.is_none() || !of_routers.is_empty();
    let sums: Vec<ValueId> = of_sources.into_iter().chain(of_routers).filter(|_| is_needed).collect();
    let name = io::sums(earlier_chunk);
    match (&sums[..], of_sources) {
        ([], _) => {}
        (&[only], Some(_)) if context.stage().is_last() => t.output(&name, only),
        (all, _) => {
            let packed = t.site("sums").emit(PackSums, all)?[0];
            t.output(&name, packed);
        }
    }
    Ok(())
}

/// Zeros, f32, in place of what another stage of a pipeline computes.
pub fn zeros(t: &mut Tracer, shape: &[usize]) -> ValueId {
    let ty = TensorType::new(DType::F32, Shape::new(shape));
    t.constant(&format!("zeros.{ty}"), ty, move || HostTensor::zeros(ty))
}

/// Traces the model up to the logits of the tokens that the input [`io::ROWS`] names (`rows` of them); the
/// output is [`io::LOGITS`], or [`io::NEXT_STREAM`] of a stage of a pipeline before the last.
pub fn trace_logits(
    t: &mut Tracer,
    model: &Architecture,
    batch: Batch,
    context: Context,
    rows: usize,
) -> Result<(), TraceError> {
    let mut trace = Trace::new(model, batch, context, 0.0);
    let hidden_td = trace.hidden(t)?;
    if !context.stage().is_last() {
        t.output(io::NEXT_STREAM, hidden_td);
        return Ok(());
    }
    let wanted = t.input(io::ROWS, TensorType::new(DType::I32, [rows]));
    t.site("lm_head.rows");
    let hidden_td = trace.of_all_tokens(t, hidden_td)?;
    let wanted_d = t.apply(Embedding, &[wanted, hidden_td])?[0];
    let head_vd = trace.head(t);
    let logits = t.site(HEAD).apply(Linear, &[wanted_d, head_vd])?[0];
    t.output(io::LOGITS, logits);
    Ok(())
}

/// Traces the model up to the log-probabilities and ranks of targets, for chunks of tokens of which only one
/// has logits at one time: the inputs are [`io::scored_rows`] and [`io::scored_targets`] of each chunk, the
/// outputs [`io::logprobs`] and [`io::ranks`], or [`io::NEXT_STREAM`] of a stage of a pipeline before the
/// last. Logits are f32.
pub fn trace_scores(
    t: &mut Tracer,
    model: &Architecture,
    batch: Batch,
    context: Context,
    chunks: &[usize],
) -> Result<(), TraceError> {
    let mut trace = Trace::new(model, batch, context, 0.0);
    let hidden_td = trace.hidden(t)?;
    if !context.stage().is_last() {
        t.output(io::NEXT_STREAM, hidden_td);
        return Ok(());
    }
    t.site("lm_head.rows");
    let hidden_td = trace.of_all_tokens(t, hidden_td)?;
    let head_vd = trace.head(t);
    for (chunk, &rows) in chunks.iter().enumerate() {
        let of_rows = TensorType::new(DType::I32, [rows]);
        let scored = t.input(&io::scored_rows(chunk), of_rows);
        let scored_d = t.site("lm_head.rows").apply(Embedding, &[scored, hidden_td])?[0];
        let logits = t.site(HEAD).apply(UnroundedLinear { in_fp8: true }, &[scored_d, head_vd])?[0];
        let targets = t.input(&io::scored_targets(chunk), of_rows);
        let outputs = t.site("logprobs").emit(TokenLogprobs { top: 0 }, &[logits, targets])?;
        t.output(&io::logprobs(chunk), outputs[0]);
        t.output(&io::ranks(chunk), outputs[1]);
    }
    Ok(())
}

/// An activation at the site that begins with `place`, of the rows of experts if they have `weights`, by
/// which they are multiplied, and `starts`.
fn activate(
    t: &mut Tracer,
    activation: Activation,
    place: &str,
    input: ValueId,
    of_rows: Option<[ValueId; 2]>,
) -> Result<ValueId, TraceError> {
    let inputs: Vec<ValueId> = std::iter::once(input).chain(of_rows.into_iter().flatten()).collect();
    t.site(&format!("{place}{}", activation.name()));
    Ok(match activation {
        Activation::Swiglu => t.apply(Swiglu { weighted: of_rows.is_some(), ..Swiglu::PLAIN }, &inputs)?[0],
    })
}

/// The model while it is traced.
struct Trace<'a> {
    model: &'a Architecture,
    parameters: Parameters,
    batch: Batch,
    context: Context,
    dropout: f32,
    /// The block that is traced; none before and after the blocks.
    block: Option<usize>,
    /// True if the trace ends with the loss, of a batch whose last tokens may be padding.
    is_loss: bool,
    /// True if it is that of training.
    trains: bool,
    /// The balancing of experts, if losses of routers are computed.
    balancing: Option<Balancing>,
    /// A routing in place of the routers' choices.
    fixed_routing: Option<FixedRouting>,
    /// The figures of routers: of each block its balance loss, its z-loss and its loads.
    router_sums: Vec<ValueId>,
}

impl<'a> Trace<'a> {
    fn new(model: &'a Architecture, batch: Batch, context: Context, dropout: f32) -> Self {
        Trace {
            model,
            parameters: Parameters::new(model, context.ranks()),
            batch,
            context,
            dropout,
            block: None,
            is_loss: false,
            trains: false,
            balancing: None,
            fixed_routing: None,
            router_sums: Vec::new(),
        }
    }

    /// The output of the final norm; of a stage of a pipeline before the last, the residual stream after its
    /// blocks.
    fn hidden(&mut self, t: &mut Tracer) -> Result<ValueId, TraceError> {
        let stage = self.context.stage();
        self.enter(t, None);
        let mut stream = match stage.is_first() {
            true => self.embedded(t)?,
            false => t.input(io::STREAM, TensorType::new(DType::F32, [self.own_tokens(), self.model.dim])),
        };
        let mut addition = None;
        let mut router_sums = Vec::new();
        for (block, layer) in self.model.layers.iter().enumerate() {
            if !stage.has_block(block) {
                router_sums.extend(self.no_router_sums(t, layer));
                continue;
            }
            self.enter(t, Some(block));
            let (sum, normed) = self.norm(t, stream, addition, "attn_norm")?;
            t.boundary(sum);
            let mixed = match &layer.mixer {
                Mixer::Attention(attention) => self.attention(t, attention, normed)?,
            };
            let mixed = self.dropped(t, mixed, 1 + 2 * block as u32)?;
            let (sum, normed) = self.norm(t, sum, Some(mixed), "mlp_norm")?;
            let fed = match &layer.feed_forward {
                FeedForward::Dense(mlp) => self.mlp(t, mlp, normed)?,
                FeedForward::Experts(experts) => self.experts(t, experts, normed)?,
            };
            router_sums.append(&mut self.router_sums);
            stream = sum;
            addition = Some(self.dropped(t, fed, 2 + 2 * block as u32)?);
        }
        self.router_sums = router_sums;
        self.enter(t, None);
        match (stage.is_last(), addition) {
            (false, Some(addition)) => Ok(t.site("stage").apply(Add, &[stream, addition])?[0]),
            _ => Ok(self.norm(t, stream, addition, "norm")?.1),
        }
    }

    /// The tokens whose residual stream a rank has.
    fn own_tokens(&self) -> usize {
        self.context.ranks().own_tokens(self.batch.tokens())
    }

    /// A tensor with a row for each token of this rank, for those of all ranks of its tensor group.
    fn of_all_tokens(&self, t: &mut Tracer, x: ValueId) -> Result<ValueId, TraceError> {
        let ranks = self.context.ranks();
        if ranks.tensor.size == 1 {
            return Ok(x);
        }
        let gather = GatherSequence { groups: ranks.tensor, tokens: self.batch.tokens() };
        Ok(t.apply(gather, &[x])?[0])
    }

    /// The embeddings of the tokens.
    fn embedded(&self, t: &mut Tracer) -> Result<ValueId, TraceError> {
        let ids = t.input(io::TOKENS, TensorType::new(DType::I32, [self.own_tokens()]));
        let table = self.parameters.declare(t, names::EMBED);
        let embedded = t.site("embed").apply(Embedding, &[ids, table])?[0];
        self.dropped(t, embedded, 0)
    }

    /// Zeros in place of the figures of a router that another stage computes.
    fn no_router_sums(&self, t: &mut Tracer, layer: &Layer) -> Vec<ValueId> {
        match (self.balancing, layer.feed_forward.experts()) {
            (Some(_), Some(e)) => vec![zeros(t, &[]), zeros(t, &[]), zeros(t, &[e.count])],
            _ => Vec::new(),
        }
    }

    /// The loss of the last hidden states. Returns the sums of losses of sources, if there are any.
    fn loss(&self, t: &mut Tracer, loss: &Loss, hidden_td: ValueId) -> Result<Option<ValueId>, TraceError> {
        let &Loss { chunk_tokens, z_loss, sources, counts_matches, .. } = loss;
        let tokens = self.own_tokens();
        let head_vd = self.head(t);
        let targets = t.input(io::TARGETS, TensorType::new(DType::I32, [tokens]));
        let inv_targets = t.input(io::INV_TARGETS, TensorType::new(DType::F32, []));
        let terms = match (sources, counts_matches) {
            (0, _) => Terms::None,
            (_, false) => Terms::Losses,
            (_, true) => Terms::LossesAndMatches,
        };
        let op = LinearCrossEntropy { chunk_tokens, z_loss, terms };
        let outputs = t.site(HEAD).apply(op, &[hidden_td, head_vd, targets, inv_targets])?;
        t.output(io::OBJECTIVE, outputs[0]);
        t.output(io::LOSS, outputs[1]);
        if sources == 0 {
            return Ok(None);
        }
        let source_t = t.input(io::SOURCES, TensorType::new(DType::I32, [tokens]));
        // A sum by source is the gradient of a lookup by source: each token adds its row to its source's.
        let sum = EmbeddingGrad { vocab_size: sources, out: DType::F32 };
        Ok(Some(t.site("loss_by_source").emit(sum, &[source_t, outputs[2]])?[0]))
    }

    /// The weight that turns the last hidden state into logits.
    fn head(&self, t: &mut Tracer) -> ValueId {
        self.parameters.declare(t, if self.model.tie_embeddings { names::EMBED } else { names::HEAD })
    }

    fn enter(&mut self, t: &mut Tracer, block: Option<usize>) {
        self.block = block;
        t.enter_block(block.map(|block| block as u32));
    }

    /// The name of the value at `site`, in the block if one is traced.
    fn name(&self, site: &str) -> String {
        self.block.map_or_else(|| site.to_owned(), |block| in_block(block, site))
    }

    /// The parameter `of` (`weight` or `bias`) at `site`.
    fn parameter(&self, t: &mut Tracer, site: &str, of: &str) -> ValueId {
        self.parameters.declare(t, &format!("{}.{of}", self.name(site)))
    }

    /// The residual stream after an addition, and its norm.
    fn norm(
        &self,
        t: &mut Tracer,
        stream: ValueId,
        addition: Option<ValueId>,
        site: &str,
    ) -> Result<(ValueId, ValueId), TraceError> {
        let norm = self.model.norm;
        let parameters = norm.parameters().iter().map(|(end, _)| self.parameter(t, site, end));
        let inputs: Vec<ValueId> = [stream].into_iter().chain(addition).chain(parameters).collect();
        t.site(site);
        Ok(match (norm, addition) {
            (Norm::Rms { eps }, Some(_)) => {
                let outputs = t.apply(AddRmsNorm { eps: eps as f32 }, &inputs)?;
                (outputs[0], outputs[1])
            }
            (Norm::Rms { eps }, None) => (stream, t.apply(RmsNorm { eps: eps as f32 }, &inputs)?[0]),
        })
    }

    /// A linear layer. In a tensor group each rank computes some outputs for the tokens of all ranks, or its
    /// part of the sums over inputs, which are then added for the tokens of each rank.
    fn linear(&self, t: &mut Tracer, x: ValueId, linear: &LinearSpec) -> Result<ValueId, TraceError> {
        let cut = linear.tensor_cut().filter(|_| self.context.ranks().tensor.size > 1);
        assert!(
            !(linear.bias && cut == Some(CutBy::Columns)),
            "each rank of a tensor group would add the bias of {}",
            linear.site
        );
        t.site(linear.site);
        let x = if let Some(CutBy::Rows(_)) = cut { self.of_all_tokens(t, x)? } else { x };
        let mut inputs = vec![x, self.parameter(t, linear.site, "weight")];
        if linear.bias {
            inputs.push(self.parameter(t, linear.site, "bias"));
        }
        let y = t.apply(Linear, &inputs)?[0];
        let y = self.adapted(t, x, y, linear)?;
        if cut == Some(CutBy::Columns) { scatter(t, self.context.ranks().tensor, y) } else { Ok(y) }
    }

    /// The output of a linear layer with what its adapters add.
    fn adapted(
        &self,
        t: &mut Tracer,
        x: ValueId,
        y: ValueId,
        linear: &LinearSpec,
    ) -> Result<ValueId, TraceError> {
        let (Some(adapter), Some(block)) = (&self.model.adapter, self.block) else { return Ok(y) };
        let Some((parts, _)) = adapter.of(block, linear) else { return Ok(y) };
        let [down, up] = [DOWN, UP].map(|of| format!("{}.{of}", linear.site));
        let [a, b] = [&down, &up].map(|site| self.parameters.declare(t, &self.name(site)));
        let x = self.dropped_for_adapter(t, x, block, linear.site)?;
        let h = t.site(&down).apply(Linear, &[x, a])?[0];
        let h = t.apply(Scale(adapter.scale()), &[h])?[0];
        Ok(t.site(&up).apply(LoraAdd(parts), &[y, h, b])?[0])
    }

    fn attention(&self, t: &mut Tracer, a: &SelfAttention, x: ValueId) -> Result<ValueId, TraceError> {
        let &SelfAttention { head_dim, scale, rotary, qk_norm, .. } = a;
        let [heads, kv_heads] = [a.heads, a.kv_heads].map(|heads| heads / self.context.ranks().tensor.size);
        let tokens = self.batch.tokens();
        let qkv = self.linear(t, x, &a.qkv_proj(self.model.dim))?;

        let positions = t.input(io::POSITIONS, TensorType::new(DType::I32, [tokens]));
        let mut inputs = vec![qkv, positions, self.rotations(t, head_dim, rotary)];
        if qk_norm {
            inputs.extend(["attn.q_norm", "attn.k_norm"].map(|site| self.parameter(t, site, "weight")));
        }
        let norm = qk_norm.then_some(self.model.norm.eps() as f32);
        let qkv = t.site("attn.rope").apply(QkNormRope { heads, kv_heads, head_dim, norm }, &inputs)?[0];

        t.site("attn.core");
        let attended = match self.context {
            Context::Sequence { document_mask, deterministic, .. } => {
                let mut inputs = vec![qkv];
                if document_mask {
                    inputs.push(t.input(io::DOC_START, TensorType::new(DType::I32, [tokens])));
                }
                let seq_len = self.batch.seq_len;
                let op = Attention { seq_len, heads, kv_heads, head_dim, scale, deterministic };
                t.apply(op, &inputs)?[0]
            }
            Context::Cache { capacity, .. } => {
                let ty = TensorType::new(DType::F32, [self.batch.sequences, capacity, kv_heads * head_dim]);
                let keys = t.state(StateKind::Cache, &self.name("keys"), ty);
                let values = t.state(StateKind::Cache, &self.name("values"), ty);
                let op = CachedAttention { heads, kv_heads, head_dim, scale };
                t.emit_into(op, &[qkv, positions, keys, values], &[None, Some(keys), Some(values)])?[0]
            }
        };
        self.linear(t, attended, &a.o_proj(self.model.dim))
    }

    fn mlp(&self, t: &mut Tracer, mlp: &Mlp, x: ValueId) -> Result<ValueId, TraceError> {
        let gate_up = self.linear(t, x, &mlp.gate_up_proj(self.model.dim))?;
        let activated = activate(t, mlp.activation, "mlp.", gate_up, None)?;
        self.linear(t, activated, &mlp.down_proj(self.model.dim))
    }

    fn dropped(&self, t: &mut Tracer, x: ValueId, site: u32) -> Result<ValueId, TraceError> {
        if self.dropout == 0.0 {
            return Ok(x);
        }
        let rng = t.input(io::RNG, TensorType::new(DType::U32, [4]));
        Ok(t.site("dropout").apply(Dropout { p: self.dropout, site }, &[x, rng])?[0])
    }

    /// The input of a layer's adapters: in training some of its elements are dropped.
    fn dropped_for_adapter(
        &self,
        t: &mut Tracer,
        x: ValueId,
        block: usize,
        site: &str,
    ) -> Result<ValueId, TraceError> {
        let Some(p) = self.model.adapter.as_ref().map(|a| a.dropout).filter(|p| self.trains && *p > 0.0)
        else {
            return Ok(x);
        };
        // Numbers after those of the other dropouts.
        let (blocks, sites) = (self.model.layers.len(), self.model.linear_sites());
        let of_block = sites.iter().position(|of| *of == site).expect("a linear layer of the block");
        let site = (1 + 2 * blocks + block * sites.len() + of_block) as u32;
        let rng = t.input(io::RNG, TensorType::new(DType::U32, [4]));
        Ok(t.site("dropout").apply(Dropout { p, site }, &[x, rng])?[0])
    }

    /// The table of rotation angles, as long as positions can get.
    fn rotations(&self, t: &mut Tracer, head_dim: usize, Rotary { theta, scaling }: Rotary) -> ValueId {
        let positions = match self.context {
            Context::Sequence { .. } => self.batch.seq_len,
            Context::Cache { capacity, .. } => capacity,
        };
        // Engines share constants by name, so the name contains everything that the table depends on.
        let name = format!("rotations.{positions}x{head_dim}.theta_{theta}{}", suffix(scaling));
        let ty = TensorType::new(DType::F32, [positions, head_dim]);
        t.constant(&name, ty, move || rotation_table(positions, head_dim, theta, scaling))
    }
}

/// The suffix that a scaling adds to the name of the rotation table.
fn suffix(scaling: RopeScaling) -> String {
    match scaling {
        RopeScaling::None => String::new(),
        RopeScaling::Linear { factor } => format!(".linear_{factor}"),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: context,
        } => format!(".llama3_{factor}_{low}_{high}_{context}"),
    }
}
