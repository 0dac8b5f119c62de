//! [`LinearCrossEntropy`] and [`LinearCrossEntropyGrad`] on a GPU.
//!
//! For each chunk: the GEMM of its logits, a kernel over its rows, and for gradients two more GEMMs. Rows of
//! logits are aligned to 128 bytes, so that GEMMs and kernel read and write whole vectors even if the
//! vocabulary is odd.
//!
//! For a vocabulary that is not a multiple of 8, cuBLASLt has only slow kernels. The last rows of the weight
//! then get GEMMs of their own.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{IGNORED, LinearCrossEntropy, LinearCrossEntropyGrad};
use crate::device::suffix;
use std::ops::Range;
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, DevicePtr, Gemm, GemmOperands, Gpu, KernelSource, Launch,
    Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("ROW_THREADS", ROW_THREADS as i64),
        ("SUM_THREADS", SUM_THREADS as i64),
        ("IGNORED", IGNORED as i64),
    ]],
    structs: &[RowArguments::LAYOUT, SumArguments::LAYOUT],
    ..KernelSource::new("linear_cross_entropy/kernel.cu", include_str!("kernel.cu"))
};

/// Threads per block of the kernel over rows, and of the one that sums their terms.
const ROW_THREADS: u32 = 512;
const SUM_THREADS: u32 = 1024;

/// The stride of rows of logits is a multiple of this many elements.
const STRIDE_ELEMENTS: usize = 64;

kernel_struct! {
    struct RowArguments {
        logits: DevicePtr,
        targets: DevicePtr,
        inv_targets: DevicePtr,
        terms: DevicePtr,
        stride: u64,
        v: u32,
        columns: u32,
        inv_targets_bf16: u32,
        z_loss: f32,
    }
}

kernel_struct! {
    struct SumArguments {
        terms: DevicePtr,
        targets: DevicePtr,
        inv_targets: DevicePtr,
        objective: DevicePtr,
        cross_entropy: DevicePtr,
        tokens: u64,
        columns: u32,
        inv_targets_bf16: u32,
        add_objective: u32,
        add_cross_entropy: u32,
    }
}

impl CudaKernel for LinearCrossEntropy {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(self, inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        prepare(self, gpu, operands, [None, None])
    }
}

impl CudaKernel for LinearCrossEntropyGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        workspace(&self.loss, inputs)
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let mut gradients = operands.outputs[self.loss.outputs()..].iter().copied();
        let dx = if self.dx { gradients.next() } else { None };
        prepare(&self.loss, gpu, operands, [dx, gradients.next()])
    }
}

/// Workspace: the terms unless they are an output, the logits of the longest chunk, and the workspace of the
/// GEMMs.
fn workspace(loss: &LinearCrossEntropy, inputs: &[TensorType]) -> Vec<TensorType> {
    let ((tokens, _), (vocab, _)) = (inputs[0].shape.rows_cols(), inputs[1].shape.rows_cols());
    let logits =
        TensorType::new(inputs[0].dtype, [loss.longest(tokens), vocab.next_multiple_of(STRIDE_ELEMENTS)]);
    loss.terms_workspace(inputs[0]).into_iter().chain([logits, Gemm::workspace()]).collect()
}

/// The terms, an output or the first tensor of the workspace, and the rest of the workspace.
pub(super) fn terms_of<'a>(
    loss: &LinearCrossEntropy,
    operands: &Operands<'a>,
) -> (CudaTensor, &'a [CudaTensor]) {
    if loss.terms.are_output() {
        let CudaOutput { ty, place, .. } = operands.outputs[2];
        return (CudaTensor { ty, place }, operands.workspace);
    }
    let [terms, rest @ ..] = operands.workspace else { unreachable!("the terms come first") };
    (*terms, rest)
}

/// Rows of the weight for each GEMM: all of them if their number suits cuBLASLt, else as many as do, then the
/// rest.
fn pieces(v: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let main = if v.is_multiple_of(8) { v } else { v / STRIDE_ELEMENTS * STRIDE_ELEMENTS };
    [0..main, main..v].into_iter().filter(|rows| !rows.is_empty())
}

