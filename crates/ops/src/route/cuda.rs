//! Launches of the GPU kernels of [`Route`] and [`RouteGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Route, RouteGrad, Router, Score};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("WARPS", WARPS as i64),
        ("MAX_EXPERTS", Router::MAX_EXPERTS as i64),
        ("MAX_GROUPS", Router::MAX_GROUPS as i64),
    ]],
    headers: &[super::SCORE],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("route/kernel.cu", include_str!("kernel.cu"))
};

/// Warps of a block, each with a token.
const WARPS: usize = 4;

kernel_struct! {
    struct Arguments {
        logits: DevicePtr,
        bias: DevicePtr,
        padding: DevicePtr,
        dgates: DevicePtr,
        ids: DevicePtr,
        out: DevicePtr,
        tokens: u32,
        experts: u32,
        top_k: u32,
        groups: u32,
        top_groups: u32,
        is_sigmoid: u32,
        normalise: u32,
        scale: f32,
    }
}

/// The arguments that follow from the router, for logits `[tokens, experts]`.
fn arguments(router: &Router, logits: xtrain_cuda::CudaTensor) -> Arguments {
    let (tokens, experts) = logits.ty.shape.rows_cols();
    Arguments {
        logits: logits.place,
        bias: DevicePtr(0),
        padding: DevicePtr(0),
        dgates: DevicePtr(0),
        ids: DevicePtr(0),
        out: DevicePtr(0),
        tokens: tokens as u32,
        experts: experts as u32,
        top_k: router.top_k as u32,
        groups: router.groups as u32,
        top_groups: router.top_groups as u32,
        is_sigmoid: (router.score == Score::Sigmoid).into(),
        normalise: router.normalise.into(),
        scale: router.scale,
    }
}

fn launch(gpu: &Gpu, name: &str, arguments: Arguments) -> Result<Work, CudaError> {
    let function = gpu.function(&SOURCE, &[], name)?;
    let blocks = (arguments.tokens as usize).div_ceil(WARPS).max(1);
    let launch = Launch::row(blocks as u32, 32 * WARPS as u32);
    // SAFETY: the kernels take one `Arguments`: f32 logits, gradients and bias, and i32 ids, of the shapes
    // that it names; ids come from `route`: they are -1 or below `experts`.
    Ok(unsafe { Work::launch(function, launch, arguments) })
}

impl CudaKernel for Route {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let input = |n: usize| operands.inputs.get(n).map_or(DevicePtr(0), |input| input.place);
        let bias = if self.0.biased { input(1) } else { DevicePtr(0) };
        let padding = input(self.0.padding());
        let [out, ids] = [0, 1].map(|n| operands.outputs[n].place);
        launch(gpu, "route", Arguments { bias, padding, ids, out, ..arguments(&self.0, operands.inputs[0]) })
    }
}

impl CudaKernel for RouteGrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [dgates, ids] = [0, 2].map(|n| operands.inputs[n].place);
        let out = operands.outputs[0].place;
        launch(gpu, "route_grad", Arguments { dgates, ids, out, ..arguments(&self.0, operands.inputs[1]) })
    }
}
