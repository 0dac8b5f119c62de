//! Tests of the transpose of bytes.

use super::TransposeBytes;
use crate::check::seed;
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, TensorType};

#[test]
fn every_byte_changes_its_row_with_its_column() {
    let (rows, cols) = (130, 67);
    let x = normal(DType::E4M3, [rows, cols], 1.0, seed());
    let y = run(&TransposeBytes, &[&x]).remove(0);
    assert_eq!(y.ty(), TensorType::new(DType::E4M3, [cols, rows]));
    let expected: Vec<u8> = (0..rows * cols).map(|i| x.bytes()[i % rows * cols + i / rows]).collect();
    assert_eq!(y.bytes(), expected);
}

#[test]
fn wider_elements_are_refused() {
    assert!(TransposeBytes.infer(&[TensorType::new(DType::BF16, [2, 3])]).is_err());
    assert!(TransposeBytes.infer(&[TensorType::new(DType::E4M3, [6])]).is_err());
}