/// Address of a row of a matrix.
fn row_of(ty: TensorType, place: DevicePtr, row: usize) -> DevicePtr {
    place.offset(ty.dtype.bytes(row * ty.shape[1]))
}

fn prepare(
    loss: &LinearCrossEntropy,
    gpu: &Gpu,
    operands: &Operands<'_>,
    [dx_td, dw_vd]: [Option<CudaOutput>; 2],
) -> Result<Work, CudaError> {
    let [x_td, w_vd, targets_t, inv_targets] = operands.inputs else { unreachable!("four inputs") };
    let (terms, workspace) = terms_of(loss, operands);
    let [logits, gemm_workspace] = workspace else { unreachable!("logits and the GEMMs' workspace") };
    let ((t, d), (v, _)) = (x_td.ty.shape.rows_cols(), w_vd.ty.shape.rows_cols());
    let chunks = Chunks {
        gpu,
        z_loss: loss.z_loss,
        gradients: dx_td.is_some() || dw_vd.is_some(),
        x_td: *x_td,
        targets_t: *targets_t,
        inv_targets: *inv_targets,
        logits: *logits,
        terms,
        gemm_workspace: gemm_workspace.place,
        v,
        d,
    };
    let mut parts = Vec::new();
    let mut dw_holds_a_sum = dw_vd.is_some_and(|dw| dw.accumulate);
    for tokens in loss.chunks(t) {
        chunks.logits(&tokens, w_vd, &mut parts)?;
        parts.push(chunks.rows(&tokens)?);
        if let Some(dx) = dx_td {
            chunks.dx(&tokens, w_vd, dx, &mut parts)?;
        }
        if let Some(dw) = dw_vd {
            chunks.dw(&tokens, dw, dw_holds_a_sum, &mut parts)?;
            dw_holds_a_sum = true;
        }
    }
    parts.push(chunks.sum(operands.outputs)?);
    Ok(Work::sequence(parts))
}

/// The tensors of the op, and the launches for a chunk.
pub(super) struct Chunks<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) z_loss: f32,
    /// True if logits are replaced by their gradients.
    pub(super) gradients: bool,
    pub(super) x_td: CudaTensor,
    pub(super) targets_t: CudaTensor,
    pub(super) inv_targets: CudaTensor,
    /// Logits of the longest chunk; the row stride may exceed the vocabulary.
    pub(super) logits: CudaTensor,
    pub(super) terms: CudaTensor,
    /// Workspace of the GEMMs.
    pub(super) gemm_workspace: DevicePtr,
    pub(super) v: usize,
    pub(super) d: usize,
}

