//! Launch of the GPU kernel of [`Retile`].
#![allow(unsafe_code, reason = "it launches a kernel")]

use super::Retile;
use crate::device::plane;
use crate::quantize::cuda::SCALES;
use crate::tail::TAIL;
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Operands, Work, kernel_struct};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, TILE};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("TILE", TILE as i64), ("COLS", COLS as i64), ("THREADS", THREADS as i64)]],
    headers: &[SCALES, TAIL],
    structs: &[RetileArguments::LAYOUT],
    ..KernelSource::new("retile/kernel.cu", include_str!("kernel.cu"))
};

/// Columns of a block, which divide those of a tile.
const COLS: usize = 64;
const THREADS: u32 = 256;

kernel_struct! {
    struct RetileArguments {
        q: DevicePtr,
        inv_scale: DevicePtr,
        sources: DevicePtr,
        row_major: DevicePtr,
        row_scale: DevicePtr,
        transposed: DevicePtr,
        transposed_scale: DevicePtr,
        tokens_of_rank: u32,
        top_k: u32,
        rows: u32,
        width: u32,
        max_finite: f32,
        leaves_tail: u32,
    }
}

impl CudaKernel for Retile {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [q, sources, rows] = [0, 1, 2].map(|n| operands.inputs[n]);
        let scales = operands.inputs.get(Retile::SCALES);
        let (tokens, width) = q.ty.shape.rows_cols();
        let ragged = sources.ty.numel();
        // Numbers and scales of each layout that is written.
        let mut places = operands.outputs.chunks(self.outputs_of_layout());
        let none = DevicePtr(0);
        let [[row_major, row_scale], [transposed, transposed_scale]] =
            self.layouts.written().map(|is_written| match is_written.then(|| places.next()).flatten() {
                Some(written) => [written[0].place, written.get(1).map_or(none, |scales| scales.place)],
                None => [none, none],
            });
        let arguments = RetileArguments {
            q: q.place,
            inv_scale: scales.map_or(none, |scales| scales.place),
            sources: sources.place,
            row_major,
            row_scale,
            transposed,
            transposed_scale,
            tokens_of_rank: scales.map_or(tokens, |scales| scales.ty.shape.rows_cols().1) as u32,
            top_k: rows.ty.shape.rows_cols().1 as u32,
            rows: ragged as u32,
            width: width as u32,
            max_finite: max_finite(DType::E4M3) as f32,
            leaves_tail: self.tail.is_undefined().into(),
        };
        let [of_rows, of_columns] =
            [width, ragged].map(|extent| if extent.is_multiple_of(16) { "vector" } else { "any" });
        let scaled = if self.is_scaled() { "scaled" } else { "unscaled" };
        let function = gpu.function(&SOURCE, &[], &format!("retile_{scaled}_{of_rows}_{of_columns}"))?;
        let launch = plane([width.div_ceil(COLS), ragged.div_ceil(TILE)], [THREADS, 1]);
        // SAFETY: the kernel takes one `RetileArguments` of tensors with the shapes of `infer`, whose rows
        // are of whole vectors where its name says so. It writes no layout whose numbers are null. Sources
        // come from `dispatch`: they are -1 or copies of tokens.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
