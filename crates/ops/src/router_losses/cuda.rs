//! Launches of the GPU kernels of [`RouterLosses`] and [`RouterLossesGrad`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{RouterLosses, RouterLossesGrad};
use crate::route::{SCORE, Score};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("WARPS", WARPS as i64), ("SUM_THREADS", SUM_THREADS as i64)]],
    headers: &[SCORE],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("router_losses/kernel.cu", include_str!("kernel.cu"))
};

/// Warps of a block, each with a token.
const WARPS: usize = 4;
/// Threads of the block that adds the terms of all tokens.
const SUM_THREADS: u32 = 512;

kernel_struct! {
    struct Arguments {
        logits: DevicePtr,
        ids: DevicePtr,
        counts: DevicePtr,
        inv_tokens: DevicePtr,
        terms: DevicePtr,
        dlogits: DevicePtr,
        objective: DevicePtr,
        balance: DevicePtr,
        z: DevicePtr,
        tokens: u32,
        experts: u32,
        top_k: u32,
        is_sigmoid: u32,
        balance_weight: f32,
        z_weight: f32,
        add_objective: u32,
        add_balance: u32,
        add_z: u32,
        padding: u32,
    }
}

/// The arguments without outputs and workspace.
fn arguments(losses: &RouterLosses, operands: &Operands<'_>) -> Arguments {
    let [logits, ids, counts, inv_tokens] = [0, 1, 2, 3].map(|n| operands.inputs[n]);
    let (tokens, experts) = logits.ty.shape.rows_cols();
    Arguments {
        logits: logits.place,
        ids: ids.place,
        counts: counts.place,
        inv_tokens: inv_tokens.place,
        terms: DevicePtr(0),
        dlogits: DevicePtr(0),
        objective: DevicePtr(0),
        balance: DevicePtr(0),
        z: DevicePtr(0),
        tokens: tokens as u32,
        experts: experts as u32,
        top_k: ids.ty.shape[1] as u32,
        is_sigmoid: (losses.score == Score::Sigmoid).into(),
        balance_weight: losses.balance_weight,
        z_weight: losses.z_weight,
        add_objective: 0,
        add_balance: 0,
        add_z: 0,
        padding: 0,
    }
}

/// The launch of a kernel whose warps have a token each.
fn by_token(gpu: &Gpu, name: &str, arguments: Arguments) -> Result<Work, CudaError> {
    let function = gpu.function(&SOURCE, &[], name)?;
    let blocks = (arguments.tokens as usize).div_ceil(WARPS).max(1);
    // SAFETY: the kernels take one `Arguments` of f32 tensors, and i32 ids, of the shapes that `infer`
    // checks.
    Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, 32 * WARPS as u32), arguments) })
}

impl CudaKernel for RouterLosses {
    /// The two terms of each token.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![TensorType::new(DType::F32, [inputs[0].shape[0], 2])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [objective, balance, z] = [0, 1, 2].map(|n| operands.outputs[n]);
        let arguments = Arguments {
            terms: operands.workspace[0].place,
            objective: objective.place,
            balance: balance.place,
            z: z.place,
            add_objective: objective.accumulate.into(),
            add_balance: balance.accumulate.into(),
            add_z: z.accumulate.into(),
            ..arguments(self, operands)
        };
        let terms = by_token(gpu, "router_terms", arguments)?;
        let sum = gpu.function(&SOURCE, &[], "router_sums")?;
        // SAFETY: as above; the kernel runs in one block, and the outputs are f32 scalars.
        let sums = unsafe { Work::launch(sum, Launch::row(1, SUM_THREADS), arguments) };
        Ok(Work::sequence(vec![terms, sums]))
    }
}

impl CudaKernel for RouterLossesGrad {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let dlogits = operands.outputs[0].place;
        by_token(gpu, "router_losses_grad", Arguments { dlogits, ..arguments(&self.0, operands) })
    }
}
