//! [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`] on a card.
//!
//! A chunk is the product that makes its logits, a kernel over its rows, and for gradients two products more. Rows of logits begin at
//! multiples of 128 bytes, whatever the vocabulary: so the three products and the rows are read and written in whole vectors even
//! where the vocabulary is odd.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::device::suffix;
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, DevicePtr, Gemm, GemmOperands, Gpu, KernelSource, Launch, Operands,
    Work,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource =
    KernelSource::new("linear_cross_entropy/kernel.cu", include_str!("kernel.cu"));

const ROW_THREADS: u32 = 512;
const SUM_THREADS: u32 = 1024;

/// The distance of two rows of logits is a multiple of this many elements.
const STRIDE_ELEMENTS: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
struct RowArguments {
    logits: DevicePtr,
    targets: DevicePtr,
    inv_targets: DevicePtr,
    terms: DevicePtr,
    stride: u64,
    v: u32,
    inv_targets_bf16: u32,
    z_loss: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SumArguments {
    terms: DevicePtr,
    targets: DevicePtr,
    inv_targets: DevicePtr,
    objective: DevicePtr,
    cross_entropy: DevicePtr,
    tokens: u64,
    inv_targets_bf16: u32,
    add_objective: u32,
    add_cross_entropy: u32,
}

impl CudaKernel for LinearCrossEntropy {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(self, inputs)
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        ready(self, gpu, operands, [None, None])
    }
}

impl CudaKernel for LinearCrossEntropyGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(&self.loss, inputs)
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let mut gradients = operands.outputs[2..].iter().copied();
        let dx = if self.dx { gradients.next() } else { None };
        ready(&self.loss, gpu, operands, [dx, gradients.next()])
    }
}

/// The logits of the longest chunk, by token its terms of the two outputs, and what the products work in.
fn workspace(loss: &LinearCrossEntropy, inputs: &[TensorType]) -> Vec<TensorType> {
    let ((tokens, _), (vocab, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
    let longest = loss.chunks(tokens).map(|chunk| chunk.len()).max().unwrap_or(0);
    let logits = TensorType::new(inputs[0].dtype, [longest, vocab.next_multiple_of(STRIDE_ELEMENTS)]);
    vec![logits, TensorType::new(DType::F32, [tokens, 2]), Gemm::workspace()]
}

fn ready(
    loss: &LinearCrossEntropy,
    gpu: &Gpu,
    operands: &Operands<'_>,
    [dx_td, dw_vd]: [Option<CudaOutput>; 2],
) -> Result<Work, CudaError> {
    let [x_td, w_vd, targets_t, inv_targets] = operands.inputs else { unreachable!("four inputs") };
    let [objective, cross_entropy, ..] = operands.outputs else { unreachable!("two scalars at least") };
    let [logits, terms, products] = operands.workspace else { unreachable!("three tensors of workspace") };
    let ((t, d), (v, _)) = (x_td.ty.shape.rows_cols(), w_vd.ty.shape.rows_cols());
    let (dtype, stride) = (x_td.ty.dtype, logits.ty.shape[1]);
    let inv_targets_bf16 = u32::from(inv_targets.ty.dtype == DType::BF16);
    let kind = if dx_td.is_some() || dw_vd.is_some() { "rows_gradients" } else { "rows" };
    let rows = gpu.function(&SOURCE, &[], &format!("{kind}_{}", suffix(x_td.ty)))?;
    let product = |gemm: Gemm, a: DevicePtr, b: DevicePtr, d: DevicePtr| {
        gemm.ready(gpu, &GemmOperands { a, b, d, bias: None, workspace: products.place })
    };

    let mut parts = Vec::new();
    let mut dw_holds_a_sum = dw_vd.is_some_and(|dw| dw.accumulate);
    for tokens in loss.chunks(t) {
        let (first, c) = (tokens.start, tokens.len());
        let x_cd = x_td.place.offset(dtype.bytes(first * d));
        let gemm = Gemm::new([c, v, d], dtype, [false, true], dtype).d_stride(stride);
        parts.push(product(gemm, x_cd, w_vd.place, logits.place)?);
        let arguments = RowArguments {
            logits: logits.place,
            targets: targets_t.place.offset(DType::I32.bytes(first)),
            inv_targets: inv_targets.place,
            terms: terms.place.offset(DType::F32.bytes(2 * first)),
            stride: stride as u64,
            v: v as u32,
            inv_targets_bf16,
            z_loss: loss.z_loss,
        };
        // SAFETY: the kernel takes one `RowArguments`, for logits of the type that its name says; a block each for the chunk's rows,
        // of which logits, targets and terms have as many from these places on.
        parts.push(unsafe { Work::launch(rows.clone(), Launch::row(c as u32, ROW_THREADS), arguments) });
        if let Some(dx) = dx_td {
            let gemm = Gemm::new([c, d, v], dtype, [false, false], dtype).a_stride(stride);
            parts.push(product(gemm, logits.place, w_vd.place, dx.place.offset(dtype.bytes(first * d)))?);
        }
        if let Some(dw) = dw_vd {
            let gemm = Gemm::new([v, d, c], dtype, [true, false], dw.ty.dtype);
            let gemm = gemm.a_stride(stride).accumulate(dw_holds_a_sum);
            parts.push(product(gemm, logits.place, x_cd, dw.place)?);
            dw_holds_a_sum = true;
        }
    }

    let arguments = SumArguments {
        terms: terms.place,
        targets: targets_t.place,
        inv_targets: inv_targets.place,
        objective: objective.place,
        cross_entropy: cross_entropy.place,
        tokens: t as u64,
        inv_targets_bf16,
        add_objective: objective.accumulate.into(),
        add_cross_entropy: cross_entropy.accumulate.into(),
    };
    let sum = gpu.function(&SOURCE, &[], "sum_terms")?;
    // SAFETY: the kernel takes one `SumArguments`; terms and targets are those of `t` tokens, the outputs scalars of f32.
    parts.push(unsafe { Work::launch(sum, Launch::row(1, SUM_THREADS), arguments) });
    Ok(Work::all(parts))
}
