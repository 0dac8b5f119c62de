//! Tracing the decoder: pre-norm blocks of grouped-query attention and SwiGLU on a residual stream.
//!
//! Shape legend: t tokens of the batch (B sequences of S, flattened), d model width, v vocabulary.
//! The residual addition at the end of a half-block is fused with the norm that follows it, so a block's first instance finishes the
//! block before; its sum is the boundary that recomputation keeps.

use crate::Architecture;
use crate::parameters::{Parameters, names};
use xtrain_ops::attention::Attention;
use xtrain_ops::cached_attention::CachedAttention;
use xtrain_ops::dropout::Dropout;
use xtrain_ops::embedding::Embedding;
use xtrain_ops::linear::Linear;
use xtrain_ops::linear_cross_entropy::LinearCrossEntropy;
use xtrain_ops::qk_norm_rope::{QkNormRope, RopeScaling, rotation_table};
use xtrain_ops::rms_norm::{AddRmsNorm, RmsNorm};
use xtrain_ops::swiglu::Swiglu;
use xtrain_program::{StateKind, TraceError, Tracer, ValueId};
use xtrain_tensor::{DType, TensorType};

/// How the tokens of a program hang together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Batch {
    /// B: sequences.
    pub sequences: usize,
    /// S: tokens of a sequence.
    pub seq_len: usize,
}

/// What attention sees of the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Context {
    /// The earlier tokens of the sequence; with a document mask, of the token's document.
    Sequence {
        /// Whether the input `doc_start` bounds attention to documents.
        document_mask: bool,
        /// Whether attention's gradients must be the same bits in every run.
        deterministic: bool,
    },
    /// What earlier runs left in the cache, and the tokens given before it now.
    Cache {
        /// Tokens that the cache holds for each sequence.
        capacity: usize,
    },
}

/// How the loss is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Loss {
    /// Tokens whose logits exist at one time.
    pub chunk_tokens: usize,
    /// Weight of the squared log-sum-exp (PaLM, arXiv 2204.02311, section 5).
    pub z_loss: f32,
}

/// Names of the inputs and outputs of the programs traced here.
pub mod io {
    /// `i32[t]`: token ids.
    pub const TOKENS: &str = "tokens";
    /// `i32[t]`: the position of each token in its sequence or document.
    pub const POSITIONS: &str = "positions";
    /// `i32[t]`: where in its sequence each token's document starts.
    pub const DOC_START: &str = "doc_start";
    /// `i32[t]`: the token to predict at each place; -100 where none is.
    pub const TARGETS: &str = "targets";
    /// `f32[]`: one over the number of targets in the whole global batch.
    pub const INV_TARGETS: &str = "inv_targets";
    /// `u32[4]`: seed (low, high), step, index of the first token within the global batch.
    pub const RNG: &str = "rng";
    /// `i32[n]`: the tokens whose logits are wanted.
    pub const ROWS: &str = "rows";
    /// What is minimised: the cross-entropy and the z-loss.
    pub const OBJECTIVE: &str = "objective";
    /// The mean cross-entropy in nats.
    pub const LOSS: &str = "loss";
    /// `[n, v]`: the logits of the wanted rows.
    pub const LOGITS: &str = "logits";
}

/// The name of the linear layer behind the blocks, as recipes know it.
pub const HEAD: &str = "lm_head";

/// The names of the linear layers of a block, as recipes know them.
pub fn linear_names(block: usize) -> [String; 4] {
    LINEAR_SITES.map(|site| names::block(block, site))
}

/// Where they are in a block, in this order.
pub const LINEAR_SITES: [&str; 4] = [QKV_PROJ, O_PROJ, GATE_UP_PROJ, DOWN_PROJ];

const QKV_PROJ: &str = "attn.qkv_proj";
/// Where attention's output is projected, in its block.
pub(crate) const O_PROJ: &str = "attn.o_proj";
const GATE_UP_PROJ: &str = "mlp.gate_up_proj";
const DOWN_PROJ: &str = "mlp.down_proj";

