//! Speed of attention, forward and backward, over whole sequences and within documents.
//!
//! The ops run as in a model, with the algorithm that they choose on the processor; `XTRAIN_PREFER` selects
//! another one.

use super::op_bench::{OpBench, OpBenchOptions, OpRates, OpSpeeds};
use super::operands::{operand, traced};
use serde::Serialize;
use xtrain_config::Parsed;
use xtrain_model::decoder::Batch;
use xtrain_model::{Mixer, SelfAttention};
use xtrain_ops::attention::{Attention, AttentionGrad};
use xtrain_planner::estimate::OpWork;
use xtrain_program::{Program, Role, Stage};
use xtrain_step::engine::{Processor, Target};
use xtrain_step::error::LearnError;
use xtrain_step::random_batch::documents;
use xtrain_tensor::{DType, TensorType};
use xtrain_train::error::RunError;
use xtrain_train::spec::plan_on;

/// The attention of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct AttentionShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub seq_len: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Speed of one of attention's ops.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionSpeed {
    /// The sizes.
    #[serde(flatten)]
    pub shape: AttentionShape,
    /// `attention` or `attention_grad`.
    pub op: String,
    /// True if gradients were added in a fixed order.
    pub deterministic: bool,
    /// Mean tokens of the documents that attention stayed within; `None` if a sequence is one document.
    pub document_tokens: Option<f64>,
    /// Its rates; operations are those of the tokens that a token may see.
    #[serde(flatten)]
    pub rates: OpRates,
}

/// The attention of the first layer of a run file's model.
pub fn attention_of(parsed: &Parsed) -> Result<AttentionShape, RunError> {
    let spec = plan_on(parsed, Processor::for_config(&parsed.config)?.target())?.spec;
    let Batch { sequences: batch, seq_len } = spec.batch;
    // A model is validated to have a layer.
    let Mixer::Attention(first) = &spec.model.layers[0].mixer;
    let &SelfAttention { heads, kv_heads, head_dim, .. } = first;
    Ok(AttentionShape { batch, seq_len, heads, kv_heads, head_dim })
}

/// The attention to measure by default: that of a model of a billion parameters, or a small one on the CPU.
pub fn common_attention(target: Target) -> AttentionShape {
    match target {
        Target::Cpu => AttentionShape { batch: 1, seq_len: 128, heads: 4, kv_heads: 2, head_dim: 32 },
        Target::Cuda => AttentionShape { batch: 8, seq_len: 4096, heads: 32, kv_heads: 8, head_dim: 64 },
    }
}

/// Measures attention of this shape, over whole sequences and within documents of about `mean` tokens.
pub fn attention(
    shape: AttentionShape,
    mean: usize,
    options: OpBenchOptions,
) -> Result<OpSpeeds<AttentionSpeed>, RunError> {
    let bench = OpBench::new(options)?;
    // The CPU has one order.
    let orders: &[bool] = if bench.target == Target::Cpu { &[true] } else { &[false, true] };
    let starts = documents([shape.batch, shape.seq_len], mean);
    let mut rows = Vec::new();
    for masked in [false, true] {
        let inputs = if masked { vec![("doc_start", starts.clone())] } else { Vec::new() };
        let (program, made) = program(shape, masked, orders, bench.dtype())?;
        let works: Vec<OpWork> =
            program.instances.iter().map(|i| OpWork::from_instance(&program, i)).collect();
        let seconds = bench.seconds(program, &inputs)?;
        let (share, length) = if masked { seen(shape, &starts) } else { (1.0, None) };
        for ((work, seconds), (op, deterministic)) in works.into_iter().zip(seconds).zip(made) {
            let rates = OpRates::new(seconds, work.flops * share, work.bytes, bench.ceiling);
            rows.push(AttentionSpeed { shape, op: op.into(), deterministic, document_tokens: length, rates });
        }
    }
    Ok(bench.speeds(rows))
}

