//! Tests of [`BalanceBias`].

use super::BalanceBias;
use crate::run_op::run;
use xtrain_tensor::{DType, HostTensor, TensorType};

/// The bias after an update with these loads.
fn updated(skip: u32, bias: &[f64], load: &[f64]) -> Vec<f64> {
    let vector = |x: &[f64]| HostTensor::from_f64(TensorType::new(DType::F32, [x.len()]), x);
    let skip = HostTensor::from_f64(TensorType::new(DType::U32, []), &[skip.into()]);
    // Another sum comes first.
    let sums = [&[9.0], load].concat();
    run(&BalanceBias::new(0.25, vec![1]), &[&skip, &vector(&sums), &vector(bias)]).remove(0).to_f64()
}

#[test]
fn experts_with_few_tokens_rise_and_the_mean_stays() {
    // Signs 1, 1, 0, -1 of a mean load of 3, less their mean of 1/4.
    let bias = updated(0, &[0.0, 1.0, 2.0, -1.0], &[0.0, 2.0, 3.0, 7.0]);
    assert_eq!(bias, [0.1875, 1.1875, 1.9375, -1.3125]);
    assert_eq!(bias.iter().sum::<f64>(), 2.0);
}

#[test]
fn equal_loads_and_a_skipped_step_change_no_bit() {
    let bias = [0.3f32, -0.7, 1e-3].map(f64::from);
    assert_eq!(updated(0, &bias, &[5.0; 3]), bias);
    assert_eq!(updated(1, &bias, &[9.0, 0.0, 1.0]), bias);
}

#[test]
fn a_load_equal_to_the_mean_has_no_sign() {
    // Sums beyond the whole numbers of f32.
    let loads = [16_777_215.0, 16_777_213.0, 16_777_214.0];
    assert_eq!(updated(0, &[0.0; 3], &loads), [-0.25, 0.25, 0.0]);
}
