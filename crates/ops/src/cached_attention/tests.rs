//! Tests of attention over a cache, in chunks, against attention over whole sequences.

use super::CachedAttention;
use crate::attention::Attention;
use crate::check::seed;
use crate::run_op::{normal, run, run_over};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

const OP: CachedAttention = CachedAttention { heads: 4, kv_heads: 2, head_dim: 6, scale: None };
const WIDTH: usize = (4 + 2 * 2) * 6;
const OUT: usize = 4 * 6;

/// Tokens `from..to` of each sequence of a `[sequences, length, WIDTH]` tensor, each followed by `pad` random
/// rows.
fn chunk(qkv: &HostTensor, sequences: usize, from: usize, to: usize, pad: usize, noise: u64) -> HostTensor {
    let (values, length) = (qkv.to_f64(), qkv.ty().numel() / WIDTH / sequences);
    let noise = normal(DType::F64, [sequences, pad * WIDTH], 1.0, noise).to_f64();
    let rows = (0..sequences).flat_map(|b| {
        let valid = &values[(b * length + from) * WIDTH..(b * length + to) * WIDTH];
        [valid, &noise[b * pad * WIDTH..][..pad * WIDTH]].concat()
    });
    HostTensor::from_f64(
        TensorType::new(qkv.ty().dtype, [sequences * (to - from + pad), WIDTH]),
        &rows.collect::<Vec<_>>(),
    )
}

/// Outputs for the sequences, computed in chunks of (valid, padding) tokens with caches that hold NaNs at
/// first. `padding_position(end, n)` is the position of the n-th padding token of a chunk that ends before
/// token `end`.
fn in_chunks(
    qkv: &HostTensor,
    sequences: usize,
    chunks: &[(usize, usize)],
    padding_position: impl Fn(usize, usize) -> usize,
) -> Vec<f64> {
    let (dtype, length) = (qkv.ty().dtype, qkv.ty().numel() / WIDTH / sequences);
    let cache = TensorType::new(dtype, [sequences, length + 3, 2 * 6]);
    let mut caches = [(); 2].map(|()| {
        let mut t = HostTensor::zeros(cache);
        t.bytes_mut().fill(0xFF);
        t
    });
    let mut o = vec![0.0; sequences * length * OUT];
    let mut from = 0;
    for (n, &(valid, pad)) in chunks.iter().enumerate() {
        let to = from + valid;
        let positions: Vec<f64> = (0..sequences)
            .flat_map(|_| (from..to).chain((0..pad).map(|i| padding_position(to, i))))
            .map(|p| p as f64)
            .collect();
        let positions = HostTensor::from_f64(TensorType::new(DType::I32, [positions.len()]), &positions);
        let rows = chunk(qkv, sequences, from, to, pad, n as u64);
        let inputs = [&rows, &positions, &caches[0], &caches[1]];
        let types: Vec<_> = inputs.iter().map(|t| t.ty()).collect();
        let outputs = OP.infer(&types).expect("valid operands").into_iter().map(HostTensor::zeros);
        let mut outputs = run_over(&OP, &inputs, outputs.collect(), false).into_iter();
        let new = outputs.next().expect("o").to_f64();
        for b in 0..sequences {
            o[(b * length + from) * OUT..(b * length + to) * OUT]
                .copy_from_slice(&new[b * (valid + pad) * OUT..][..valid * OUT]);
        }
        caches = [outputs.next().expect("keys"), outputs.next().expect("values")];
        from = to;
    }
    assert_eq!(from, length, "the chunks cover the sequence");
    o
}

fn whole(qkv: &HostTensor, length: usize) -> Vec<f64> {
    run(
        &Attention { seq_len: length, heads: 4, kv_heads: 2, head_dim: 6, scale: None, deterministic: true },
        &[qkv],
    )[0]
    .to_f64()
}

fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let error =
        norm(&mut found.iter().zip(expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied());
    assert!(error <= tolerance, "off by {error:e}");
}

#[test]
fn chunks_of_any_size_equal_the_whole_sequence() {
    let chunks = [(1, 0), (40, 0), (1, 0), (1, 0), (7, 0), (33, 0), (1, 0)];
    let length = chunks.iter().map(|(valid, _)| valid).sum::<usize>();
    for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-12)] {
        let qkv = normal(dtype, [3 * length, WIDTH], 1.5, seed());
        assert_close(&in_chunks(&qkv, 3, &chunks, |_, _| unreachable!()), &whole(&qkv, length), tolerance);
    }
}

#[test]
fn padding_changes_nothing() {
    let chunks = [(5, 11), (16, 0), (1, 15), (9, 3), (2, 1)];
    let length: usize = chunks.iter().map(|(valid, _)| valid).sum();
    let random = Philox::new(seed(), 0, 0);
    let capacity = length + 3;
    let qkv = normal(DType::F64, [2 * length, WIDTH], 1.5, seed());
    let expected = whole(&qkv, length);
    // Padding positions in order, all at the last row, and anywhere after the valid ones.
    assert_close(&in_chunks(&qkv, 2, &chunks, |end, i| (end + i).min(capacity - 1)), &expected, 1e-12);
    assert_close(&in_chunks(&qkv, 2, &chunks, |_, _| capacity - 1), &expected, 1e-12);
    let anywhere = |end: usize, i: usize| end + random.word((end + i) as u64) as usize % (capacity - end);
    assert_close(&in_chunks(&qkv, 2, &chunks, anywhere), &expected, 1e-12);
}

#[test]
fn bf16_rows_are_copied_to_the_cache_unchanged() {
    let (tokens, capacity) = (4usize, 6usize);
    let qkv = normal(DType::BF16, [tokens, WIDTH], 1.0, seed());
    let positions = HostTensor::from_f64(TensorType::new(DType::I32, [tokens]), &[0.0, 1.0, 2.0, 3.0]);
    let cache = normal(DType::BF16, [1, capacity, 12], 1.0, seed() + 1);
    let out = run(&OP, &[&qkv, &positions, &cache, &cache]);
    for (output, column) in [(&out[1], OUT), (&out[2], OUT + 12)] {
        let (found, qkv, before) = (output.to_f64(), qkv.to_f64(), cache.to_f64());
        for t in 0..tokens {
            assert_eq!(found[t * 12..][..12], qkv[t * WIDTH + column..][..12]);
        }
        assert_eq!(found[tokens * 12..], before[tokens * 12..]);
    }
}

#[test]
#[should_panic(expected = "position 6 of token 1 is outside the cache, which has 6 rows")]
fn a_position_outside_the_cache_panics() {
    let qkv = normal(DType::F32, [2, WIDTH], 1.0, seed());
    let positions = HostTensor::from_f64(TensorType::new(DType::I32, [2]), &[5.0, 6.0]);
    let cache = normal(DType::F32, [1, 6, 12], 1.0, seed());
    run(&OP, &[&qkv, &positions, &cache, &cache]);
}
