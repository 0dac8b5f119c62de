//! Tests of attention against plain loops in f64, and of properties that hold for all values.

use super::{Attention, AttentionGrad};
use crate::check::seed;
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// Batch sizes and ops, with several blocks of queries and, for 600 tokens, two tiles of keys.
const SHAPES: [(usize, Attention); 4] = [
    (2, Attention { seq_len: 7, heads: 6, kv_heads: 2, head_dim: 5, scale: None, deterministic: true }),
    (2, Attention { seq_len: 75, heads: 2, kv_heads: 2, head_dim: 16, scale: None, deterministic: true }),
    (2, Attention { seq_len: 40, heads: 2, kv_heads: 1, head_dim: 8, scale: Some(0.2), deterministic: true }),
    (1, Attention { seq_len: 600, heads: 2, kv_heads: 1, head_dim: 4, scale: None, deterministic: true }),
];

fn random(op: &Attention, batch: usize, dtype: DType, seed: u64) -> (HostTensor, HostTensor) {
    let tokens = batch * op.seq_len;
    let width = (op.heads + 2 * op.kv_heads) * op.head_dim;
    (
        normal(dtype, [tokens, width], 1.0, seed),
        normal(dtype, [tokens, op.heads * op.head_dim], 1.0, seed + 1),
    )
}

/// Starts of documents of random lengths, about `mean` tokens each.
fn documents(op: &Attention, batch: usize, mean: u32, seed: u64) -> HostTensor {
    let random = Philox::new(seed, 0, 2);
    let mut starts = Vec::new();
    for b in 0..batch {
        let mut start = 0;
        for t in 0..op.seq_len {
            if random.word((b * op.seq_len + t) as u64).is_multiple_of(mean) {
                start = t;
            }
            starts.push(start as f64);
        }
    }
    HostTensor::from_f64(TensorType::new(DType::I32, [starts.len()]), &starts)
}

struct Reference {
    o: Vec<f64>,
    lse: Vec<f64>,
    dqkv: Vec<f64>,
}

/// Outputs by the definition, one query at a time.
fn reference(op: &Attention, qkv: &[f64], d_o: &[f64], starts: Option<&[f64]>) -> Reference {
    let Attention { seq_len, heads, kv_heads, head_dim: e, .. } = *op;
    let (width, out_width) = ((heads + 2 * kv_heads) * e, heads * e);
    let tokens = qkv.len() / width;
    let mut r = Reference {
        o: vec![0.0; tokens * out_width],
        lse: vec![0.0; tokens * heads],
        dqkv: vec![0.0; qkv.len()],
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for token in 0..tokens {
        let (sequence, t) = (token / seq_len, token % seq_len);
        let first = starts.map_or(0, |s| s[token] as usize);
        let seen: Vec<usize> = (first..=t).map(|s| sequence * seq_len + s).collect();
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let q = token * width + head * e;
            let k = |s: usize| s * width + (heads + kv_head) * e;
            let v = |s: usize| s * width + (heads + kv_heads + kv_head) * e;
            let o = token * out_width + head * e;
            let scale = op.scale.map_or_else(|| 1.0 / (e as f64).sqrt(), f64::from);
            let scores: Vec<f64> =
                seen.iter().map(|&s| scale * dot(&qkv[q..][..e], &qkv[k(s)..][..e])).collect();
            let lse = scores.iter().map(|x| x.exp()).sum::<f64>().ln();
            r.lse[(sequence * heads + head) * seq_len + t] = lse;
            let p: Vec<f64> = scores.iter().map(|x| (x - lse).exp()).collect();
            for (p, &s) in p.iter().zip(&seen) {
                (0..e).for_each(|j| r.o[o + j] += p * qkv[v(s) + j]);
            }
            let dp: Vec<f64> = seen.iter().map(|&s| dot(&d_o[o..][..e], &qkv[v(s)..][..e])).collect();
            let mean = dot(&p, &dp);
            for ((p, dp), &s) in p.iter().zip(&dp).zip(&seen) {
                let ds = p * (dp - mean) * scale;
                for j in 0..e {
                    r.dqkv[q + j] += ds * qkv[k(s) + j];
                    r.dqkv[k(s) + j] += ds * qkv[q + j];
                    r.dqkv[v(s) + j] += p * d_o[o + j];
                }
            }
        }
    }
    r
}