/// Attention, then its gradients in each of these orders, with the name and order of each op.
fn program(
    shape: AttentionShape,
    masked: bool,
    orders: &[bool],
    dtype: DType,
) -> Result<(Program, Vec<(&'static str, bool)>), LearnError> {
    let AttentionShape { batch, seq_len, heads, kv_heads, head_dim } = shape;
    let op = |deterministic| Attention { seq_len, heads, kv_heads, head_dim, scale: None, deterministic };
    let tokens = batch * seq_len;
    let (mut program, (qkv, made, starts)) =
        traced(Program::default(), Stage::Forward, Role::Forward, |t| {
            let qkv = operand(t, "qkv", dtype, [tokens, (heads + 2 * kv_heads) * head_dim]);
            let starts = masked.then(|| t.input("doc_start", TensorType::new(DType::I32, [tokens])));
            let inputs: Vec<_> = [qkv].into_iter().chain(starts).collect();
            Ok((qkv, t.apply(op(orders[0]), &inputs)?, starts))
        })?;
    let mut ops = vec![("attention", orders[0])];
    for &deterministic in orders {
        (program, ()) = traced(program, Stage::Backward, Role::Dgrad, |t| {
            let d_o = operand(t, "d_o", dtype, [tokens, heads * head_dim]);
            let inputs: Vec<_> = [d_o, qkv, made[0], made[1]].into_iter().chain(starts).collect();
            t.emit(AttentionGrad(op(deterministic)), &inputs).map(|_| ())
        })?;
        ops.push(("attention_grad", deterministic));
    }
    Ok((program, ops))
}

/// Share of the token pairs of whole sequences that lie within documents, and the mean length of documents.
fn seen(shape: AttentionShape, starts: &[i32]) -> (f64, Option<f64>) {
    let mut lengths: Vec<usize> = Vec::new();
    for (at, &start) in starts.iter().enumerate() {
        if at % shape.seq_len == start as usize {
            lengths.push(0);
        }
        if let Some(last) = lengths.last_mut() {
            *last += 1;
        }
    }
    let pairs: f64 = lengths.iter().map(|&n| (n as f64).powi(2)).sum();
    let all = shape.batch as f64 * (shape.seq_len as f64).powi(2);
    (pairs / all, Some(starts.len() as f64 / lengths.len() as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_config::Device;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_len: 64, heads: 2, kv_heads: 1, head_dim: 4 };

    #[test]
    fn documents_begin_with_each_sequence_and_have_about_the_mean_length() {
        let shape = AttentionShape { batch: 4, seq_len: 8192, ..SHAPE };
        let starts = documents([shape.batch, shape.seq_len], 256);
        assert_eq!(starts.len(), 4 * 8192);
        for (at, &start) in starts.iter().enumerate() {
            let place = at % 8192;
            assert!(start as usize <= place && (place > 0 || start == 0));
            assert!(start as usize == place || starts[at - 1] == start, "a document is in one piece");
        }
        let (share, length) = seen(shape, &starts);
        let length = length.expect("documents");
        assert!((200.0..310.0).contains(&length), "{length}");
        // Of exponential lengths the mean square is twice the square of the mean.
        assert!((share * 8192.0 / (2.0 * length) - 1.0).abs() < 0.25, "{share} {length}");
        assert_eq!(seen(SHAPE, &[0; 128]).0, 1.0);
    }

    #[test]
    fn attention_is_measured_forward_and_backward_whole_and_within_documents() {
        let options = OpBenchOptions { device: Device::Cpu, recipe: None, repeats: 1, runs: 2 };
        let speeds = attention(SHAPE, 8, options).expect("measured");
        let rows: Vec<(&str, bool)> =
            speeds.rows.iter().map(|row| (row.op.as_str(), row.document_tokens.is_some())).collect();
        let wanted =
            [("attention", false), ("attention_grad", false), ("attention", true), ("attention_grad", true)];
        assert_eq!(rows, wanted);
        let flops = |row: &AttentionSpeed| row.rates.tflops * row.rates.seconds * 1e12;
        let whole = 2.0 * 128.0 * 8.0 * 64.0;
        assert!((flops(&speeds.rows[0]) / whole - 1.0).abs() < 1e-9);
        assert!((flops(&speeds.rows[1]) / whole - 2.5).abs() < 1e-9);
        assert!(flops(&speeds.rows[2]) < 0.5 * whole, "what no token sees is not counted");
    }
}
