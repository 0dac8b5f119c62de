//! The kernels of [`Quantize`] and [`Dequantize`] on a card.
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{Dequantize, Granularity, Quantize};
use crate::device::{ELEMENTWISE_THREADS, Floats, plane, suffix, warps_of};
use crate::quantize::granularity::TILE;
use xtrain_cuda::{CudaError, CudaKernel, Defines, DevicePtr, Gpu, KernelSource, Launch, Operands, Work};
use xtrain_tensor::DType;
use xtrain_tensor::formats::max_finite;

pub(super) const SOURCE: KernelSource = KernelSource {
    variants: &VARIANTS,
    ..KernelSource::new("quantize/kernel.cu", include_str!("kernel.cu"))
};

pub(super) const DEQUANTIZE: KernelSource =
    KernelSource::new("quantize/dequantize.cu", include_str!("dequantize.cu"));

/// Along what the regions of an area lie, and what is done with them; numbers as in the source.
const VARIANTS: [Defines; 9] = [
    &[("MODE", ROWS), ("PHASE", FUSED)],
    &[("MODE", ROWS), ("PHASE", MEASURE)],
    &[("MODE", ROWS), ("PHASE", CAST)],
    &[("MODE", COLUMNS), ("PHASE", FUSED)],
    &[("MODE", COLUMNS), ("PHASE", MEASURE)],
    &[("MODE", COLUMNS), ("PHASE", CAST)],
    &[("MODE", AREA), ("PHASE", FUSED)],
    &[("MODE", AREA), ("PHASE", MEASURE)],
    &[("MODE", AREA), ("PHASE", CAST)],
];
const ROWS: i64 = 0;
const COLUMNS: i64 = 1;
const AREA: i64 = 2;
const FUSED: i64 = 0;
const MEASURE: i64 = 1;
const CAST: i64 = 2;

/// Threads of a block of the source, and columns of one of its threads.
const THREADS: u32 = 256;
const WIDTH: usize = 8;

/// The number that stands for a format in the sources.
fn format(dtype: DType) -> u32 {
    match dtype {
        DType::E4M3 => 0,
        DType::E5M2 => 1,
        _ => 2,
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    x: DevicePtr,
    q: DevicePtr,
    inv_scale: DevicePtr,
    amax: DevicePtr,
    rows: u32,
    cols: u32,
    high: u32,
    wide: u32,
    down: u32,
    across: u32,
    format: u32,
    pow2: u32,
    largest: f32,
}

impl CudaKernel for Quantize {
    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, [q, inv_scale, amax]) = (operands.inputs[0], [0, 1, 2].map(|n| operands.outputs[n]));
        let (rows, cols) = x.ty.shape.rows_cols();
        let (high, wide) = self.granularity.region(rows, cols);
        let [down, across] = self.granularity.scales(rows, cols);
        let arguments = Arguments {
            x: x.place,
            q: q.place,
            inv_scale: inv_scale.place,
            amax: amax.place,
            rows: rows as u32,
            cols: cols as u32,
            high: high as u32,
            wide: wide as u32,
            down: down as u32,
            across: across as u32,
            format: format(self.format),
            pow2: self.pow2_scales.into(),
            largest: max_finite(self.format),
        };
        let areas = [cols.div_ceil(TILE), rows.div_ceil(TILE)];
        let (mode, within) = match self.granularity {
            Granularity::Row | Granularity::Tile1x128 => (ROWS, across == areas[0]),
            Granularity::Column | Granularity::Tile128x1 => (COLUMNS, down == areas[1]),
            Granularity::Tensor | Granularity::Block128 => (AREA, [across, down] == areas),
        };
        let vector = cols.is_multiple_of(WIDTH);
        // Where rows are not made of eights, those of a packed format share bytes.
        let pairs = self.format == DType::E5M6 && !vector;

        let path = if vector { "vector" } else { "any" };
        let area = |phase| {
            let defines = [("MODE", mode), ("PHASE", phase)];
            let name = format!("quantize_{path}_{}", suffix(x.ty));
            Ok::<_, CudaError>((gpu.function(&SOURCE, &defines, &name)?, plane(areas, [THREADS, 1])))
        };
        let other = |name: &str, threads: usize| {
            let defines = [("MODE", mode), ("PHASE", MEASURE)];
            let launch = Launch::row(threads.div_ceil(THREADS as usize) as u32, THREADS);
            Ok::<_, CudaError>((gpu.function(&SOURCE, &defines, name)?, launch))
        };
        let steps = match within && !pairs {
            true => vec![area(FUSED)?],
            false => vec![
                other("quantize_clear", down * across)?,
                area(MEASURE)?,
                match pairs {
                    true => other(&format!("quantize_pair_{}", suffix(x.ty)), (rows * cols).div_ceil(2))?,
                    false => area(CAST)?,
                },
            ],
        };
        // SAFETY: the kernels take one `Arguments`. x is [rows, cols] of the type that the name says, q so in the format, amax and inverse
        // scales are f32 [down, across]; the areas cover the matrix, and the others every region or pair of elements.
        let put = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        Ok(Work::all(steps.into_iter().map(put).collect()))
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Back {
    q: DevicePtr,
    inv_scale: Floats,
    x: DevicePtr,
    rows: u32,
    cols: u32,
    high: u32,
    wide: u32,
    across: u32,
    format: u32,
}

impl CudaKernel for Dequantize {
    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (q, scales, x) = (operands.inputs[0], operands.inputs[1], operands.outputs[0]);
        let (rows, cols) = q.ty.shape.rows_cols();
        let (down, across) = scales.ty.shape.rows_cols();
        // infer knew the shape of the scales; where it is that of several granularities, these share the regions.
        let known = Granularity::of_scales([down, across], rows, cols).unwrap_or(Granularity::Tensor);
        let (high, wide) = known.region(rows, cols);
        let arguments = Back {
            q: q.place,
            inv_scale: scales.into(),
            x: x.place,
            rows: rows as u32,
            cols: cols as u32,
            high: high as u32,
            wide: wide as u32,
            across: across as u32,
            format: format(q.ty.dtype),
        };
        let (path, n) = if cols.is_multiple_of(WIDTH) { ("vector", WIDTH) } else { ("any", 1) };
        let function = gpu.function(&DEQUANTIZE, &[], &format!("dequantize_{path}_{}", suffix(x.ty)))?;
        let threads = warps_of(cols.div_ceil(n), ELEMENTWISE_THREADS as usize);
        let launch = plane([rows, cols.div_ceil(n * threads as usize)], [threads, 1]);
        // SAFETY: the kernel takes one `Back`. q is [rows, cols] in the format and x of the type that the name says, in rows of eights where
        // the path is that; there is a scale for each region.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
