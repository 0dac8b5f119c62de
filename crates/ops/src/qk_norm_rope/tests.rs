//! Tests of the rotation and the norm against their definition.

use super::{QkNormRope, RopeScaling, rotation_table};
use crate::check::seed;
use crate::run_op::{normal, run};
use xtrain_tensor::formats::round_bf16;
use xtrain_tensor::{DType, HostTensor, TensorType};

const EPS: f32 = 1e-5;

fn positions(values: &[usize]) -> HostTensor {
    let values: Vec<f64> = values.iter().map(|&p| p as f64).collect();
    HostTensor::from_f64(TensorType::new(DType::I32, [values.len()]), &values)
}

/// The output for one head, by the definition in f64.
fn reference(x: &[f64], w: Option<&[f64]>, position: f64, theta: f64) -> Vec<f64> {
    let (e, half) = (x.len(), x.len() / 2);
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / e as f64;
    let normed = |j: usize| w.map_or(x[j], |w| x[j] * w[j] / (mean_square + f64::from(EPS)).sqrt());
    let mut y = vec![0.0; e];
    for j in 0..half {
        let angle = position * theta.powf(-2.0 * j as f64 / e as f64);
        // The pair as a complex number, rotated.
        y[j] = normed(j) * angle.cos() - normed(j + half) * angle.sin();
        y[j + half] = normed(j) * angle.sin() + normed(j + half) * angle.cos();
    }
    y
}

#[test]
fn queries_and_keys_are_rotated_and_values_are_unchanged() {
    let seed = seed();
    let (tokens, heads, kv_heads, e) = (11usize, 3usize, 2usize, 16usize);
    let width = (heads + 2 * kv_heads) * e;
    let x = normal(DType::F32, [tokens, width], 1.0, seed);
    let token_positions: Vec<usize> = (0..tokens).map(|t| (t * 13) % 40).collect();
    let table = rotation_table(40, e, 10_000.0, RopeScaling::None);
    let (q_w, k_w) = (normal(DType::F32, [e], 1.0, seed + 1), normal(DType::F32, [e], 1.0, seed + 2));
    for norm in [None, Some(EPS)] {
        let mut inputs = vec![&x];
        let at = positions(&token_positions);
        inputs.extend([&at, &table]);
        if norm.is_some() {
            inputs.extend([&q_w, &k_w]);
        }
        let y = run(&QkNormRope { heads, kv_heads, head_dim: e, norm }, &inputs)[0].to_f64();
        let (x, q_w, k_w) = (x.to_f64(), q_w.to_f64(), k_w.to_f64());
        for token in 0..tokens {
            for head in 0..heads + 2 * kv_heads {
                let (x, y) = (&x[token * width + head * e..][..e], &y[token * width + head * e..][..e]);
                if head >= heads + kv_heads {
                    assert_eq!(x, y);
                    continue;
                }
                let w = norm.map(|_| if head < heads { &q_w[..] } else { &k_w[..] });
                for (found, expected) in
                    y.iter().zip(reference(x, w, token_positions[token] as f64, 10_000.0))
                {
                    assert!((found - expected).abs() < 2e-5, "{found} instead of {expected}");
                }
            }
        }
    }
}

#[test]
fn scores_depend_only_on_the_distance() {
    let (e, distance) = (32usize, 5usize);
    let op = QkNormRope { heads: 1, kv_heads: 1, head_dim: e, norm: None };
    let table = rotation_table(3000, e, 10_000.0, RopeScaling::None);
    let token = normal(DType::F32, [1, 3 * e], 1.0, seed()).to_f64();
    let both =
        HostTensor::from_f64(TensorType::new(DType::F32, [2, 3 * e]), &[&token[..], &token[..]].concat());
    let score = |key: usize| -> f64 {
        let y = run(&op, &[&both, &positions(&[key + distance, key]), &table])[0].to_f64();
        (0..e).map(|j| y[j] * y[3 * e + e + j]).sum()
    };
    let first = score(0);
    for key in [1, 100, 2900] {
        assert!((score(key) - first).abs() < 2e-3, "{} instead of {first}", score(key));
    }
}

#[test]
fn bf16_is_rounded_once() {
    let (tokens, e) = (6usize, 8usize);
    let seed = seed();
    let x = normal(DType::BF16, [tokens, 3 * e], 1.0, seed);
    let wide = HostTensor::from_f64(x.ty().with_dtype(DType::F32), &x.to_f64());
    let w = normal(DType::F32, [e], 1.0, seed + 1);
    let at = positions(&[0, 1, 2, 0, 1, 2]);
    let table = rotation_table(3, e, 10_000.0, RopeScaling::None);
    let op = QkNormRope { heads: 1, kv_heads: 1, head_dim: e, norm: Some(EPS) };
    let narrow = run(&op, &[&x, &at, &table, &w, &w]);
    let wide = run(&op, &[&wide, &at, &table, &w, &w]);
    let rounded: Vec<f64> = wide[0].to_f64().iter().map(|&x| round_bf16(x as f32).into()).collect();
    assert_eq!(narrow[0].to_f64(), rounded);
    assert_eq!(narrow[1].bytes(), wide[1].bytes());
}
