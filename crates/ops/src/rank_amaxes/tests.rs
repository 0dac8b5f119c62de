//! Tests of amaxes over ranks.

use super::{MaxAmaxes, RankAmaxes};
use crate::run_op::run;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

#[test]
fn each_tensor_has_the_largest_amaxes_of_all_ranks_and_a_nan_is_kept() {
    let ranks = [[1.0, 5.0, f64::NAN, f64::INFINITY], [2.0, 4.0, 3.0, 1.0]];
    let lengths = [1, 3];
    let rows = ranks.map(|amaxes| {
        let (first, others) = amaxes.split_at(1);
        let tensors =
            [first, others].map(|of| HostTensor::from_f64(TensorType::new(DType::F32, [of.len()]), of));
        run(&RankAmaxes, &tensors.each_ref()).remove(0).to_f64()
    });
    let all = HostTensor::from_f64(TensorType::new(DType::F32, [2, 4]), &rows.concat());
    let found = run(&MaxAmaxes { lengths: lengths.into() }, &[&all]);
    let found: Vec<Vec<f64>> = found.iter().map(HostTensor::to_f64).collect();
    assert_eq!((&found[0][..], found[1][0], found[1][2]), (&[2.0][..], 5.0, f64::INFINITY));
    assert!(found[1][1].is_nan(), "{found:?}");
}

#[test]
fn other_tensors_are_refused() {
    assert!(RankAmaxes.infer(&[TensorType::new(DType::F32, [2, 2])]).is_err());
    let max = MaxAmaxes { lengths: vec![1, 2] };
    assert!(max.infer(&[TensorType::new(DType::F32, [6])]).is_ok());
    assert!(max.infer(&[TensorType::new(DType::F32, [4])]).is_err());
    assert!(max.infer(&[TensorType::new(DType::F32, [0])]).is_err());
    assert!(max.infer(&[TensorType::new(DType::F32, [2, 4])]).is_err());
}
