//! The GPU kernel of [`RmsQuantize`], and the two launches if it does not apply.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::RmsQuantize;
use crate::device::table;
use crate::quantize::CastSource;
use crate::quantize::cuda::{AREA, FusedCast, PIECE, QuantizeArguments, SCALES};
use crate::quantize::variants::{ANY, BOTH, NONE, Table, fused_variants};
use crate::rms_norm::{ROW, row_threads};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, DevicePtr, Gpu, KernelSource, Launch, Operands, Work,
    kernel_struct,
};
use xtrain_tensor::{DType, TILE, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[ROW, SCALES, PIECE, AREA],
    structs: &[Arguments::LAYOUT],
    variants: || fused_variants(TABLE),
    ..KernelSource::new("rms_quantize/kernel.cu", include_str!("kernel.cu"))
};

#[rustfmt::skip]
const TABLE: Table = &[
    //                               current  delayed  rows   tiles  blocks
    (CastSource::Norm, DType::E4M3, [NONE,    ANY,     NONE,  ANY,   BOTH]),
];

/// The most resident blocks of a multiprocessor.
const RESIDENT_BLOCKS: u32 = 4;

kernel_struct! {
    struct Arguments {
        cast: QuantizeArguments,
        x: DevicePtr,
        delta: DevicePtr,
        done: DevicePtr,
        threads: u32,
        lead: u32,
        eps: f32,
    }
}

impl CudaKernel for RmsQuantize {
    /// The cast's workspace.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        self.cast.workspace(&inputs[..1])
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let Operands { inputs, outputs, workspace } = operands;
        let sum_and_rstd = outputs[..2].iter().map(|&CudaOutput { ty, place, .. }| CudaTensor { ty, place });
        let cast_inputs: Vec<_> = sum_and_rstd.chain(inputs[2..].iter().copied()).collect();
        let cast_operands = Operands { inputs: &cast_inputs, outputs: &outputs[2..], workspace };
        if let Some(work) = self.fused(gpu, &inputs[..2], &cast_operands)? {
            return Ok(work);
        }
        let rms_operands = Operands { inputs: &inputs[..2], outputs: &outputs[..2], workspace: &[] };
        let rms = self.rms().prepare(gpu, &rms_operands)?;
        Ok(Work::sequence(vec![rms, self.cast.prepare(gpu, &cast_operands)?]))
    }
}

impl RmsQuantize {
    /// The sum, 1/rms and the cast in one launch: for whole areas in bf16 whose rows fit the threads of one
    /// area. If the L2 cache holds most of the sum, two launches are faster.
    fn fused(
        &self,
        gpu: &Gpu,
        added: &[CudaTensor],
        cast_operands: &Operands<'_>,
    ) -> Result<Option<Work>, CudaError> {
        let ty = added[0].ty;
        let (Some(threads), DType::BF16) = (row_threads(ty), ty.dtype) else { return Ok(None) };
        let (rows, width) = ty.shape.rows_cols();
        let is_whole = rows.is_multiple_of(TILE) && width.is_multiple_of(TILE);
        let is_in_cache = ty.bytes() <= gpu.info().l2_bytes / 2;
        if !is_whole || is_in_cache || threads > CastSource::Norm.threads() {
            return Ok(None);
        }
        let Some(fused) = self.cast.fused(gpu, cast_operands)? else { return Ok(None) };
        let FusedCast { arguments: cast, defines, launch, before, after, .. } = fused;
        let ([across, down, _], [block, ..]) = (launch.grid, launch.block);
        // Blocks that sum the rows of a strip.
        let row_blocks = TILE as u32 / (block / threads);
        let resident = gpu.info().multiprocessors * RESIDENT_BLOCKS;
        let lead = resident.div_ceil(row_blocks + across).min(down);
        let done = table(gpu, &vec![0u32; down as usize])?;
        let arguments = Arguments {
            cast,
            x: added[0].place,
            delta: added[1].place,
            done: done.pointer(),
            threads,
            lead,
            eps: self.eps,
        };
        let function = gpu.function(&SOURCE, &defines, "rms_quantize_bf16")?;
        let launch = Launch::row((row_blocks + across) * down, block);
        let joint = Work::new(move |stream| {
            // It lives as long as the work.
            let _done = &done;
            // SAFETY: the kernel takes one `Arguments`. x, delta and the sum are whole areas of bf16, and
            // 1/rms has a number for each row; there is a block for every share of a strip's rows and for
            // every area, and a word that is 0 for each strip.
            unsafe { function.launch(launch, &arguments, stream) }
        });
        Ok(Some(Work::sequence(before.into_iter().chain([joint]).chain(after).collect())))
    }
}