impl Chunks<'_> {
    fn gemm(&self, gemm: Gemm, a: DevicePtr, b: DevicePtr, d: DevicePtr) -> Result<Work, CudaError> {
        let workspace = self.gemm_workspace;
        gemm.prepare(self.gpu, &GemmOperands { a, b, d, bias: None, scales: None, workspace })
    }

    fn dtype(&self) -> DType {
        self.x_td.ty.dtype
    }

    fn stride(&self) -> usize {
        self.logits.ty.shape[1]
    }

    /// Address of a column of the logits.
    fn column(&self, column: usize) -> DevicePtr {
        self.logits.place.offset(self.dtype().bytes(column))
    }

    fn x_cd(&self, tokens: &Range<usize>) -> DevicePtr {
        row_of(self.x_td.ty, self.x_td.place, tokens.start)
    }

    /// Appends the GEMMs logits = x w^T of plain operands to `parts`.
    pub(super) fn logits(
        &self,
        tokens: &Range<usize>,
        w_vd: &CudaTensor,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        for rows in pieces(self.v) {
            let (w_rd, logits_cr) = (row_of(w_vd.ty, w_vd.place, rows.start), self.column(rows.start));
            let gemm =
                Gemm::new([tokens.len(), rows.len(), self.d], self.dtype(), [false, true], self.dtype());
            parts.push(self.gemm(gemm.d_stride(self.stride()), self.x_cd(tokens), w_rd, logits_cr)?);
        }
        Ok(())
    }

    /// The launch that writes the terms of the tokens and, with `gradients`, dlogits in place of the logits.
    pub(super) fn rows(&self, tokens: &Range<usize>) -> Result<Work, CudaError> {
        let kind = if self.gradients { "rows_gradients" } else { "rows" };
        let rows = self.gpu.function(&SOURCE, &[], &format!("{kind}_{}", suffix(self.x_td.ty)))?;
        let arguments = RowArguments {
            logits: self.logits.place,
            targets: self.targets_t.place.offset(DType::I32.bytes(tokens.start)),
            inv_targets: self.inv_targets.place,
            terms: self.terms.place.offset(DType::F32.bytes(self.columns() * tokens.start)),
            stride: self.stride() as u64,
            v: self.v as u32,
            columns: self.columns() as u32,
            inv_targets_bf16: self.inv_targets_bf16(),
            z_loss: self.z_loss,
        };
        let launch = Launch::row(tokens.len() as u32, ROW_THREADS);
        // SAFETY: the kernel takes one `RowArguments`, for logits of the type in its name. There is one block
        // for each row of the chunk, and logits, targets and terms have that many rows from these addresses.
        Ok(unsafe { Work::launch(rows, launch, arguments) })
    }

    /// Appends the GEMMs dx = dlogits w of plain operands to `parts`.
    pub(super) fn dx(
        &self,
        tokens: &Range<usize>,
        w_vd: &CudaTensor,
        dx: CudaOutput,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        // The few last rows come first. Their sum is small, so rounding it before the others are added costs
        // little accuracy.
        for (n, rows) in pieces(self.v).rev().enumerate() {
            let gemm =
                Gemm::new([tokens.len(), self.d, rows.len()], self.dtype(), [false, false], self.dtype());
            let gemm = gemm.a_stride(self.stride()).accumulate(n > 0);
            let w_rd = row_of(w_vd.ty, w_vd.place, rows.start);
            let dx_cd = row_of(dx.ty, dx.place, tokens.start);
            parts.push(self.gemm(gemm, self.column(rows.start), w_rd, dx_cd)?);
        }
        Ok(())
    }

    /// Appends the GEMMs dw = dlogits^T x of plain operands to `parts`.
    pub(super) fn dw(
        &self,
        tokens: &Range<usize>,
        dw: CudaOutput,
        accumulate: bool,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        for rows in pieces(self.v) {
            let gemm =
                Gemm::new([rows.len(), self.d, tokens.len()], self.dtype(), [true, false], dw.ty.dtype);
            let gemm = gemm.a_stride(self.stride()).accumulate(accumulate);
            let dw_rd = row_of(dw.ty, dw.place, rows.start);
            parts.push(self.gemm(gemm, self.column(rows.start), self.x_cd(tokens), dw_rd)?);
        }
        Ok(())
    }

    /// The launch that sums the terms of all tokens into the first two outputs.
    pub(super) fn sum(&self, outputs: &[CudaOutput]) -> Result<Work, CudaError> {
        let [objective, cross_entropy, ..] = outputs else { unreachable!("two scalars at least") };
        let arguments = SumArguments {
            terms: self.terms.place,
            targets: self.targets_t.place,
            inv_targets: self.inv_targets.place,
            objective: objective.place,
            cross_entropy: cross_entropy.place,
            tokens: self.x_td.ty.shape[0] as u64,
            columns: self.columns() as u32,
            inv_targets_bf16: self.inv_targets_bf16(),
            add_objective: objective.accumulate.into(),
            add_cross_entropy: cross_entropy.accumulate.into(),
        };
        let sum = self.gpu.function(&SOURCE, &[], "sum_terms")?;
        // SAFETY: the kernel takes one `SumArguments`; there are terms and targets for `tokens` tokens, and
        // the outputs are f32 scalars.
        Ok(unsafe { Work::launch(sum, Launch::row(1, SUM_THREADS), arguments) })
    }

    /// Columns of the terms.
    fn columns(&self) -> usize {
        self.terms.ty.shape[1]
    }

    fn inv_targets_bf16(&self) -> u32 {
        u32::from(self.inv_targets.ty.dtype == DType::BF16)
    }
}
