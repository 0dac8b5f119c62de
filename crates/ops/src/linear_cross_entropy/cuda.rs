//! [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`] on a card.
//!
//! A vocabulary that is no multiple of 8 would leave cuBLASLt with slow kernels only: its last rows have products of their own.
//!
//! A chunk is the product that makes its logits, a kernel over its rows, and for gradients two products more. Rows of logits begin at
//! multiples of 128 bytes, whatever the vocabulary: so the three products and the rows are read and written in whole vectors even
//! where the vocabulary is odd.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::device::suffix;
use std::ops::Range;
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

/// The rows of the weight in pieces that products are made of: all where their number suits cuBLASLt, else the most that do and the rest.
fn pieces(v: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let main = if v.is_multiple_of(8) { v } else { v / STRIDE_ELEMENTS * STRIDE_ELEMENTS };
    [0..main, main..v].into_iter().filter(|rows| !rows.is_empty())
}

/// Where a row of a matrix begins.
fn row_of(ty: TensorType, place: DevicePtr, row: usize) -> DevicePtr {
    place.offset(ty.dtype.bytes(row * ty.shape[1]))
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
        gemm.ready(gpu, &GemmOperands { a, b, d, bias: None, scales: None, workspace: products.place })
    };

    let column = |rows: usize| logits.place.offset(dtype.bytes(rows));
    let mut parts = Vec::new();
    let mut dw_holds_a_sum = dw_vd.is_some_and(|dw| dw.accumulate);
    for tokens in loss.chunks(t) {
        let (first, c) = (tokens.start, tokens.len());
        let x_cd = x_td.place.offset(dtype.bytes(first * d));
        for rows in pieces(v) {
            let (w_rd, logits_cr) = (row_of(w_vd.ty, w_vd.place, rows.start), column(rows.start));
            let gemm = Gemm::new([c, rows.len(), d], dtype, [false, true], dtype).d_stride(stride);
            parts.push(product(gemm, x_cd, w_rd, logits_cr)?);
        }
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
            // The few last rows first: their sum is small, so that rounding it before the others are added changes next to nothing.
            for (n, rows) in pieces(v).rev().enumerate() {
                let gemm = Gemm::new([c, d, rows.len()], dtype, [false, false], dtype).a_stride(stride);
                let (w_rd, dx_cd) = (row_of(w_vd.ty, w_vd.place, rows.start), row_of(dx.ty, dx.place, first));
                parts.push(product(gemm.accumulate(n > 0), column(rows.start), w_rd, dx_cd)?);
            }
        }
        if let Some(dw) = dw_vd {
            for rows in pieces(v) {
                let gemm = Gemm::new([rows.len(), d, c], dtype, [true, false], dw.ty.dtype);
                let gemm = gemm.a_stride(stride).accumulate(dw_holds_a_sum);
                parts.push(product(gemm, column(rows.start), x_cd, row_of(dw.ty, dw.place, rows.start))?);
            }
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