fn relative(found: &[f64], expected: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

/// o, lse and dqkv, by the kernels.
fn computed(
    op: &Attention,
    qkv: &HostTensor,
    d_o: &HostTensor,
    starts: Option<&HostTensor>,
) -> [Vec<f64>; 3] {
    let forward = run(op, &[qkv].into_iter().chain(starts).collect::<Vec<_>>());
    let inputs: Vec<_> = [d_o, qkv, &forward[0], &forward[1]].into_iter().chain(starts).collect();
    let backward = run(&AttentionGrad(*op), &inputs);
    [forward[0].to_f64(), forward[1].to_f64(), backward[0].to_f64()]
}

#[test]
fn agrees_with_the_definition_with_and_without_documents() {
    for (batch, op) in SHAPES {
        let seed = seed();
        for (dtype, bars) in [(DType::F64, [1e-12; 3]), (DType::F32, [1e-6, 1e-6, 3e-6])] {
            let (qkv, d_o) = random(&op, batch, dtype, seed);
            for starts in [None, Some(documents(&op, batch, 20, seed))] {
                let found = computed(&op, &qkv, &d_o, starts.as_ref());
                let starts = starts.map(|s| s.to_f64());
                let r = reference(&op, &qkv.to_f64(), &d_o.to_f64(), starts.as_deref());
                for ((found, expected), bar) in found.iter().zip([r.o, r.lse, r.dqkv]).zip(bars) {
                    let error = relative(found, &expected);
                    assert!(error < bar, "{op:?} in {dtype}: off by {error:e}");
                }
            }
        }
    }
}

#[test]
fn bf16_is_as_near_as_its_rounding_allows() {
    for (batch, op) in SHAPES {
        let (qkv, d_o) = random(&op, batch, DType::BF16, seed());
        let [o, _, dqkv] = computed(&op, &qkv, &d_o, None);
        let r = reference(&op, &qkv.to_f64(), &d_o.to_f64(), None);
        for (found, expected) in [(o, r.o), (dqkv, r.dqkv)] {
            let error = relative(&found, &expected);
            assert!((1e-4..6e-3).contains(&error), "{op:?}: off by {error:e}");
        }
    }
}

#[test]
fn a_batch_equals_its_sequences_one_by_one() {
    let op = Attention { seq_len: 45, heads: 4, kv_heads: 2, head_dim: 8, scale: None, deterministic: true };
    let seed = seed();
    let (qkv, d_o) = random(&op, 3, DType::F32, seed);
    let starts = documents(&op, 3, 10, seed);
    let together = computed(&op, &qkv, &d_o, Some(&starts));
    let third = |t: &HostTensor, b: usize| {
        let (rows, cols) = t.ty().shape.rows_cols();
        let n = rows * cols / 3;
        let shape = if t.ty().shape.len() == 1 { vec![n] } else { vec![rows / 3, cols] };
        let ty = TensorType { shape: xtrain_tensor::Shape::new(&shape), dtype: t.ty().dtype };
        HostTensor::from_f64(ty, &t.to_f64()[b * n..][..n])
    };
    for b in 0..3 {
        let alone = computed(&op, &third(&qkv, b), &third(&d_o, b), Some(&third(&starts, b)));
        for (together, alone) in together.iter().zip(&alone) {
            assert_eq!(together[b * alone.len()..][..alone.len()], alone[..]);
        }
    }
}

#[test]
fn the_first_token_attends_to_itself_alone() {
    let op = Attention { seq_len: 40, heads: 2, kv_heads: 1, head_dim: 8, scale: None, deterministic: true };
    let (qkv, d_o) = random(&op, 2, DType::F32, seed());
    let [o, _, _] = computed(&op, &qkv, &d_o, None);
    let qkv = qkv.to_f64();
    for sequence in 0..2 {
        let value = &qkv[sequence * 40 * 32 + 24..][..8];
        for head in 0..2 {
            assert_eq!(&o[sequence * 40 * 16 + head * 8..][..8], value);
        }
    }
}

#[test]
fn later_tokens_and_other_documents_change_nothing() {
    let op = Attention { seq_len: 50, heads: 2, kv_heads: 2, head_dim: 4, scale: None, deterministic: true };
    let seed = seed();
    let (qkv, _) = random(&op, 1, DType::F32, seed);
    // Documents 0..20, 20..36 and 36..50.
    let starts: Vec<f64> =
        (0..50).map(|t| [0.0, 20.0, 36.0][usize::from(t >= 20) + usize::from(t >= 36)]).collect();
    let starts = HostTensor::from_f64(TensorType::new(DType::I32, [50]), &starts);
    let before = run(&op, &[&qkv, &starts])[0].to_f64();
    let mut changed = qkv.to_f64();
    let others = normal(DType::F32, [50, 24], 100.0, seed + 9).to_f64();
    for t in (0..20).chain(30..50) {
        changed[t * 24..][..24].copy_from_slice(&others[t * 24..][..24]);
    }
    let after = run(&op, &[&HostTensor::from_f64(qkv.ty(), &changed), &starts])[0].to_f64();
    assert_eq!(before[20 * 8..30 * 8], after[20 * 8..30 * 8]);
}

#[test]
fn large_scores_do_not_overflow_and_select_the_maximum() {
    let op = Attention { seq_len: 33, heads: 1, kv_heads: 1, head_dim: 16, scale: None, deterministic: true };
    let (mut qkv, d_o) = random(&op, 1, DType::F32, seed());
    let values: Vec<f64> =
        qkv.to_f64().iter().enumerate().map(|(i, x)| if i % 48 < 32 { x * 1000.0 } else { *x }).collect();
    qkv = HostTensor::from_f64(qkv.ty(), &values);
    let [o, _, dqkv] = computed(&op, &qkv, &d_o, None);
    assert!(dqkv.iter().all(|x| x.is_finite()));
    // A softmax this sharp selects one value.
    let last = &o[32 * 16..];
    let best = (0..33)
        .max_by(|&a, &b| {
            let score =
                |s: usize| (0..16).map(|j| values[32 * 48 + j] * values[s * 48 + 16 + j]).sum::<f64>();
            score(a).total_cmp(&score(b))
        })
        .expect("keys");
    let error = relative(last, &values[best * 48 + 32..][..16]);
    assert!(error < 1e-3, "{error:e}");
}

#[test]
fn the_cost_is_that_of_the_causal_half() {
    let op =
        Attention { seq_len: 1024, heads: 8, kv_heads: 2, head_dim: 64, scale: None, deterministic: true };
    let qkv = TensorType::new(DType::F32, [4096, 12 * 64]);
    let o = TensorType::new(DType::F32, [4096, 8 * 64]);
    let gemm = f64::from(4 * 8 * 64) * 1024.0 * 1024.0;
    assert_eq!(op.cost(&[qkv], &[]).flops(), 2.0 * gemm);
    assert_eq!(AttentionGrad(op).cost(&[o, qkv], &[]).flops(), 5.0 * gemm);
}

#[test]
fn the_cost_of_a_sequence_of_millions_does_not_wrap() {
    let op = Attention {
        seq_len: 1 << 24,
        heads: 128,
        kv_heads: 8,
        head_dim: 128,
        scale: None,
        deterministic: true,
    };
    let (o, qkv) = (
        TensorType::new(DType::BF16, [1 << 24, 128 << 7]),
        TensorType::new(DType::BF16, [1 << 24, 144 << 7]),
    );
    // Five GEMMs of s x s x n with two FLOPs per product, of which half are counted: more than 64 bits hold.
    assert_eq!(AttentionGrad(op).cost(&[o, qkv], &[]).flops(), 5.0 * 2.0f64.powi(24 + 24 + 14));
}

#[test]
fn wrong_operands_are_named() {
    let op = Attention { seq_len: 8, heads: 3, kv_heads: 2, head_dim: 4, scale: None, deterministic: true };
    let qkv = TensorType::new(DType::F32, [16, 28]);
    assert_eq!(op.infer(&[qkv]).unwrap_err().0, "3 query heads do not divide among 2 key/value heads");
    let op = Attention { heads: 4, ..op };
    assert_eq!(
        op.infer(&[qkv]).unwrap_err().0,
        "qkv must be floats of (4 query + 2 * 2 key/value heads) * 4 = 32 columns, not f32[16, 28]"
    );
    let qkv = TensorType::new(DType::F32, [15, 32]);
    assert_eq!(op.infer(&[qkv]).unwrap_err().0, "15 tokens are not whole sequences of 8");
}
