//! Causal scaled-dot-product attention by cuDNN, forward and backward, as operation graphs that its engines
//! recognise.
//!
//! Shapes are B, H, S, D: sequences, heads, tokens of a sequence, head width. Queries, keys and values are
//! columns of one matrix whose rows are tokens: h query heads, k key heads, k value heads.

use crate::dnn::{
    BOOLEAN_TYPE, Dims, Direction, GraphBuilder, GraphPlan, INDEX_TYPE, Pointwise, Reduce, Tensor, packed,
};
use crate::error::CudaError;
use crate::ffi::cudnn::{DATA_BFLOAT16, DATA_FLOAT};
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::memory::DevicePtr;

/// Workspace of an engine beyond the tensors of the graph, in bytes.
const ENGINE_BYTES: usize = 4 << 20;

// The indices of the addresses that a run is given. The forward uses the first five.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const O: usize = 3;
const LSE: usize = 4;
const D_O: usize = 5;
/// Row sums of d_o o.
const SUMS: usize = 6;
/// dq in f32, before the cast.
const DQ_SUMS: usize = 7;
const DQ: usize = 8;
const DK: usize = 9;
const DV: usize = 10;

/// Attention of bf16 heads over whole sequences.
#[derive(Clone, Copy, Debug)]
pub struct Sdpa {
    /// B.
    pub sequences: usize,
    /// S.
    pub seq_len: usize,
    /// h.
    pub heads: usize,
    /// k, which divides h.
    pub kv_heads: usize,
    /// D.
    pub head_dim: usize,
    /// The factor on the products of queries and keys.
    pub scale: f32,
    /// True if the backward must compute the same bits in every run.
    pub deterministic: bool,
}

impl Sdpa {
    /// True if cuDNN may have an engine for these sizes; only planning is certain.
    pub fn may_run(&self) -> bool {
        self.head_dim.is_multiple_of(8) && self.head_dim <= 256 && self.seq_len > 1
    }

    /// Workspace of the forward in bytes.
    pub fn forward_bytes(&self) -> usize {
        ENGINE_BYTES
    }

    /// Workspace of the backward in bytes: row sums of d_o o, dq in f32, and the engine's own workspace,
    /// which holds dq once more. A deterministic engine has no sums of dq, but writes the gradient of each
    /// score, in two bytes.
    pub fn backward_bytes(&self) -> usize {
        let padded = self.seq_len.next_multiple_of(128);
        let scores = 2 * self.sequences * self.heads * padded * padded;
        let of_engine = self.dq_bytes() + ENGINE_BYTES + if self.deterministic { scores } else { 0 };
        self.sums_bytes() + self.dq_bytes() + of_engine
    }

    fn sums_bytes(&self) -> usize {
        (4 * self.sequences * self.heads * self.seq_len).next_multiple_of(256)
    }

    fn dq_bytes(&self) -> usize {
        (4 * self.sequences * self.heads * self.seq_len * self.head_dim).next_multiple_of(256)
    }