/// Traces the model up to its loss; returns the objective, the value to differentiate. The outputs are [`io::OBJECTIVE`] and [`io::LOSS`].
/// `dropout` is the share of activations dropped after the embedding and after each half-block.
pub fn trace_loss(
    t: &mut Tracer,
    model: &Architecture,
    batch: Batch,
    context: Context,
    loss: Loss,
    dropout: f32,
) -> Result<ValueId, TraceError> {
    let parameters = Parameters::of(model);
    let hidden_td = trace_hidden(t, model, &parameters, batch, context, dropout)?;
    let tokens = batch.sequences * batch.seq_len;
    let head_vd = head(t, model, &parameters);
    let targets = t.input(io::TARGETS, TensorType::new(DType::I32, [tokens]));
    let inv_targets = t.input(io::INV_TARGETS, TensorType::new(DType::F32, []));
    let op = LinearCrossEntropy { chunk_tokens: loss.chunk_tokens, z_loss: loss.z_loss };
    let made = t.at(HEAD).apply(op, &[hidden_td, head_vd, targets, inv_targets])?;
    t.output(io::OBJECTIVE, made[0]);
    t.output(io::LOSS, made[1]);
    Ok(made[0])
}

/// Traces the model up to the logits of the tokens named by the input [`io::ROWS`] (`rows` of them); the output is [`io::LOGITS`].
pub fn trace_logits(
    t: &mut Tracer,
    model: &Architecture,
    batch: Batch,
    context: Context,
    rows: usize,
) -> Result<ValueId, TraceError> {
    let parameters = Parameters::of(model);
    let hidden_td = trace_hidden(t, model, &parameters, batch, context, 0.0)?;
    let wanted = t.input(io::ROWS, TensorType::new(DType::I32, [rows]));
    let wanted_d = t.at("lm_head.rows").apply(Embedding, &[wanted, hidden_td])?[0];
    let head_vd = head(t, model, &parameters);
    let logits = t.at(HEAD).apply(Linear, &[wanted_d, head_vd])?[0];
    t.output(io::LOGITS, logits);
    Ok(logits)
}

/// The weight that turns the last hidden state into logits.
fn head(t: &mut Tracer, model: &Architecture, parameters: &Parameters) -> ValueId {
    parameters.declare(t, if model.tie_embeddings { names::EMBED } else { names::HEAD })
}

/// Traces the model up to the final norm's output.
fn trace_hidden(
    t: &mut Tracer,
    model: &Architecture,
    parameters: &Parameters,
    batch: Batch,
    context: Context,
    dropout: f32,
) -> Result<ValueId, TraceError> {
    let tokens = batch.sequences * batch.seq_len;
    let mut block = Block { model, parameters, batch, context, dropout, layer: 0 };
    t.enter_block(None);
    let ids = t.input(io::TOKENS, TensorType::new(DType::I32, [tokens]));
    let table = parameters.declare(t, names::EMBED);
    let embedded = t.at("embed").apply(Embedding, &[ids, table])?[0];
    let mut stream = block.dropped(t, embedded, 0)?;
    let mut addition = None;
    for layer in 0..model.layers {
        t.enter_block(Some(layer as u32));
        block.layer = layer;
        let (sum, normed) = block.norm(t, stream, addition, &names::block(layer, "attn_norm"))?;
        t.boundary(sum);
        let attended = block.attention(t, normed)?;
        let attended = block.dropped(t, attended, 1 + 2 * layer as u32)?;
        let (sum, normed) = block.norm(t, sum, Some(attended), &names::block(layer, "mlp_norm"))?;
        let fed = block.feed_forward(t, normed)?;
        stream = sum;
        addition = Some(block.dropped(t, fed, 2 + 2 * layer as u32)?);
    }
    t.enter_block(None);
    let (_, normed) = block.norm(t, stream, addition, "norm")?;
    Ok(normed)
}

/// The parts of a block, for one layer at a time.
struct Block<'a> {
    model: &'a Architecture,
    parameters: &'a Parameters,
    batch: Batch,
    context: Context,
    dropout: f32,
    layer: usize,
}

