//! The GPU kernels of the norms.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{AddRmsNorm, Rms, RmsNorm, RmsNormGrad};
use crate::device::{Floats, PARTS, lanes, plane, suffix, table, warps_of};
use crate::quantize::Quantize;
use crate::quantize::cuda::{self as quantize, AREA, FusedCast, PIECE};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, DevicePtr, Gpu, Header, KernelSource, Launch, Operands,
    Work,
};
use xtrain_tensor::{DType, TILE, TensorType};

const ROW: Header = Header::new("rms_norm/row.cuh", include_str!("row.cuh"));

pub(super) const SOURCE: KernelSource =
    KernelSource { headers: &[ROW], ..KernelSource::new("rms_norm/kernel.cu", include_str!("kernel.cu")) };

pub(super) const CAST: KernelSource = KernelSource {
    headers: &[ROW, PIECE, AREA],
    variants: quantize::NORM_VARIANTS,
    ..KernelSource::new("rms_norm/cast.cu", include_str!("cast.cu"))
};

/// Threads of a block, at most.
const THREADS: usize = 1024;
/// Vectors of a row that a thread holds in registers; equal to HELD in the kernels.
const HELD: usize = 4;
/// The most resident blocks with casts of a multiprocessor.
const AT_ONCE: usize = 4;
/// Fewer rows leave threads of a GPU idle.
const FEW: usize = 64;
/// Columns of a thread of the backward; equal to OWNED in the kernels.
const OWNED: usize = 8;
/// Rows of a block that sums columns.
const ROWS: usize = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct Norm {
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
    /// The cast's workspace.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.cast.map(|cast| cast.workspace(&inputs[..1])).unwrap_or_default()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = operands;
        let own = 1 + usize::from(self.adds);
        let added = self.adds.then(|| (inputs[1], outputs[0]));
        let norm = NormOperands { added, ..NormOperands::new(inputs[0], outputs[own - 1]) };
        let Some(cast) = self.cast else {
            let (w, amax) = (inputs.get(own).copied(), outputs.get(own).copied());
            return NormOperands { w, amax, ..norm }.prepare(gpu, self.eps);
        };
        let made = outputs[..own].iter().map(|&CudaOutput { ty, place, .. }| CudaTensor { ty, place });
        let of: Vec<_> = made.chain(inputs[own..].iter().copied()).collect();
        let of = Operands { inputs: &of, outputs: &outputs[own..], workspace };
        match norm.cast_with(gpu, cast, &of, self.eps)? {
            Some(work) => Ok(work),
            None => Ok(Work::sequence(vec![norm.prepare(gpu, self.eps)?, cast.prepare(gpu, &of)?])),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormCast {
    at: quantize::Arguments,
    x: DevicePtr,
    delta: DevicePtr,
    done: DevicePtr,
    threads: u32,
    lead: u32,
    eps: f32,
}

/// The operands of a norm.
#[derive(Clone, Copy)]
struct NormOperands {
    x: CudaTensor,
    /// The addend of x, and the sum.
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
        let (path, threads) = match self.threads() {
            Some(threads) => ("held", threads),
            None => ("any", warps_of(width.div_ceil(OWNED), THREADS)),
        };
        let adds = if self.added.is_some() { "add_" } else { "" };
        let name = if self.y.is_some() { "rms_norm" } else { "rms" };
        let function = gpu.function(&SOURCE, &[], &format!("{adds}{name}_{path}_{}", suffix(ty)))?;
        let none = DevicePtr(0);
        let arguments = Norm {
            x: self.x.place,
            delta: self.added.map_or(none, |(delta, _)| delta.place),
            sum: self.added.map_or(none, |(_, sum)| sum.place),
            // Without a weight none is read, and x stands for it.
            w: self.w.unwrap_or(self.x).into(),
            y: self.y.map_or(none, |y| y.place),
            rstd: self.rstd.place,
            amax: self.amax.map_or(none, |amax| amax.place),
            rows: rows as u64,
            width: width as u32,
            eps,
        };
        // SAFETY: the kernel takes one `Norm`. x, what is added, the sum and y are [rows, width] of the type
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

    /// Threads of a row that hold it in registers; None if they cannot.
    fn threads(self) -> Option<u32> {
        let (rows, width) = self.x.ty.shape.rows_cols();
        let vectors = width / lanes(self.x.ty);
        let is_held = width.is_multiple_of(lanes(self.x.ty)) && vectors <= HELD * THREADS;
        // Few rows leave the GPU idle, so every thread helps.
        is_held.then(|| warps_of(if rows < FEW { vectors } else { vectors.div_ceil(HELD) }, THREADS))
    }

    /// The sum, its rows' 1/rms and the cast of its norm in one launch: for whole areas in bf16 whose rows
    /// fit the threads of one area. If the L2 cache holds most of the sum, a second launch is faster.
    fn cast_with(
        self,
        gpu: &Gpu,
        cast: Quantize,
        of: &Operands<'_>,
        eps: f32,
    ) -> Result<Option<Work>, CudaError> {
        let (Some((delta, _)), Some(threads), DType::BF16) = (self.added, self.threads(), self.x.ty.dtype)
        else {
            return Ok(None);
        };
        let (rows, width) = self.x.ty.shape.rows_cols();
        let is_whole = rows.is_multiple_of(TILE) && width.is_multiple_of(TILE);
        let is_in_cache = self.x.ty.bytes() <= gpu.info().l2_bytes / 2;
        if !is_whole || is_in_cache || threads > quantize::NORM_THREADS {
            return Ok(None);
        }
        let Some(fused) = cast.fused(gpu, of)? else { return Ok(None) };
        let FusedCast { arguments: at, defines, launch, before, after, .. } = fused;
        let ([across, down, _], [block, ..]) = (launch.grid, launch.block);
        // Blocks that make the rows of a strip.
        let makers = TILE as u32 / (block / threads);
        let under_way = gpu.info().multiprocessors * AT_ONCE as u32;
        let lead = under_way.div_ceil(makers + across).min(down);
        // Four bytes a strip.
        let done = table(gpu, &vec![0; down.div_ceil(2) as usize])?;
        let arguments =
            NormCast { at, x: self.x.place, delta: delta.place, done: done.pointer(), threads, lead, eps };
        let function = gpu.function(&CAST, &defines, "norm_cast_bf16")?;
        let launch = Launch::row((makers + across) * down, block);
        let joint = Work::new(move |stream| {
            // It lives as long as the work.
            let _done = &done;
            // SAFETY: the kernel takes one `NormCast`. x, what is added and the sum are whole areas of bf16
            // as the cast lies, 1/rms are a row's each; there is a block for every share of a strip's rows
            // and every area, and a word that is 0 for each strip.
            unsafe { function.launch(launch, &arguments, stream) }
        });
        Ok(Some(Work::sequence(before.into_iter().chain([joint]).chain(after).collect())))
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormGrad {
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

#[derive(Clone, Copy)]
#[repr(C)]
struct Sum {
    parts: DevicePtr,
    dw: Floats,
    width: u64,
    count: u32,
    accumulate: u32,
}

/// True if each thread of a block holds the same few columns of every row; f32 takes more registers, so
/// blocks are smaller.
fn is_held(ty: TensorType) -> bool {
    let (_, width) = ty.shape.rows_cols();
    width.is_multiple_of(OWNED) && width <= OWNED * THREADS * 2 / ty.dtype.bytes(1)
}

/// Partial sums of dw. Blocks of narrow rows are small, so there are more of them.
fn parts(ty: TensorType) -> usize {
    let (rows, width) = ty.shape.rows_cols();
    match is_held(ty) {
        true => rows.clamp(1, if width <= 1024 { 2 * PARTS } else { PARTS }),
        false => rows.div_ceil(ROWS).clamp(1, PARTS),
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
        let function = |name: &str| gpu.function(&SOURCE, &[], &format!("{name}_{}", suffix(ty)));
        let arguments = NormGrad {
            dy: inputs[0].place,
            x: inputs[1].place,
            rstd: inputs[2].into(),
            w: inputs[3].into(),
            residual: inputs.get(4).map_or(DevicePtr(0), |residual| residual.place),
            dx: outputs[0].place,
            // Remaking, dy stands where y is to stand.
            y: if self.rematerialise { outputs[2].place } else { DevicePtr(0) },
            parts: workspace[0].place,
            amax: if self.amax { outputs[outputs.len() - 1].place } else { DevicePtr(0) },
            rows: rows as u64,
            width: width as u32,
        };
        let parts = parts(ty);
        let mut works = Vec::new();
        if self.amax {
            let clear = gpu.function(&SOURCE, &[], "rms_norm_grad_clear")?;
            // SAFETY: the kernel takes one `NormGrad`, with amax a word.
            works.push(unsafe { Work::launch(clear, Launch::row(1, 1), arguments) });
        }
        if is_held(ty) {
            let name = if self.amax { "rms_norm_grad_amax" } else { "rms_norm_grad_held" };
            let launch = Launch::row(parts as u32, warps_of(width / OWNED, THREADS));
            // SAFETY: the kernel takes one `NormGrad`. dy, x, the residual and dx are [rows, width] of the
            // type that the name says, rstd has rows elements, w width, the workspace a row of width f32 for
            // each block. OWNED columns a thread make up a row.
            works.push(unsafe { Work::launch(function(name)?, launch, arguments) });
        } else {
            let launch = Launch::row(rows.max(1) as u32, warps_of(width.div_ceil(OWNED), THREADS));
            // SAFETY: as above; a block stays within its row.
            works.push(unsafe { Work::launch(function("rms_norm_grad_any")?, launch, arguments) });
            let launch = plane([width.div_ceil(32), parts], [32, ROWS as u32]);
            // SAFETY: as above; the workspace has a row for each y of the grid. It reads each element of dy
            // once, before it writes y there.
            works.push(unsafe { Work::launch(function("rms_norm_columns_any")?, launch, arguments) });
        }
        let sum = Sum {
            parts: workspace[0].place,
            dw: outputs[1].into(),
            width: width as u64,
            count: parts as u32,
            accumulate: outputs[1].accumulate.into(),
        };
        let launch = plane([width.div_ceil(32), 1], [32, 32]);
        // SAFETY: the kernel takes one `Sum`; the workspace is [parts, width], all of it written before, and
        // dw has width elements.
        works.push(unsafe { Work::launch(gpu.function(&SOURCE, &[], "rms_norm_sum")?, launch, sum) });
        Ok(Work::sequence(works))
    }
}
