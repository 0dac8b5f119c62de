//! The launches of the head on a GPU for a chunk of rows, which are those of consecutive tokens, or gathered
//! ones of a list.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::IGNORED;
use crate::device::suffix;
use std::ops::Range;
use xtrain_cuda::{
    CudaError, CudaOutput, CudaTensor, DevicePtr, Gemm, GemmOperands, Gpu, KernelSource, Launch, Work,
    kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("ROW_THREADS", ROW_THREADS as i64),
        ("SUM_THREADS", SUM_THREADS as i64),
        ("LIST_THREADS", LIST_THREADS as i64),
        ("IGNORED", IGNORED as i64),
    ]],
    structs: &[RowArguments::LAYOUT, SumArguments::LAYOUT, ListArguments::LAYOUT, MoveArguments::LAYOUT],
    ..KernelSource::new("linear_cross_entropy/kernel.cu", include_str!("kernel.cu"))
};

/// Threads per block of the kernel over rows, of the one that sums their terms, and of the one that lists
/// tokens.
const ROW_THREADS: u32 = 512;
const SUM_THREADS: u32 = 1024;
const LIST_THREADS: u32 = 1024;

/// The most threads per block of the kernels that move rows.
const MOVE_THREADS: usize = 256;

/// The stride of rows of logits is a multiple of this many elements.
pub(super) const STRIDE_ELEMENTS: usize = 64;

kernel_struct! {
    struct RowArguments {
        logits: DevicePtr,
        targets: DevicePtr,
        inv_targets: DevicePtr,
        terms: DevicePtr,
        list: ListPart,
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
        lacks_terms: DevicePtr,
        tokens: u64,
        columns: u32,
        inv_targets_bf16: u32,
        add_objective: u32,
        add_cross_entropy: u32,
    }
}

kernel_struct! {
    /// A part of a list of tokens. `before` is a place of the number of tokens before it, or null.
    #[derive(Default)]
    pub(super) struct ListPart {
        pub(super) tokens: DevicePtr,
        pub(super) before: DevicePtr,
    }
}

kernel_struct! {
    struct ListArguments {
        targets: DevicePtr,
        list: DevicePtr,
        tokens: u32,
        rows: u32,
        before: u32,
    }
}

kernel_struct! {
    struct MoveArguments {
        from: DevicePtr,
        to: DevicePtr,
        list: ListPart,
        width: u64,
    }
}

/// Rows of the weight for each GEMM: all of them if their number suits cuBLASLt, else as many as do, then the
/// rest.
fn pieces(v: usize) -> impl DoubleEndedIterator<Item = Range<usize>> {
    let main = if v.is_multiple_of(8) { v } else { v / STRIDE_ELEMENTS * STRIDE_ELEMENTS };
    [0..main, main..v].into_iter().filter(|rows| !rows.is_empty())
}

/// Address of a row of a matrix.
pub(super) fn row_of(ty: TensorType, place: DevicePtr, row: usize) -> DevicePtr {
    place.offset(ty.dtype.bytes(row * ty.shape[1]))
}

/// The rows of a chunk.
#[derive(Clone, Copy)]
pub(super) struct ChunkRows {
    pub(super) count: usize,
    pub(super) x_cd: DevicePtr,
    pub(super) tokens: RowTokens,
}

/// The tokens of the rows of a chunk.
#[derive(Clone, Copy)]
pub(super) enum RowTokens {
    /// Consecutive ones, from this one on.
    From(usize),
    /// Those of a list.
    Listed(ListPart),
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

    /// The rows of consecutive tokens.
    pub(super) fn of_tokens(&self, tokens: &Range<usize>) -> ChunkRows {
        let x_cd = row_of(self.x_td.ty, self.x_td.place, tokens.start);
        ChunkRows { count: tokens.len(), x_cd, tokens: RowTokens::From(tokens.start) }
    }

    /// Appends the GEMMs logits = x w^T of plain operands to `parts`.
    pub(super) fn logits(
        &self,
        chunk: &ChunkRows,
        w_vd: &CudaTensor,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        for rows in pieces(self.v) {
            let (w_rd, logits_cr) = (row_of(w_vd.ty, w_vd.place, rows.start), self.column(rows.start));
            let gemm =
                Gemm::new([chunk.count, rows.len(), self.d], self.dtype(), [false, true], self.dtype());
            parts.push(self.gemm(gemm.d_stride(self.stride()), chunk.x_cd, w_rd, logits_cr)?);
        }
        Ok(())
    }

