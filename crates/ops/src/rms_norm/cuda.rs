//! The GPU kernels of the norms.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{AddRmsNorm, ExtraOutput, Rms, RmsNorm, RmsNormGrad};
use crate::device::{Floats, PARTS, lanes, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, DevicePtr, Gpu, Header, KernelSource, Launch, Operands,
    Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

/// Device code that reduces a row held in registers.
pub(crate) const ROW: Header =
    Header::new("rms_norm/row.cuh", include_str!("row.cuh")).with_constants(&[&[("HELD", HELD as i64)]]);

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[
        ("MAX_THREADS", MAX_THREADS as i64),
        ("OWNED", OWNED as i64),
        ("COLUMN_BLOCK_ROWS", COLUMN_BLOCK_ROWS as i64),
    ]],
    headers: &[ROW],
    structs: &[NormArguments::LAYOUT, NormGradArguments::LAYOUT, SumArguments::LAYOUT],
    ..KernelSource::new("rms_norm/kernel.cu", include_str!("kernel.cu"))
};

/// The most threads of a block.
const MAX_THREADS: usize = 1024;
/// Vectors of a row that a thread holds in registers.
const HELD: usize = 4;
/// Columns of a thread of the backward.
const OWNED: usize = 8;
/// Rows of a block that sums columns.
const COLUMN_BLOCK_ROWS: usize = 8;
/// Fewer rows leave threads of a GPU idle.
const FEW_ROWS: usize = 64;

kernel_struct! {
    struct NormArguments {
        x: DevicePtr,
        delta: DevicePtr,
        sum: DevicePtr,
        w: Floats,
        y: DevicePtr,
        rstd: DevicePtr,
        amax: DevicePtr,
        rows: u64,
        width: u32,
        eps: f32,
    }
}

impl CudaKernel for RmsNorm {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let norm = NormOperands {
            w: Some(inputs[1]),
            y: Some(outputs[0]),
            ..NormOperands::new(inputs[0], outputs[1])
        };
        norm.prepare(gpu, self.eps)
    }
}

impl CudaKernel for AddRmsNorm {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let added = Some((inputs[1], outputs[0]));
        let norm = NormOperands {
            w: Some(inputs[2]),
            y: Some(outputs[1]),
            ..NormOperands::new(inputs[0], outputs[2])
        };
        NormOperands { added, ..norm }.prepare(gpu, self.eps)
    }
}

impl CudaKernel for Rms {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, .. } = operands;
        let added = 1 + usize::from(self.adds);
        let norm = NormOperands {
            added: self.adds.then(|| (inputs[1], outputs[0])),
            w: inputs.get(added).copied(),
            amax: outputs.get(added).copied(),
            ..NormOperands::new(inputs[0], outputs[added - 1])
        };
        norm.prepare(gpu, self.eps)
    }
}

/// The operands of a norm.
#[derive(Clone, Copy)]
struct NormOperands {
    x: CudaTensor,
    /// delta, and the sum.
    added: Option<(CudaTensor, CudaOutput)>,
    w: Option<CudaTensor>,
    y: Option<CudaOutput>,
    rstd: CudaOutput,
    amax: Option<CudaOutput>,
}

impl NormOperands {
    fn new(x: CudaTensor, rstd: CudaOutput) -> NormOperands {
        NormOperands { x, added: None, w: None, y: None, rstd, amax: None }
    }

    fn prepare(self, gpu: &Gpu, eps: f32) -> Result<Work, CudaError> {
        let ty = self.x.ty;
        let (rows, width) = ty.shape.rows_cols();
        let (path, threads) = match row_threads(ty) {
            Some(threads) => ("held", threads),
            None => ("any", warps_of(width.div_ceil(OWNED), MAX_THREADS)),
        };
        let adds = if self.added.is_some() { "add_" } else { "" };
        let name = if self.y.is_some() { "rms_norm" } else { "rms" };
        let function = gpu.function(&SOURCE, &[], &format!("{adds}{name}_{path}_{}", suffix(ty)))?;
        let none = DevicePtr(0);
        let arguments = NormArguments {
            x: self.x.place,
            delta: self.added.map_or(none, |(delta, _)| delta.place),
            sum: self.added.map_or(none, |(_, sum)| sum.place),
            // Without a weight the kernel reads none; x takes its place.
            w: self.w.unwrap_or(self.x).into(),
            y: self.y.map_or(none, |y| y.place),
            rstd: self.rstd.place,
            amax: self.amax.map_or(none, |amax| amax.place),
            rows: rows as u64,
            width: width as u32,
            eps,
        };
        // SAFETY: the kernel takes one `NormArguments`. x, delta, the sum and y are [rows, width] of the type
        // that the name says, w has width elements, rstd rows of f32 and amax one; a block stays within its
        // row. Rows of whole vectors are aligned, and HELD vectors a thread hold one.
        let norm = unsafe { Work::launch(function, Launch::row(rows.max(1) as u32, threads), arguments) };
        if self.amax.is_none() {
            return Ok(norm);
        }
        let clear = gpu.function(&SOURCE, &[], "rms_norm_clear")?;
        // SAFETY: as above, with amax.
        let clear = unsafe { Work::launch(clear, Launch::row(1, 1), arguments) };
        Ok(Work::sequence(vec![clear, norm]))
    }
}

