//! Tests of [`JoinRows`] and [`SplitRows`].

use super::{JoinRows, SplitRows};
use crate::run_op::{run, tensor};
use xtrain_program::Op;
use xtrain_tensor::{DType, TensorType};

#[test]
fn joined_rows_are_split_into_the_same_tensors() {
    let tensors: Vec<_> = (0..3)
        .map(|n| tensor(DType::BF16, &[2, 2], &[0.0, 1.0, 2.0, 3.0].map(|x| -x - 4.0 * f64::from(n))))
        .collect();
    let inputs: Vec<_> = tensors.iter().collect();
    let stacked = run(&JoinRows::Stacked, &inputs).remove(0);
    assert_eq!(stacked.ty(), TensorType::new(DType::BF16, [3, 2, 2]));
    let joined = run(&JoinRows::Rows(5), &inputs).remove(0);
    assert_eq!(joined.ty(), TensorType::new(DType::BF16, [5, 2]));
    // With the sign of zero.
    assert_eq!(joined.bytes(), &stacked.bytes()[..joined.bytes().len()]);
    let lines = run(&JoinRows::Lines(2), &inputs).remove(0);
    assert_eq!(lines.to_f64()[..6], [0.0, -1.0, -4.0, -5.0, -8.0, -9.0]);
    assert_eq!(lines.to_f64()[6..], [-2.0, -3.0, -6.0, -7.0, -10.0, -11.0]);
    let parts = run(&SplitRows { parts: 3, rows: 2 }, &[&joined]);
    assert!(parts[..2].iter().zip(&tensors).all(|(part, whole)| part.bytes() == whole.bytes()));
    assert_eq!(parts[2].to_f64(), [-8.0, -9.0, 0.0, 0.0]);
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let of = |rows: usize| TensorType::new(DType::F32, [rows, 3]);
    let refused = |op: &dyn Op, inputs: &[TensorType]| op.infer(inputs).expect_err("refused").to_string();
    assert!(refused(&JoinRows::Stacked, &[of(2), of(3)]).contains("of one type"));
    assert!(refused(&JoinRows::Rows(5), &[of(2), of(2)]).contains("do not have 5 rows"));
    assert!(refused(&JoinRows::Lines(4), &[of(6)]).contains("does not have 4 lines"));
    assert!(refused(&JoinRows::Stacked, &[]).contains("at least one"));
    assert!(refused(&SplitRows { parts: 2, rows: 2 }, &[of(5)]).contains("does not fit into 2"));
}
