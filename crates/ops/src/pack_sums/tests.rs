//! Tests of sums in one tensor.

use super::PackSums;
use crate::run_op::run;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

#[test]
fn sums_stand_one_after_another_with_a_zero_at_the_end() {
    let tensors = [&[1.0][..], &[2.0, 3.0, 4.0, 5.0], &[6.0, 7.0]];
    let tensors = tensors.map(|of| HostTensor::from_f64(TensorType::new(DType::F32, [of.len()]), of));
    let packed = run(&PackSums, &tensors.each_ref()).remove(0);
    assert_eq!(packed.ty(), TensorType::new(DType::F32, [4, 2]));
    assert_eq!(packed.to_f64(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]);
}

#[test]
fn other_types_are_refused() {
    assert!(PackSums.infer(&[TensorType::new(DType::BF16, [2])]).is_err());
    assert!(PackSums.infer(&[]).is_err());
}