/// Threads of a row that hold it in registers; None if they cannot.
pub(crate) fn row_threads(x: TensorType) -> Option<u32> {
    let (rows, width) = x.shape.rows_cols();
    let vectors = width / lanes(x);
    let is_held = width.is_multiple_of(lanes(x)) && vectors <= HELD * MAX_THREADS;
    // Few rows leave the GPU idle, so every thread helps.
    let threads = if rows < FEW_ROWS { vectors } else { vectors.div_ceil(HELD) };
    is_held.then(|| warps_of(threads, MAX_THREADS))
}

kernel_struct! {
    struct NormGradArguments {
        dy: DevicePtr,
        x: DevicePtr,
        rstd: Floats,
        w: Floats,
        residual: DevicePtr,
        dx: DevicePtr,
        y: DevicePtr,
        parts: DevicePtr,
        amax: DevicePtr,
        rows: u64,
        width: u32,
    }
}

kernel_struct! {
    struct SumArguments {
        parts: DevicePtr,
        dw: Floats,
        width: u64,
        count: u32,
        accumulate: u32,
    }
}

/// True if each thread of a block holds the same few columns of every row; f32 takes more registers, so
/// blocks are smaller.
fn is_held(ty: TensorType) -> bool {
    let (_, width) = ty.shape.rows_cols();
    width.is_multiple_of(OWNED) && width <= OWNED * MAX_THREADS * 2 / ty.dtype.bytes(1)
}

/// Partial sums of dw. Blocks of narrow rows are small, so there are more of them.
fn parts(ty: TensorType) -> usize {
    let (rows, width) = ty.shape.rows_cols();
    match is_held(ty) {
        true => rows.clamp(1, if width <= 1024 { 2 * PARTS } else { PARTS }),
        false => rows.div_ceil(COLUMN_BLOCK_ROWS).clamp(1, PARTS),
    }
}

impl CudaKernel for RmsNormGrad {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (_, width) = inputs[0].shape.rows_cols();
        vec![TensorType::new(DType::F32, [parts(inputs[0]), width])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = operands;
        let ty = inputs[0].ty;
        let (rows, width) = ty.shape.rows_cols();
        let measures = self.extra == ExtraOutput::Amax;
        let function = |name: &str| gpu.function(&SOURCE, &[], &format!("{name}_{}", suffix(ty)));
        let arguments = NormGradArguments {
            dy: inputs[0].place,
            x: inputs[1].place,
            rstd: inputs[2].into(),
            w: inputs[3].into(),
            residual: inputs.get(4).map_or(DevicePtr(0), |residual| residual.place),
            dx: outputs[0].place,
            // y replaces dy in memory.
            y: if self.extra == ExtraOutput::Y { outputs[2].place } else { DevicePtr(0) },
            parts: workspace[0].place,
            amax: if measures { outputs[2].place } else { DevicePtr(0) },
            rows: rows as u64,
            width: width as u32,
        };
        let parts = parts(ty);
        let mut works = Vec::new();
        if measures {
            let clear = gpu.function(&SOURCE, &[], "rms_norm_grad_clear")?;
            // SAFETY: the kernel takes one `NormGradArguments`, with amax a word.
            works.push(unsafe { Work::launch(clear, Launch::row(1, 1), arguments) });
        }
        if is_held(ty) {
            let name = if measures { "rms_norm_grad_amax" } else { "rms_norm_grad_held" };
            let launch = Launch::row(parts as u32, warps_of(width / OWNED, MAX_THREADS));
            // SAFETY: the kernel takes one `NormGradArguments`. dy, x, the residual and dx are [rows, width]
            // of the type that the name says, rstd has rows elements, w width, the workspace a row of width
            // f32 for each block. OWNED columns a thread make up a row.
            works.push(unsafe { Work::launch(function(name)?, launch, arguments) });
        } else {
            let launch = Launch::row(rows.max(1) as u32, warps_of(width.div_ceil(OWNED), MAX_THREADS));
            // SAFETY: as above; a block stays within its row.
            works.push(unsafe { Work::launch(function("rms_norm_grad_any")?, launch, arguments) });
            let launch = plane([width.div_ceil(32), parts], [32, COLUMN_BLOCK_ROWS as u32]);
            // SAFETY: as above; the workspace has a row for each y of the grid. It reads each element of dy
            // once, before it writes y there.
            works.push(unsafe { Work::launch(function("rms_norm_columns_any")?, launch, arguments) });
        }
        let sum = SumArguments {
            parts: workspace[0].place,
            dw: outputs[1].into(),
            width: width as u64,
            count: parts as u32,
            accumulate: outputs[1].accumulate.into(),
        };
        let launch = plane([width.div_ceil(32), 1], [32, 32]);
        // SAFETY: the kernel takes one `SumArguments`; the workspace is [parts, width], all of it written
        // before, and dw has width elements.
        works.push(unsafe { Work::launch(gpu.function(&SOURCE, &[], "rms_norm_sum")?, launch, sum) });
        Ok(Work::sequence(works))
    }
}