    /// Computes `o` and the log-sum-exps `lse` from `qkv`, with a workspace of [`Sdpa::forward_bytes`].
    ///
    /// # Errors
    /// If cuDNN is missing or has no engine for these sizes.
    ///
    /// # Safety
    /// Whenever the work is enqueued, the addresses hold as many elements as the sizes say: f32 for `lse`,
    /// bf16 for all others.
    pub unsafe fn forward(
        &self,
        gpu: &Gpu,
        qkv: DevicePtr,
        o: DevicePtr,
        lse: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<Work, CudaError> {
        let plan = gpu.graph_plan(self.key("attention"), Direction::Forward, |g| self.forward_plan(g))?;
        let [q, k, v] = self.addresses(qkv);
        let bound = plan.bind(&[q, k, v, o, lse], workspace)?;
        Ok(Work::new(move |stream| bound.enqueue(stream)))
    }

    /// The graph of the forward, over the first five addresses.
    fn forward_plan(&self, mut g: GraphBuilder) -> Result<GraphPlan, CudaError> {
        let h = self.layout();
        let q = g.in_memory(DATA_BFLOAT16, h.query_dims, h.token_strides, Q)?;
        let k = g.in_memory(DATA_BFLOAT16, h.transposed_key_dims, h.transposed_key_strides, K)?;
        let masked = self.masked_scores(&mut g, q, k)?;
        let largest = g.intermediate(DATA_FLOAT, h.row_dims)?;
        g.reduce(Reduce::Max, masked, largest)?;
        let shifted = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Sub, masked, Some(largest), shifted)?;
        let exponentials = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Exp, shifted, None, exponentials)?;
        let sums = g.intermediate(DATA_FLOAT, h.row_dims)?;
        g.reduce(Reduce::Add, exponentials, sums)?;
        let logarithms = g.intermediate(DATA_FLOAT, h.row_dims)?;
        g.pointwise(Pointwise::Log, sums, None, logarithms)?;
        let lse = g.in_memory(DATA_FLOAT, h.row_dims, packed(h.row_dims), LSE)?;
        g.pointwise(Pointwise::Add, largest, Some(logarithms), lse)?;
        let probabilities = g.intermediate(DATA_BFLOAT16, h.score_dims)?;
        g.pointwise(Pointwise::Div, exponentials, Some(sums), probabilities)?;
        let v = g.in_memory(DATA_BFLOAT16, h.key_dims, h.token_strides, V)?;
        let o = g.in_memory(DATA_BFLOAT16, h.query_dims, h.output_strides, O)?;
        g.matmul(probabilities, v, o)?;
        g.plan(self.forward_bytes(), true)
    }

    /// Computes `dqkv` from the output's gradient and the results of the forward, with a workspace of
    /// [`Sdpa::backward_bytes`].
    ///
    /// # Errors
    /// Those of [`Sdpa::forward`]; also if gradients must be deterministic and no such engine fits.
    ///
    /// # Safety
    /// The terms of [`Sdpa::forward`].
    #[allow(clippy::too_many_arguments, reason = "five tensors in, one out")]
    pub unsafe fn backward(
        &self,
        gpu: &Gpu,
        d_o: DevicePtr,
        qkv: DevicePtr,
        o: DevicePtr,
        lse: DevicePtr,
        dqkv: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<Work, CudaError> {
        let (sums_at, dq_at) = (workspace, workspace.offset(self.sums_bytes()));
        let engine_at = dq_at.offset(self.dq_bytes());
        let plan =
            gpu.graph_plan(self.key("attention backward"), Direction::Backward, |g| self.backward_plan(g))?;
        let ([q, k, v], [dq, dk, dv]) = (self.addresses(qkv), self.addresses(dqkv));
        let bound = plan.bind(&[q, k, v, o, lse, d_o, sums_at, dq_at, dq, dk, dv], engine_at)?;
        let context = gpu.context().clone();
        let dq_bytes = self.dq_bytes();
        let adds = !self.deterministic;
        Ok(Work::new(move |stream| {
            if adds {
                // Blocks add their parts of dq to this tensor.
                // SAFETY: the workspace has these bytes, by the promise of `backward`.
                unsafe { crate::memory::fill(&context, dq_at, 0, dq_bytes, stream)? };
            }
            bound.enqueue(stream)
        }))
    }

    /// The graph of the backward, over all addresses.
    fn backward_plan(&self, mut g: GraphBuilder) -> Result<GraphPlan, CudaError> {
        let h = self.layout();
        let q = g.in_memory(DATA_BFLOAT16, h.query_dims, h.token_strides, Q)?;
        let k = g.in_memory(DATA_BFLOAT16, h.transposed_key_dims, h.transposed_key_strides, K)?;
        let v = g.in_memory(DATA_BFLOAT16, h.transposed_key_dims, h.transposed_key_strides, V)?;
        let o = g.in_memory(DATA_BFLOAT16, h.query_dims, h.output_strides, O)?;
        let d_o = g.in_memory(DATA_BFLOAT16, h.query_dims, h.output_strides, D_O)?;
        let lse = g.in_memory(DATA_FLOAT, h.row_dims, packed(h.row_dims), LSE)?;
        let scale = g.scalar(self.scale)?;

        let products = g.intermediate(DATA_FLOAT, h.query_dims)?;
        g.pointwise(Pointwise::Mul, d_o, Some(o), products)?;
        let unscaled = g.intermediate(DATA_FLOAT, h.row_dims)?;
        g.reduce(Reduce::Add, products, unscaled)?;
        let one = g.scalar(1.0)?;
        let sums = g.in_memory(DATA_FLOAT, h.row_dims, packed(h.row_dims), SUMS)?;
        g.pointwise(Pointwise::Mul, unscaled, Some(one), sums)?;

        let products = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.matmul(q, k, products)?;
        let scores = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Mul, products, Some(scale), scores)?;
        let shifted = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Sub, scores, Some(lse), shifted)?;
        let masked = self.masked(&mut g, shifted)?;
        let p = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Exp, masked, None, p)?;
        let p_transposed = g.intermediate_with(DATA_BFLOAT16, h.score_dims, h.transposed_score_strides)?;
        g.reshape(p, p_transposed)?;
        self.summed_over_group(&mut g, p_transposed, d_o, &h, DV)?;

        let dp = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.matmul(d_o, v, dp)?;
        let centred = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Sub, dp, Some(sums), centred)?;
        let weighted = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Mul, centred, Some(p), weighted)?;
        let ds = g.intermediate(DATA_FLOAT, h.score_dims)?;
        g.pointwise(Pointwise::Mul, weighted, Some(scale), ds)?;
        let ds_transposed = g.intermediate_with(DATA_BFLOAT16, h.score_dims, h.transposed_score_strides)?;
        g.reshape(ds, ds_transposed)?;
        self.summed_over_group(&mut g, ds_transposed, q, &h, DK)?;

        let k_rows = g.intermediate_with(DATA_FLOAT, h.key_dims, h.token_strides)?;
        g.reshape(k, k_rows)?;
        let dq = g.in_memory(DATA_BFLOAT16, h.query_dims, h.token_strides, DQ)?;
        if self.deterministic {
            // Engines for this form write ds and multiply it by k in a second kernel. Those for the other
            // form let blocks add to dq in any order, on Hopper without a note that says so.
            g.matmul(ds, k_rows, dq)?;
        } else {
            let dq_sums = g.in_memory(DATA_FLOAT, h.query_dims, packed(h.query_dims), DQ_SUMS)?;
            g.matmul(ds, k_rows, dq_sums)?;
            g.pointwise(Pointwise::Identity, dq_sums, None, dq)?;
        }
        let engine_bytes = self.backward_bytes() - self.sums_bytes() - self.dq_bytes();
        g.plan(engine_bytes, self.deterministic)
    }

    /// `scores_transposed rows`, the gradient of keys or values, written to the address with index `place`.
    /// Under grouped-query attention it is the sum over the query heads of each group.
    fn summed_over_group(
        &self,
        g: &mut GraphBuilder,
        scores_transposed: Tensor,
        rows: Tensor,
        h: &Layout,
        place: usize,
    ) -> Result<(), CudaError> {
        let to = g.in_memory(DATA_BFLOAT16, h.key_dims, h.token_strides, place)?;
        if self.heads == self.kv_heads {
            return g.matmul(scores_transposed, rows, to);
        }
        let by_head = g.intermediate(DATA_BFLOAT16, h.query_dims)?;
        g.matmul(scores_transposed, rows, by_head)?;
        g.reduce(Reduce::Add, by_head, to)
    }

    /// `scale q k` for keys up to the query's own position; the least finite number for later keys.
    fn masked_scores(&self, g: &mut GraphBuilder, q: Tensor, k: Tensor) -> Result<Tensor, CudaError> {
        let dims = self.scores();
        let products = g.intermediate(DATA_FLOAT, dims)?;
        g.matmul(q, k, products)?;
        let scale = g.scalar(self.scale)?;
        let scores = g.intermediate(DATA_FLOAT, dims)?;
        g.pointwise(Pointwise::Mul, products, Some(scale), scores)?;
        self.masked(g, scores)
    }

    fn masked(&self, g: &mut GraphBuilder, scores: Tensor) -> Result<Tensor, CudaError> {
        let dims = g.dims(scores);
        let query = g.intermediate(INDEX_TYPE, dims)?;
        g.index(2, scores, query)?;
        let key = g.intermediate(INDEX_TYPE, dims)?;
        g.index(3, scores, key)?;
        let seen = g.intermediate(BOOLEAN_TYPE, dims)?;
        g.pointwise(Pointwise::GreaterOrEqual, query, Some(key), seen)?;
        let least = g.scalar(f32::MIN)?;
        let masked = g.intermediate(DATA_FLOAT, dims)?;
        g.select(seen, scores, least, masked)?;
        Ok(masked)
    }

    /// The key under which the layers of a model share a plan of these sizes.
    fn key(&self, graph: &str) -> String {
        let Sdpa { sequences, seq_len, heads, kv_heads, head_dim, scale, deterministic } = self;
        format!(
            "{graph} {sequences}x{seq_len}, {heads}/{kv_heads} heads of {head_dim}, scale {scale:?}, \
             deterministic {deterministic}"
        )
    }

    fn scores(&self) -> Dims {
        [self.sequences as i64, self.heads as i64, self.seq_len as i64, self.seq_len as i64]
    }

    /// The addresses of queries, keys and values in the matrix at `qkv`.
    fn addresses(&self, qkv: DevicePtr) -> [DevicePtr; 3] {
        [0, self.heads, self.heads + self.kv_heads].map(|head| qkv.offset(2 * head * self.head_dim))
    }

    fn layout(&self) -> Layout {
        let [b, h, s, d] = [self.sequences, self.heads, self.seq_len, self.head_dim].map(|n| n as i64);
        let kv = self.kv_heads as i64;
        let width = (h + 2 * kv) * d;
        Layout {
            query_dims: [b, h, s, d],
            key_dims: [b, kv, s, d],
            transposed_key_dims: [b, kv, d, s],
            row_dims: [b, h, s, 1],
            score_dims: [b, h, s, s],
            transposed_score_strides: [h * s * s, s * s, 1, s],
            token_strides: [s * width, d, width, 1],
            transposed_key_strides: [s * width, d, 1, width],
            output_strides: [s * h * d, d, h * d, 1],
        }
    }
}

/// The shapes and strides of the graphs' tensors.
struct Layout {
    /// Shape of queries and outputs.
    query_dims: Dims,
    /// Shape of keys and values.
    key_dims: Dims,
    /// Shape of transposed keys, as the scores' matrix product reads them.
    transposed_key_dims: Dims,
    /// Shape of one number for each query.
    row_dims: Dims,
    score_dims: Dims,
    transposed_score_strides: Dims,
    token_strides: Dims,
    transposed_key_strides: Dims,
    output_strides: Dims,
}
