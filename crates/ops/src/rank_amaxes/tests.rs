//! Tests of amaxes over ranks.

use super::{MaxAmaxes, RankAmaxes};
use crate::run_op::run;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

#[test]
fn each_tensor_has_the_largest_amax_of_all_ranks_and_a_nan_is_kept() {
    let ranks = [[1.0, 5.0, f64::NAN, f64::INFINITY], [2.0, 4.0, 3.0, 1.0]];
    let rows = ranks.map(|amaxes| {
        let amaxes = amaxes.map(|amax| HostTensor::from_f64(TensorType::new(DType::F32, [1]), &[amax]));
        run(&RankAmaxes, &amaxes.each_ref()).remove(0).to_f64()
    });
    let all = HostTensor::from_f64(TensorType::new(DType::F32, [2, 4]), &rows.concat());
    let found: Vec<f64> = run(&MaxAmaxes, &[&all]).iter().map(|amax| amax.to_f64()[0]).collect();
    assert_eq!(found[..2], [2.0, 5.0]);
    assert!(found[2].is_nan() && found[3] == f64::INFINITY, "{found:?}");
}

#[test]
fn other_tensors_are_refused() {
    assert!(RankAmaxes.infer(&[TensorType::new(DType::F32, [2])]).is_err());
    assert!(MaxAmaxes.infer(&[TensorType::new(DType::F32, [3])]).is_err());
}
