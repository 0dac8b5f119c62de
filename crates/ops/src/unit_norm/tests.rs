//! Tests of sums of squares by unit.

use super::{UnitSquaredNorm, UnitSquares};
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

fn squares(grad: &HostTensor, unit: usize) -> Vec<f64> {
    run(&UnitSquares { unit_elements: vec![unit] }, &[grad]).remove(0).to_f64()
}

/// The first elements of a tensor with zeros after them.
fn cut(grad: &HostTensor, first: usize, elements: usize) -> HostTensor {
    let mut values: Vec<f64> = grad.to_f64().into_iter().skip(first).take(elements).collect();
    values.resize(elements, 0.0);
    HostTensor::from_f64(TensorType::new(grad.ty().dtype, [elements]), &values)
}

#[test]
fn a_piece_with_padding_has_the_sums_of_the_gradient() {
    for unit in [3, 32, 100, 4097, 9000] {
        let grad = normal(DType::F32, [20_011], 1.0, unit as u64);
        let whole = squares(&grad, unit);
        let units_of_piece = whole.len().div_ceil(3);
        let pieces = (0..3).flat_map(|p| {
            let piece = cut(&grad, p * units_of_piece * unit, units_of_piece * unit);
            squares(&piece, unit)
        });
        let mut pieces: Vec<f64> = pieces.collect();
        let padding = pieces.split_off(whole.len());
        assert!(pieces == whole && padding.iter().all(|&x| x == 0.0), "units of {unit}");
    }
}

#[test]
fn the_norm_adds_units_and_then_gradients() {
    let grads = [normal(DType::F32, [1000], 1.0, 1), normal(DType::BF16, [77], 1.0, 2)];
    let found = run(&UnitSquaredNorm { unit_elements: vec![13, 50] }, &grads.each_ref()).remove(0);
    assert_eq!(found.ty(), TensorType::new(DType::F64, []));
    let [first, second] = [squares(&grads[0], 13), squares(&grads[1], 50)];
    assert_eq!(found.to_f64(), [first.iter().sum::<f64>() + second.iter().sum::<f64>()]);
    let exact: f64 = grads.iter().flat_map(HostTensor::to_f64).map(|x| x * x).sum();
    assert!((found.to_f64()[0] / exact - 1.0).abs() < 1e-12);
}

#[test]
fn units_without_elements_are_refused() {
    let ty = TensorType::new(DType::F32, [5]);
    for unit_elements in [vec![0], vec![], vec![1, 1]] {
        let error = UnitSquares { unit_elements }.infer(&[ty]).expect_err("it is refused");
        assert!(error.0.contains("the size of a unit"), "{error}");
    }
}
