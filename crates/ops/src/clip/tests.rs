//! Tests of the clipping coefficient and of the steps that are skipped.

use super::Clip;
use crate::run_op::run;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// (applied, coefficient, skip) after clipping at `max_norm`.
fn clip(max_norm: f64, norm: f64, loss: f64, applied: f64) -> (f64, f64, f64) {
    let tensor = |dtype, shape: &[usize], x| {
        HostTensor::from_f64(TensorType { dtype, shape: xtrain_tensor::Shape::new(shape) }, &[x])
    };
    let inputs =
        [tensor(DType::F32, &[], norm), tensor(DType::F32, &[], loss), tensor(DType::U32, &[1], applied)];
    let outputs: Vec<f64> =
        run(&Clip { max_norm }, &inputs.each_ref()).iter().map(|t| t.to_f64()[0]).collect();
    (outputs[0], outputs[1], outputs[2])
}

#[test]
fn a_norm_above_the_bound_is_scaled_down_to_it() {
    assert_eq!(clip(1.0, 3.0, 2.0, 0.0), (1.0, f64::from(1.0 / (3.0f32 + 1e-6)), 0.0));
}

#[test]
fn a_norm_below_the_bound_is_left_alone() {
    assert_eq!(clip(1.0, 0.5, 2.0, 7.0), (8.0, 1.0, 0.0));
    assert_eq!(clip(1.0, 0.0, 2.0, 7.0), (8.0, 1.0, 0.0));
}

#[test]
fn zero_turns_clipping_off_but_not_the_check() {
    assert_eq!(clip(0.0, 1e30, 2.0, 7.0), (8.0, 1.0, 0.0));
    assert_eq!(clip(0.0, f64::INFINITY, 2.0, 7.0), (7.0, 0.0, 1.0));
}

#[test]
fn a_step_whose_norm_or_loss_is_not_finite_does_not_count() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(clip(1.0, bad, 2.0, 7.0), (7.0, 0.0, 1.0), "norm {bad}");
        assert_eq!(clip(1.0, 2.0, bad, 7.0), (7.0, 0.0, 1.0), "loss {bad}");
    }
}

#[test]
fn a_bound_that_is_not_a_number_is_refused() {
    let scalar = TensorType::new(DType::F32, []);
    for max_norm in [f64::NAN, f64::INFINITY, -1.0] {
        assert!(Clip { max_norm }.infer(&[scalar, scalar, TensorType::new(DType::U32, [1])]).is_err());
    }
}