impl Block<'_> {
    /// The residual stream after an addition, and its norm with the weight `name`.weight.
    fn norm(
        &self,
        t: &mut Tracer,
        stream: ValueId,
        addition: Option<ValueId>,
        name: &str,
    ) -> Result<(ValueId, ValueId), TraceError> {
        let weight = self.parameters.declare(t, &format!("{name}.weight"));
        let eps = self.model.norm_eps as f32;
        t.at(site(name));
        Ok(match addition {
            Some(addition) => {
                let made = t.apply(AddRmsNorm { eps }, &[stream, addition, weight])?;
                (made[0], made[1])
            }
            None => (stream, t.apply(RmsNorm { eps }, &[stream, weight])?[0]),
        })
    }

    fn linear(&self, t: &mut Tracer, x: ValueId, rest: &str, bias: bool) -> Result<ValueId, TraceError> {
        let name = names::block(self.layer, rest);
        let mut inputs = vec![x, self.parameters.declare(t, &format!("{name}.weight"))];
        if bias {
            inputs.push(self.parameters.declare(t, &format!("{name}.bias")));
        }
        Ok(t.at(rest).apply(Linear, &inputs)?[0])
    }

    fn attention(&self, t: &mut Tracer, x: ValueId) -> Result<ValueId, TraceError> {
        let m = self.model;
        let (heads, kv_heads, head_dim) = (m.heads, m.kv_heads, m.head_dim);
        let tokens = self.batch.sequences * self.batch.seq_len;
        let qkv = self.linear(t, x, QKV_PROJ, m.qkv_bias)?;

        let positions = t.input(io::POSITIONS, TensorType::new(DType::I32, [tokens]));
        let mut inputs = vec![qkv, positions, self.rotations(t)];
        if m.qk_norm {
            for n in ["attn.q_norm", "attn.k_norm"] {
                let name = format!("{}.weight", names::block(self.layer, n));
                inputs.push(self.parameters.declare(t, &name));
            }
        }
        let rotation = QkNormRope { heads, kv_heads, head_dim, norm: m.qk_norm.then_some(m.norm_eps as f32) };
        let qkv = t.at("attn.rope").apply(rotation, &inputs)?[0];

        t.at("attn.core");
        let attended = match self.context {
            Context::Sequence { document_mask, deterministic } => {
                let mut inputs = vec![qkv];
                if document_mask {
                    inputs.push(t.input(io::DOC_START, TensorType::new(DType::I32, [tokens])));
                }
                let op = Attention { seq_len: self.batch.seq_len, heads, kv_heads, head_dim, deterministic };
                t.apply(op, &inputs)?[0]
            }
            Context::Cache { capacity } => {
                let ty = TensorType::new(DType::F32, [self.batch.sequences, capacity, kv_heads * head_dim]);
                let keys = t.state(StateKind::Cache, &names::block(self.layer, "keys"), ty);
                let values = t.state(StateKind::Cache, &names::block(self.layer, "values"), ty);
                let op = CachedAttention { heads, kv_heads, head_dim };
                t.emit_into(op, &[qkv, positions, keys, values], &[None, Some(keys), Some(values)])?[0]
            }
        };
        self.linear(t, attended, O_PROJ, false)
    }

    fn feed_forward(&self, t: &mut Tracer, x: ValueId) -> Result<ValueId, TraceError> {
        let gate_up = self.linear(t, x, GATE_UP_PROJ, false)?;
        let activated = t.at("mlp.swiglu").apply(Swiglu, &[gate_up])?[0];
        self.linear(t, activated, DOWN_PROJ, false)
    }

    fn dropped(&self, t: &mut Tracer, x: ValueId, site: u32) -> Result<ValueId, TraceError> {
        if self.dropout == 0.0 {
            return Ok(x);
        }
        let rng = t.input(io::RNG, TensorType::new(DType::U32, [4]));
        Ok(t.at("dropout").apply(Dropout { p: self.dropout, site }, &[x, rng])?[0])
    }

    /// The table of rotation angles, as long as positions can get.
    fn rotations(&self, t: &mut Tracer) -> ValueId {
        let m = self.model;
        let positions = match self.context {
            Context::Sequence { .. } => self.batch.seq_len,
            Context::Cache { capacity } => capacity,
        };
        let (head_dim, theta, scaling) = (m.head_dim, m.rope_theta, m.rope_scaling);
        // Engines share constants by name: it says all that the table depends on.
        let name = format!("rotations.{positions}x{head_dim}.theta_{theta}{}", suffix(scaling));
        let ty = TensorType::new(DType::F32, [positions, head_dim]);
        t.constant(&name, ty, move || rotation_table(positions, head_dim, theta, scaling))
    }
}

/// What a scaling adds to the name of the rotation table.
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

/// The part of a parameter's name behind its block.
fn site(name: &str) -> &str {
    name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, site)| site)
}
