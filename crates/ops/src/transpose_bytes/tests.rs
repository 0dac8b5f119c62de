//! Tests of the transpose of bytes.

use super::{TransposeBlockScales, TransposeBytes};
use crate::check::seed;
use crate::quantize::{Layouts, Quantize};
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, Scaling, TensorType};

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

#[test]
fn the_transpose_of_a_cast_by_blocks_is_the_cast_of_the_transpose() {
    for size in [[1, 1], [128, 512], [130, 700], [1000, 129]] {
        let x = normal(DType::F32, size, 1.0, seed());
        let cast = Quantize::new(DType::E4M3, Scaling::Block, true, Layouts::Both);
        let both = run(&cast, &[&x]);
        assert_eq!(run(&TransposeBytes, &[&both[0]])[0].bytes(), both[2].bytes());
        let scales = run(&TransposeBlockScales { cols: size[1] }, &[&both[1]]).remove(0);
        assert_eq!((scales.ty(), scales.bytes()), (both[3].ty(), both[3].bytes()), "{size:?}");
    }
}
