//! Tests of [`UnroundedLinear`].

use super::{Linear, UnroundedLinear};
use crate::check::seed;
use crate::run_op::{normal, run};
use xtrain_program::{Op, Root, Storage, Tracer, backward};
use xtrain_tensor::{DType, HostTensor, TensorType};

#[test]
fn sums_of_bf16_operands_are_not_rounded() {
    let (x, w) = (normal(DType::BF16, [13, 70], 1.0, seed()), normal(DType::BF16, [9, 70], 1.0, seed()));
    let y = run(&UnroundedLinear { in_fp8: false }, &[&x, &w]).remove(0);
    assert_eq!(y.ty(), TensorType::new(DType::F32, [13, 9]));
    let wide = |t: &HostTensor| HostTensor::from_f64(t.ty().with_dtype(DType::F64), &t.to_f64());
    let exact = run(&Linear, &[&wide(&x), &wide(&w)]).remove(0).to_f64();
    let near = y.to_f64().iter().zip(&exact).all(|(y, exact)| (y - exact).abs() < 1e-4);
    assert!(near, "f32 sums of bf16 products");
    let rounded = run(&Linear, &[&x, &w]).remove(0);
    assert_eq!(HostTensor::from_f64(rounded.ty(), &y.to_f64()).bytes(), rounded.bytes());
}

#[test]
fn the_backward_multiplies_in_the_type_of_the_operands() {
    let mut t = Tracer::default();
    let x = t.input("x", TensorType::new(DType::BF16, [4, 6]));
    let w = t.input("w", TensorType::new(DType::BF16, [3, 6]));
    let y = t.apply(UnroundedLinear { in_fp8: false }, &[x, w]).expect("operands that fit")[0];
    let ty = t.ty(y);
    let mut program = t.finish();
    let dy = program.add_value(ty, Storage::Input { name: "dy".into() });
    let root = Root { value: y, grad: Some(dy) };
    let (program, grads) =
        backward::backward(program, &[root], &[x, w], &crate::PassSet).expect("a backward");
    let names: Vec<_> = program.instances.iter().map(|i| i.code.op().name()).collect();
    assert_eq!(names, ["unrounded_linear", "cast", "linear_wgrad", "linear_dgrad"]);
    let types = grads.iter().map(|grad| program.ty(grad.expect("a gradient")).dtype);
    assert!(types.into_iter().all(|dtype| dtype == DType::BF16));
}

#[test]
fn it_never_runs_on_fp8_operands() {
    let types = [TensorType::new(DType::BF16, [4, 6]), TensorType::new(DType::BF16, [3, 6])];
    assert!(UnroundedLinear { in_fp8: false }.gemms(&types).is_none() && Linear.gemms(&types).is_some());
}
