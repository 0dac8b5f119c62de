//! SwiGLU against its definition, and at the ends of the range.

use super::{Swiglu, SwigluGrad};
use crate::check::seed as fresh_seed;
use crate::run_op::{normal, run, tensor};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

fn silu(g: f64) -> f64 {
    g / (1.0 + (-g).exp())
}

#[test]
fn the_first_columns_are_the_gate() {
    let (t, f) = (67, 131);
    let gate_up = normal(DType::F32, [t, 2 * f], 2.0, fresh_seed());
    let x = gate_up.to_f64();
    let y = run(&Swiglu::PLAIN, &[&gate_up])[0].to_f64();
    for (row, y) in y.chunks(f).enumerate() {
        for (j, &y) in y.iter().enumerate() {
            let expected = silu(x[row * 2 * f + j]) * x[row * 2 * f + f + j];
            assert!(
                (y - expected).abs() <= 1e-6 * (1.0 + expected.abs()),
                "({row}, {j}): {y}, not {expected}"
            );
        }
    }
}

#[test]
fn large_gates_reach_the_limits() {
    let gates = [0.0, -0.0, 60.0, -60.0, 89.0, -89.0, 1e4, -1e4, 1e30, -1e30];
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let n = gates.len();
        let up = vec![1.5; n];
        let gate_up = HostTensor::from_f64(TensorType::new(dtype, [1, 2 * n]), &[&gates[..], &up].concat());
        let dy = HostTensor::from_f64(TensorType::new(dtype, [1, n]), &vec![2.0; n]);
        let y = run(&Swiglu::PLAIN, &[&gate_up])[0].to_f64();
        let grads = run(&SwigluGrad::PLAIN, &[&dy, &gate_up])[0].to_f64();
        let gates = &gate_up.to_f64()[..n];
        for (j, &g) in gates.iter().enumerate() {
            let near = |found: f64, expected: f64, what: &str| {
                assert!(
                    (found - expected).abs() <= 4e-3 * expected.abs() + 1e-20,
                    "{what} of gate {g} in {dtype}: {found}, not {expected}"
                );
            };
            let limit = |g: f64| if g < -80.0 { 0.0 } else { silu(g) };
            near(y[j], 1.5 * limit(g), "y");
            near(grads[n + j], 2.0 * limit(g), "dup");
            let slope = if g == 0.0 { 0.5 } else { f64::from(g > 0.0) };
            near(grads[j], 3.0 * slope, "dgate");
        }
    }
}

#[test]
fn nan_is_not_hidden() {
    let gate_up = HostTensor::from_f64(TensorType::new(DType::F32, [1, 4]), &[f64::NAN, 1.0, 1.0, f64::NAN]);
    assert!(run(&Swiglu::PLAIN, &[&gate_up])[0].to_f64().iter().all(|y| y.is_nan()));
}

#[test]
fn an_odd_number_of_columns_is_refused() {
    let error = Swiglu::PLAIN.infer(&[TensorType::new(DType::F32, [3, 7])]).unwrap_err();
    assert!(error.0.contains("f32[3, 7]"), "{error}");
    let dy = TensorType::new(DType::F32, [3, 3]);
    let error = SwigluGrad::PLAIN.infer(&[dy, TensorType::new(DType::F32, [3, 8])]).unwrap_err();
    assert!(error.0.contains("f32[3, 4]") && error.0.contains("f32[3, 3]"), "{error}");
}

#[test]
fn weights_multiply_rows() {
    let (t, f) = (9, 33);
    let [gate_up, dy] = [normal(DType::F64, [t, 2 * f], 1.0, 1), normal(DType::F64, [t, f], 1.0, 2)];
    let weights = normal(DType::F64, [t], 1.0, 3);
    let plain = run(&Swiglu::PLAIN, &[&gate_up]).remove(0).to_f64();
    let starts = tensor(DType::I32, &[2], &[0.0, t as f64]);
    let y = run(&Swiglu::WEIGHTED, &[&gate_up, &weights, &starts]).remove(0).to_f64();
    let grad = SwigluGrad { rematerialise: true, ..SwigluGrad::WEIGHTED };
    let grads = run(&grad, &[&dy, &gate_up, &weights, &starts]);
    let weight = |n: usize| weights.to_f64()[n / f];
    assert!((0..t * f).all(|n| y[n] == weight(n) * plain[n]));
    assert_eq!(grads[2].to_f64(), y, "the forward's y");
    for (row, dweight) in grads[1].to_f64().into_iter().enumerate() {
        let sum: f64 = (row * f..(row + 1) * f).map(|n| dy.to_f64()[n] * plain[n]).sum();
        assert!((dweight - sum).abs() < 1e-12, "row {row}: {dweight}, not {sum}");
    }
    let weighted_dy: Vec<f64> = dy.to_f64().iter().enumerate().map(|(n, dy)| weight(n) * dy).collect();
    let weighted_dy = HostTensor::from_f64(dy.ty(), &weighted_dy);
    assert_eq!(grads[0].bytes(), run(&SwigluGrad::PLAIN, &[&weighted_dy, &gate_up])[0].bytes());
}