    /// The launch that writes the terms of the tokens and, with `gradients`, dlogits in place of the logits.
    pub(super) fn rows(&self, chunk: &ChunkRows) -> Result<Work, CudaError> {
        let kind = if self.gradients { "rows_gradients" } else { "rows" };
        let rows = self.gpu.function(&SOURCE, &[], &format!("{kind}_{}", suffix(self.x_td.ty)))?;
        let (first, list) = match chunk.tokens {
            RowTokens::From(token) => (token, ListPart::default()),
            RowTokens::Listed(list) => (0, list),
        };
        let arguments = RowArguments {
            logits: self.logits.place,
            targets: self.targets_t.place.offset(DType::I32.bytes(first)),
            inv_targets: self.inv_targets.place,
            terms: self.terms.place.offset(DType::F32.bytes(self.columns() * first)),
            list,
            stride: self.stride() as u64,
            v: self.v as u32,
            columns: self.columns() as u32,
            inv_targets_bf16: self.inv_targets_bf16(),
            z_loss: self.z_loss,
        };
        let launch = Launch::row(chunk.count as u32, ROW_THREADS);
        // SAFETY: the kernel takes one `RowArguments`, for logits of the type in its name. There is one block
        // for each row of the chunk, and logits and the list have that many rows from these addresses.
        // Without a list targets and terms have, too; with one they are those of all tokens.
        Ok(unsafe { Work::launch(rows, launch, arguments) })
    }

    /// Appends the GEMMs dx = dlogits w of plain operands to `parts`.
    pub(super) fn dx(
        &self,
        chunk: &ChunkRows,
        w_vd: &CudaTensor,
        dx_cd: DevicePtr,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        // The few last rows come first. Their sum is small, so rounding it before the others are added costs
        // little accuracy.
        for (n, rows) in pieces(self.v).rev().enumerate() {
            let gemm =
                Gemm::new([chunk.count, self.d, rows.len()], self.dtype(), [false, false], self.dtype());
            let gemm = gemm.a_stride(self.stride()).accumulate(n > 0);
            let w_rd = row_of(w_vd.ty, w_vd.place, rows.start);
            parts.push(self.gemm(gemm, self.column(rows.start), w_rd, dx_cd)?);
        }
        Ok(())
    }

    /// Appends the GEMMs dw = dlogits^T x of plain operands to `parts`.
    pub(super) fn dw(
        &self,
        chunk: &ChunkRows,
        dw: CudaOutput,
        accumulate: bool,
        parts: &mut Vec<Work>,
    ) -> Result<(), CudaError> {
        for rows in pieces(self.v) {
            let gemm = Gemm::new([rows.len(), self.d, chunk.count], self.dtype(), [true, false], dw.ty.dtype);
            let gemm = gemm.a_stride(self.stride()).accumulate(accumulate);
            let dw_rd = row_of(dw.ty, dw.place, rows.start);
            parts.push(self.gemm(gemm, self.column(rows.start), chunk.x_cd, dw_rd)?);
        }
        Ok(())
    }

    /// The launch that sums the terms of all tokens into the first two outputs. They become NaN if the number
    /// at `lacks_terms` is not 0.
    pub(super) fn sum(
        &self,
        outputs: &[CudaOutput],
        lacks_terms: Option<DevicePtr>,
    ) -> Result<Work, CudaError> {
        let [objective, cross_entropy, ..] = outputs else { unreachable!("two scalars at least") };
        let arguments = SumArguments {
            terms: self.terms.place,
            targets: self.targets_t.place,
            inv_targets: self.inv_targets.place,
            objective: objective.place,
            cross_entropy: cross_entropy.place,
            lacks_terms: lacks_terms.unwrap_or_default(),
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

    /// The launch that writes the list of tokens with a target: `[t + 2]`, with `before` and whether they are
    /// more than `rows` at its end.
    pub(super) fn list(&self, list: DevicePtr, rows: usize, before: usize) -> Result<Work, CudaError> {
        let arguments = ListArguments {
            targets: self.targets_t.place,
            list,
            tokens: self.x_td.ty.shape[0] as u32,
            rows: rows as u32,
            before: before as u32,
        };
        let list = self.gpu.function(&SOURCE, &[], "list_trained")?;
        // SAFETY: the kernel takes one `ListArguments`; there are `tokens` targets, and the list has room for
        // two numbers more.
        Ok(unsafe { Work::launch(list, Launch::row(1, LIST_THREADS), arguments) })
    }

    /// The launch that copies `count` rows of the width of x: to the tokens of `part`, or from them.
    pub(super) fn move_rows(
        &self,
        kind: &str,
        list: ListPart,
        count: usize,
        [from, to]: [DevicePtr; 2],
    ) -> Result<Work, CudaError> {
        let bytes = self.x_td.ty.dtype.bytes(self.d);
        let unit = [16, 4].into_iter().find(|&unit| bytes.is_multiple_of(unit)).unwrap_or(2);
        let width = bytes / unit;
        let function = self.gpu.function(&SOURCE, &[], &format!("{kind}_{unit}"))?;
        let threads = width.next_multiple_of(32).min(MOVE_THREADS);
        let arguments = MoveArguments { from, to, list, width: width as u64 };
        // SAFETY: the kernel takes one `MoveArguments`. There is one block for each of `count` rows, which
        // the part of the list has, and of `from` and `to` one has as many rows and the other one for each
        // token; rows have `width` units, to which they are aligned.
        Ok(unsafe { Work::launch(function, Launch::row(count as u32, threads as u32), arguments) })
    }
}

/// A tensor's fill with zeros.
pub(super) fn zeros(ty: TensorType, place: DevicePtr) -> Work {
    // SAFETY: the tensor, which the op writes, has that many bytes.
    unsafe { Work::zeros(place, ty.bytes()) }
}
