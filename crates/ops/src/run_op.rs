//! Helpers that run one op's CPU kernel on host tensors, for tests.

use xtrain_program::Op;
use xtrain_tensor::{CpuKernel, DType, HostTensor, Philox, Shape, TensorType, View, ViewMut};

/// A tensor of these values, in row-major order.
pub(crate) fn tensor(dtype: DType, shape: &[usize], values: &[f64]) -> HostTensor {
    HostTensor::from_f64(TensorType { dtype, shape: Shape::new(shape) }, values)
}

/// A tensor of normal numbers with mean 0.
pub(crate) fn normal(dtype: DType, shape: impl Into<Shape>, std: f32, seed: u64) -> HostTensor {
    let ty = TensorType::new(dtype, shape);
    let mut x = vec![0.0; ty.numel()];
    Philox::new(seed, 0, 0).fill_normal(std, &mut x);
    HostTensor::from_f64(ty, &x.into_iter().map(f64::from).collect::<Vec<_>>())
}

/// Outputs of `op`, run on memory and workspace filled with NaNs.
pub(crate) fn run(op: &(impl Op + CpuKernel), inputs: &[&HostTensor]) -> Vec<HostTensor> {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty()).collect();
    let output_types = op.infer(&types).unwrap_or_else(|e| panic!("{op:?}: {e}"));
    let poisoned = |&ty| {
        let mut t = HostTensor::zeros(ty);
        t.bytes_mut().fill(0xFF);
        t
    };
    let outputs: Vec<HostTensor> = output_types.iter().map(poisoned).collect();
    run_over(op, inputs, outputs, false)
}

/// Runs `op` into `outputs`. With `accumulate`, outputs that can accumulate are added to.
pub(crate) fn run_over(
    op: &(impl Op + CpuKernel),
    inputs: &[&HostTensor],
    mut outputs: Vec<HostTensor>,
    accumulate: bool,
) -> Vec<HostTensor> {
    let types: Vec<TensorType> = inputs.iter().map(|t| t.ty()).collect();
    let mut workspace: Vec<HostTensor> = op.workspace(&types).into_iter().map(HostTensor::zeros).collect();
    workspace.iter_mut().for_each(|t| t.bytes_mut().fill(0xFF));
    let mut views: Vec<View<'_>> = inputs.iter().map(|t| View::new(t.ty(), t.bytes())).collect();
    for &(o, n) in op.in_place() {
        outputs[o].bytes_mut().copy_from_slice(inputs[n].bytes());
        views[n] = View::in_output(inputs[n].ty());
    }
    let mut written: Vec<ViewMut<'_>> = (outputs.iter_mut().chain(&mut workspace).enumerate())
        .map(|(k, t)| ViewMut::new(t.ty(), t.bytes_mut(), accumulate && op.accumulates(k)))
        .collect();
    op.run(&views, &mut written);
    drop(written);
    outputs
}
