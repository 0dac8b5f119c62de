//! Tests of the norm against a plain sum over several blocks, and with elements that are not finite.

use super::{GradNorm, SquaredNorm, cpu::BLOCK};
use crate::check::{on_threads, seed};
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

fn norm(grads: &[HostTensor]) -> f64 {
    run(&GradNorm, &grads.iter().collect::<Vec<_>>())[0].to_f64()[0]
}

#[test]
fn it_is_the_root_of_the_sum_of_squares_over_tensors_of_many_sizes() {
    for (dtype, out, bar) in
        [(DType::F32, DType::F32, 1e-7), (DType::BF16, DType::F32, 1e-7), (DType::F64, DType::F64, 1e-12)]
    {
        let seed = seed();
        let sizes = [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17];
        let grads: Vec<HostTensor> =
            sizes.iter().zip(seed..).map(|(&size, seed)| normal(dtype, [size], 1.0, seed)).collect();
        let expected = grads.iter().flat_map(HostTensor::to_f64).map(|x| x * x).sum::<f64>().sqrt();
        let output = run(&GradNorm, &grads.iter().collect::<Vec<_>>()).remove(0);
        assert_eq!(output.ty(), TensorType::new(out, []));
        let error = (output.to_f64()[0] / expected - 1.0).abs();
        assert!(error < bar, "{dtype}: {error:e}");
    }
}

#[test]
fn it_has_the_same_bits_on_any_number_of_threads() {
    let grads: Vec<HostTensor> = (0..5).map(|_| normal(DType::F64, [3 * BLOCK + 5], 1.0, seed())).collect();
    let on = |threads| on_threads(threads, || norm(&grads).to_bits());
    assert!((2..5).all(|threads| on(threads) == on(1)));
}

#[test]
fn large_elements_do_not_overflow_inside() {
    let grads = [HostTensor::from_f64(TensorType::new(DType::F32, [2]), &[3e30, 4e30])];
    assert!((norm(&grads) / 5e30 - 1.0).abs() < 1e-6);
}

#[test]
fn one_element_that_is_not_finite_shows() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for dtype in [DType::F32, DType::BF16] {
            let mut values = normal(DType::F32, [BLOCK + 3], 1.0, seed()).to_f64();
            values[BLOCK + 1] = bad;
            let ty = TensorType::new(dtype, [values.len()]);
            assert!(
                !norm(&[normal(dtype, [5], 1.0, 1), HostTensor::from_f64(ty, &values)]).is_finite(),
                "{bad}"
            );
        }
    }
}

#[test]
fn gradients_of_mixed_precision_are_refused_by_index() {
    let ty = |dtype| TensorType::new(dtype, [3]);
    let error = GradNorm.infer(&[ty(DType::F32), ty(DType::BF16), ty(DType::F64)]).unwrap_err();
    assert!(error.0.contains("gradient 2 is f64[3]"), "{error}");
    assert!(GradNorm.infer(&[]).is_err());
}

#[test]
fn the_norm_is_the_rounded_root_of_the_squared_norm() {
    let grads: Vec<HostTensor> = [1, BLOCK + 1].map(|size| normal(DType::F32, [size], 1.0, seed())).into();
    let squared = run(&SquaredNorm, &grads.iter().collect::<Vec<_>>()).remove(0);
    assert_eq!(squared.ty(), TensorType::new(DType::F64, []));
    assert_eq!(norm(&grads), f64::from(squared.to_f64()[0].sqrt() as f32));
}
