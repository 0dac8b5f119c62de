//! Statistics of numbers whose casts are known.

use super::CastStatistics;
use crate::check::seed;
use crate::quantize::{Given, Layouts, Quantize};
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Scaling, TensorType};

/// Counts and sizes of a cast of `x` in one layout.
fn statistics(x: &HostTensor, format: DType, scaling: Scaling, transposed: bool) -> (Vec<f64>, Vec<f64>) {
    let layouts = if transposed { Layouts::Transposed } else { Layouts::RowMajor };
    let cast = run(&Quantize::new(format, scaling, false, layouts), &[x]);
    let outputs = run(&CastStatistics { scaling, transposed }, &[x, &cast[0], &cast[1]]);
    (outputs[0].to_f64(), outputs[1].to_f64())
}

#[test]
fn underflows_and_numbers_that_are_not_finite_are_counted() {
    // The scale of a tensor with amax 448 is 1. Half of the least number, 2^-9, is rounded to zero.
    let values = [448.0, 0.0, -0.0, 0.0009, -0.0009, 0.0011, 1.0, 432.0];
    let x = HostTensor::from_f64(TensorType::new(DType::F32, [2, 4]), &values);
    let (counts, sizes) = statistics(&x, DType::E4M3, Scaling::Tensor, false);
    assert_eq!(counts, [6.0, 2.0, 0.0, 0.0]);
    assert_eq!(sizes[0], 448.0);
    // 432 is halfway between 416 and 448.
    assert!((sizes[2] - 16.0).abs() < 1e-3, "{sizes:?}");
    let x = HostTensor::from_f64(TensorType::new(DType::F32, [1, 4]), &[f64::NAN, 2.0, f64::INFINITY, -3.0]);
    let (counts, sizes) = statistics(&x, DType::E5M2, Scaling::Tensor, false);
    assert_eq!((counts, sizes[0]), (vec![2.0, 0.0, 0.0, 2.0], 3.0));
}

#[test]
fn numbers_that_a_delayed_scale_saturates_are_counted() {
    let ty = TensorType::new(DType::F32, [1, 4]);
    // 464 is halfway between 448 and 480, which E4M3 does not have.
    let x = HostTensor::from_f64(ty, &[463.0, 464.0, -1000.0, 1.0]);
    let scale = HostTensor::from_f64(TensorType::new(DType::F32, [1, 1]), &[1.0]);
    let quantize = Quantize::new(DType::E4M3, Scaling::Tensor, false, Layouts::RowMajor);
    let cast = run(&Quantize { given: Given::Scale, ..quantize }, &[&x, &scale]);
    let statistics = CastStatistics { scaling: Scaling::Tensor, transposed: false };
    let counts = run(&statistics, &[&x, &cast[0], &cast[1]])[0].to_f64();
    assert_eq!(counts, [4.0, 0.0, 2.0, 0.0]);
}

#[test]
fn the_error_is_that_of_the_restored_numbers_in_every_layout() {
    for (format, scaling) in
        [(DType::E4M3, Scaling::Tile), (DType::E5M2, Scaling::Row), (DType::E4M3, Scaling::Block)]
    {
        for transposed in [false, true] {
            let x = normal(DType::BF16, [150, 133], 1.0, seed());
            let (counts, sizes) = statistics(&x, format, scaling, transposed);
            assert_eq!(counts[0] + counts[3], x.to_f64().iter().filter(|&&x| x != 0.0).count() as f64);
            let norm = x.to_f64().iter().map(|x| x * x).sum::<f64>().sqrt();
            assert!((sizes[1] / norm - 1.0).abs() < 1e-6, "{sizes:?}");
            // The mantissas have 3 and 2 bits.
            let decibels = 20.0 * (sizes[1] / sizes[2]).log10();
            let expected = if format == DType::E4M3 { 30.0..33.5 } else { 24.0..27.5 };
            assert!(expected.contains(&decibels), "{format} {scaling:?}: {decibels} dB");
        }
    }
}

#[test]
fn a_tensor_that_is_no_cast_of_x_is_refused() {
    let ty = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let op = CastStatistics { scaling: Scaling::Row, transposed: true };
    let x = ty(DType::BF16, [4, 6]);
    assert!(op.infer(&[x, ty(DType::E4M3, [6, 4]), ty(DType::F32, [6, 1])]).is_ok());
    assert!(op.infer(&[x, ty(DType::E4M3, [4, 6]), ty(DType::F32, [4, 1])]).is_err());
    assert!(op.infer(&[x, ty(DType::E4M3, [6, 4]), ty(DType::F32, [4, 1])]).is_err());
}
