//! The GPU kernels of [`Quantize`] and [`Dequantize`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{CastSource, Dequantize, Given, Quantize, SAVE};
use crate::device::{ELEMENTWISE_THREADS, Floats, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, Defines, DevicePtr, Gpu, Header, KernelSource, Launch,
    Operands, Work,
};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// Device code that casts an area held in registers.
pub(crate) const PIECE: Header = Header::new("quantize/piece.cuh", include_str!("piece.cuh"));
pub(crate) const AREA: Header = Header::new("quantize/area.cuh", include_str!("area.cuh"));
const MADE: Header = Header::new("quantize/made.cuh", include_str!("made.cuh"));

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[crate::swiglu::GATE, PIECE, MADE, AREA],
    variants: VARIANTS,
    ..KernelSource::new("quantize/kernel.cu", include_str!("kernel.cu"))
};

pub(crate) const DEQUANTIZE: KernelSource =
    KernelSource::new("quantize/dequantize.cu", include_str!("dequantize.cu"));

/// Rows of a thread's piece: fewer for sources that hold most in registers.
const fn high(of: i64) -> i64 {
    match of {
        SWIGLU_GRAD | SWIGLU_GRAD_OF_KEPT | SWIGLU_KEEPING => 4,
        _ => 8,
    }
}

/// Variants: source, format, scaling and phase as the kernels number them, in each of these layouts
/// (row-major, transposed).
macro_rules! variants {
    ($($of:ident $format:ident $scaling:ident $phase:ident [$($direct:literal $transposed:literal),*]),* $(,)?) => {
        &[$($(&[
            ("OF", $of),
            ("HIGH", high($of)),
            ("FORMAT", $format),
            ("SCALING", $scaling),
            ("POW2", if $scaling == TENSOR { 0 } else { 1 }),
            ("PHASE", $phase),
            ("DIRECT", $direct),
            ("TRANSPOSED", $transposed),
        ]),*),*]
    };
}

const VARIANTS: &[Defines] = variants![
    INPUT E4M3 TENSOR MEASURE [1 1],
    INPUT E5M2 TENSOR CAST [1 0, 0 1, 1 1],
    INPUT E4M3 TENSOR GIVEN [1 0, 0 1, 1 1],
    INPUT E4M3 ROW MEASURE [1 0, 0 1, 1 1],
    INPUT E4M3 ROW CAST [1 0, 0 1, 1 1],
    INPUT E4M3 TILES FUSED [1 0, 0 1, 1 1],
    INPUT E4M3 BLOCK FUSED [1 0, 0 1, 1 1],
    INPUT E5M6 TILES FUSED [1 0],
    // For packed pairs.
    INPUT E5M6 TILES MEASURE [1 0],
    SWIGLU E4M3 TENSOR MEASURE [1 1],
    SWIGLU E4M3 TENSOR CAST [1 0, 0 1, 1 1],
    SWIGLU E4M3 TENSOR GIVEN [1 1],
    SWIGLU E4M3 ROW MEASURE [1 1],
    SWIGLU E4M3 ROW CAST [1 1],
    SWIGLU E4M3 TILES FUSED [1 1],
    SWIGLU_GRAD E4M3 TENSOR MEASURE [1 1],
    SWIGLU_GRAD E5M2 TENSOR CAST [1 1],
    SWIGLU_GRAD E5M2 TENSOR GIVEN [1 1],
    SWIGLU_GRAD E4M3 ROW MEASURE [1 1],
    SWIGLU_GRAD E4M3 ROW CAST [1 1],
    SWIGLU_GRAD E4M3 TILES FUSED [1 1],
    SWIGLU_KEEPING E4M3 TENSOR MEASURE [1 1],
    SWIGLU_KEEPING E4M3 TENSOR GIVEN [1 0],
    SWIGLU_KEEPING E4M3 ROW MEASURE [1 0],
    SWIGLU_KEEPING E4M3 TILES FUSED [1 0],
    SWIGLU_OF_KEPT E4M3 TENSOR MEASURE [1 1],
    SWIGLU_OF_KEPT E4M3 TENSOR CAST [0 1],
    SWIGLU_OF_KEPT E4M3 TENSOR GIVEN [0 1],
    SWIGLU_OF_KEPT E4M3 ROW MEASURE [0 1],
    SWIGLU_OF_KEPT E4M3 ROW CAST [0 1],
    SWIGLU_OF_KEPT E4M3 TILES FUSED [0 1],
    SWIGLU_GRAD_OF_KEPT E5M2 TENSOR MEASURE [1 1],
    SWIGLU_GRAD_OF_KEPT E5M2 TENSOR CAST [1 1],
    SWIGLU_GRAD_OF_KEPT E5M2 TENSOR GIVEN [1 1],
    SWIGLU_GRAD_OF_KEPT E4M3 ROW MEASURE [1 1],
    SWIGLU_GRAD_OF_KEPT E4M3 ROW CAST [1 1],
    SWIGLU_GRAD_OF_KEPT E4M3 TILES FUSED [1 1],
    NORM E4M3 TENSOR CAST [1 0, 0 1, 1 1],
    NORM E4M3 TENSOR GIVEN [1 1],
    NORM E4M3 ROW MEASURE [1 1],
    NORM E4M3 ROW CAST [1 1],
    NORM E4M3 TILES FUSED [1 1],
];
/// Variants of tensors that another kernel computes and casts: by blocks, and with a given scale.
pub(crate) const LOCAL_VARIANTS: &[Defines] = variants![
    INPUT E4M3 TENSOR GIVEN [1 0, 0 1, 1 1],
    INPUT E4M3 BLOCK FUSED [1 0, 0 1, 1 1],
];
/// Variants of norms that another kernel computes and casts: by tiles, by blocks, and with a given scale.
pub(crate) const NORM_VARIANTS: &[Defines] = variants![
    NORM E4M3 TENSOR GIVEN [1 0, 0 1, 1 1],
    NORM E4M3 TILES FUSED [1 0, 0 1, 1 1],
    NORM E4M3 BLOCK FUSED [1 1],
];
const E4M3: i64 = 0;
const E5M2: i64 = 1;
const E5M6: i64 = 2;
const INPUT: i64 = 0;
const SWIGLU: i64 = 1;
const SWIGLU_GRAD: i64 = 2;
const NORM: i64 = 3;
const SWIGLU_OF_KEPT: i64 = 4;
const SWIGLU_GRAD_OF_KEPT: i64 = 5;
const SWIGLU_KEEPING: i64 = 6;
const TENSOR: i64 = 0;
const ROW: i64 = 1;
const TILES: i64 = 2;
const BLOCK: i64 = 3;
const FUSED: i64 = 0;
const MEASURE: i64 = 1;
const CAST: i64 = 2;
const GIVEN: i64 = 3;
const UNSET: i64 = 4;

/// Columns of a thread's piece.
const WIDTH: usize = 8;
/// Threads of a block that casts an area of a norm.
pub(crate) const NORM_THREADS: u32 = (TILE / WIDTH * TILE / high(NORM) as usize) as u32;
/// The most threads of a block that reduces an amax, and its fewest rows.
const MEASURING: usize = 256;
const ROWS: usize = 2;
/// Rows of blocks that reduce an amax that is seldom needed.
const FEW: usize = 128;

/// The number of a source in the kernels.
fn number(source: CastSource) -> i64 {
    match source {
        CastSource::Input => INPUT,
        CastSource::Swiglu { restored: false } => SWIGLU,
        CastSource::Swiglu { restored: true } => SWIGLU_OF_KEPT,
        CastSource::SwigluSaving => SWIGLU_KEEPING,
        CastSource::SwigluGrad { restored: false } => SWIGLU_GRAD,
        CastSource::SwigluGrad { restored: true } => SWIGLU_GRAD_OF_KEPT,
        CastSource::Norm => NORM,
    }
}

/// A launch with a thread for every scale.
fn clearing(arguments: &Arguments) -> Launch {
    let scales = arguments.sides.iter().map(|side| side.scales as usize).max().unwrap_or(0);
    Launch::row(scales.max(1).div_ceil(MEASURING) as u32, MEASURING as u32)
}

/// The number of a format in the kernels.
fn format(dtype: DType) -> i64 {
    match dtype {
        DType::E4M3 => E4M3,
        DType::E5M2 => E5M2,
        _ => E5M6,
    }
}

/// One layout; all zeros if it is not written.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Side {
    q: u64,
    inv_scale: u64,
    maxima: u64,
    rows: u32,
    cols: u32,
    down: u32,
    across: u32,
    scales: u32,
    padding: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Arguments {
    x: DevicePtr,
    gate_up: DevicePtr,
    gate_up_scale: DevicePtr,
    gate_up_rows: u64,
    keep: DevicePtr,
    keep_scale: DevicePtr,
    rstd: Floats,
    w: Floats,
    scale: DevicePtr,
    measured: DevicePtr,
    amax: DevicePtr,
    sides: [Side; 2],
    rows: u32,
    cols: u32,
    accumulate: u32,
    largest: f32,
    across: u32,
    down: u32,
}

impl CudaKernel for Quantize {
    /// The maxima of the regions of each written layout, and the workspace of a separate save.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (rows, cols) = self.source.extents(inputs);
        let sides = self.layouts.written().into_iter().zip([[rows, cols], [cols, rows]]);
        let maxima = |[rows, cols]: [usize; 2]| TensorType::new(DType::U32, self.scaling.shape(rows, cols));
        let own = sides.filter(|(is_made, _)| *is_made).map(|(_, extents)| maxima(extents));
        let for_saving = if self.saves_apart(inputs) { saving_workspace(inputs) } else { Vec::new() };
        own.chain(for_saving).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        if self.saves_apart(&types) {
            let (outputs, copy) = operands.outputs.split_at(operands.outputs.len() - 2);
            let (workspace, saving_workspace) = operands.workspace.split_at(operands.workspace.len() - 2);
            let keep = saving(gpu, operands.inputs[0], copy, saving_workspace)?;
            let cast = Quantize { source: CastSource::Swiglu { restored: false }, ..*self };
            let cast = cast.prepare(gpu, &Operands { inputs: operands.inputs, outputs, workspace })?;
            return Ok(Work::sequence(vec![keep, cast]));
        }
        let (rows, cols) = self.source.extents(&types);
        let stored = types[0].with_dtype(self.source.dtype(&types));
        let arguments = self.arguments(operands);
        let cover = self.cover([rows, cols]);
        let of = number(self.source);
        // In rows that are no multiple of 8, elements of a packed format share bytes.
        let pairs = self.format == DType::E5M6 && !cover.vector;
        // The copy is saved once.
        let of = |phase| if of == SWIGLU_KEEPING && matches!(phase, CAST | UNSET) { SWIGLU } else { of };
        let function = |phase, name: &str| gpu.function(&SOURCE, &self.defines(of(phase), phase), name);
        let area = |phase| {
            let is_tensor = self.scaling == Scaling::Tensor && matches!(phase, MEASURE | UNSET);
            let path = if is_tensor && cover.vector { "vector" } else { cover.path };
            let function = function(phase, &format!("quantize_{path}_{}", suffix(stored)))?;
            if !is_tensor {
                return Ok::<_, CudaError>((function, cover.launch(high(of(phase)))));
            }
            let across = if cover.vector { cover.wide / WIDTH } else { cols };
            let threads = warps_of(across, MEASURING);
            let down = rows.div_ceil(ROWS).min(if phase == UNSET { FEW } else { u16::MAX.into() });
            Ok((function, plane([across.div_ceil(threads as usize), down], [threads, 1])))
        };
        let phases = match (self.given, self.scaling) {
            _ if pairs => &[MEASURE][..],
            (Given::Amax, _) => &[CAST],
            (Given::Scale, _) => &[UNSET, GIVEN],
            (Given::Nothing, Scaling::Tensor | Scaling::Row) => &[MEASURE, CAST],
            (Given::Nothing, _) => &[FUSED],
        };
        let mut steps = Vec::new();
        // No block raises a given amax.
        if self.given != Given::Amax && (pairs || !self.is_clear(&arguments)) {
            steps.push((function(phases[0], "quantize_clear")?, clearing(&arguments)));
        }
        for &phase in phases {
            steps.push(area(phase)?);
        }
        if pairs {
            let name = format!("quantize_pair_{}", suffix(stored));
            let phase = if self.is_given() { GIVEN } else { MEASURE };
            let pairs = (rows * cols).div_ceil(2);
            let launch = Launch::row(pairs.div_ceil(MEASURING) as u32, MEASURING as u32);
            steps.push((function(phase, &name)?, launch));
        }
        // SAFETY: the kernels take one `Arguments`. The value to cast is [rows, cols], and its inputs have
        // the sizes that `CastSource` gives and the type in the kernel's name; each written side has its own
        // extents, in the format, with its scales and a word for each of them; a saved copy is as large as
        // gate and up, with a scale for each tile. The areas cover the matrix, so do the blocks that reduce
        // the amax, which loop over further rows, and the other launches cover every scale or pair of
        // elements.
        let put = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        Ok(Work::sequence(steps.into_iter().map(put).collect()))
    }
}

/// The arguments, defines and launches of a kernel that computes a tensor by areas and casts it.
pub(crate) struct FusedCast {
    pub(crate) arguments: Arguments,
    pub(crate) defines: [(&'static str, i64); 8],
    /// `whole` if all areas are, `vector` if rows are multiples of 8.
    pub(crate) path: &'static str,
    /// One block for each area.
    pub(crate) launch: Launch,
    /// Launches before and after it.
    pub(crate) before: Option<Work>,
    pub(crate) after: Option<Work>,
}

/// The grid of areas over the value to cast.
struct Cover {
    /// The kernels' name for it.
    path: &'static str,
    /// True if rows are multiples of 8.
    vector: bool,
    /// Its columns, or those of each half of two.
    wide: usize,
    /// Blocks in a row, and in a column.
    across: usize,
    down: usize,
}

impl Cover {
    /// One block for each area, of threads with pieces of so many rows.
    fn launch(&self, high: i64) -> Launch {
        let threads = TILE / WIDTH * TILE / high as usize;
        plane([self.across, self.down], [threads as u32, 1])
    }
}

impl Quantize {
    fn cover(self, [rows, cols]: [usize; 2]) -> Cover {
        let is_halved = matches!(self.source, CastSource::SwigluGrad { .. });
        let wide = if is_halved { cols / 2 } else { cols };
        let vector = wide.is_multiple_of(WIDTH);
        let (path, across) = match (vector, wide.is_multiple_of(TILE) && rows.is_multiple_of(TILE)) {
            // Both halves together.
            (_, true) => ("whole", wide / TILE),
            (true, _) => ("vector", cols.div_ceil(TILE)),
            (false, _) => ("any", cols.div_ceil(TILE)),
        };
        Cover { path, vector, wide, across, down: rows.div_ceil(TILE) }
    }

    /// The defines of its kernels, in this phase and for the source with this number.
    fn defines(self, of: i64, phase: i64) -> [(&'static str, i64); 8] {
        let scaling = match self.scaling {
            Scaling::Tensor => TENSOR,
            Scaling::Row => ROW,
            Scaling::Tile => TILES,
            Scaling::Block => BLOCK,
        };
        let [direct, transposed] = self.layouts.written().map(i64::from);
        [
            ("OF", of),
            ("HIGH", high(of)),
            ("FORMAT", format(self.format)),
            ("SCALING", scaling),
            ("POW2", self.pow2_scales.into()),
            ("PHASE", phase),
            ("DIRECT", direct),
            ("TRANSPOSED", transposed),
        ]
    }

    /// True if nothing needs clearing before areas are cast: by tiles or blocks, without scales that belong
    /// to no region (cuBLASLt pads rows of blocks to fours), and with an amax that accumulates.
    fn is_clear(self, arguments: &Arguments) -> bool {
        let has_padding = arguments.sides.iter().any(|side| {
            let (rows, cols) = (side.rows as usize, side.cols as usize);
            let (high, wide) = self.scaling.region(rows, cols);
            let regions = rows.div_ceil(high.max(1)) * cols.div_ceil(wide.max(1));
            regions != side.scales as usize
        });
        self.is_within_areas() && arguments.accumulate != 0 && !has_padding
    }

    fn arguments(self, operands: &Operands<'_>) -> Arguments {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        let (inputs, given) = operands.inputs.split_at(self.source.inputs());
        let (rows, cols) = self.source.extents(&types);
        let (x, kept, made) = (inputs[0], self.source.restored(), self.layouts.written());
        let cover = self.cover([rows, cols]);
        let mut pairs = operands.outputs.chunks_exact(2).zip(operands.workspace);
        let sides = made.map(|is_made| {
            let pair = if is_made { pairs.next() } else { None };
            let Some((pair, maxima)) = pair else { return Side::default() };
            let (rows, cols) = pair[0].ty.shape.rows_cols();
            let (down, across) = self.scaling.steps(rows, cols);
            Side {
                q: pair[0].place.0,
                inv_scale: pair[1].place.0,
                maxima: maxima.place.0,
                rows: rows as u32,
                cols: cols as u32,
                down: down as u32,
                across: across as u32,
                scales: pair[1].ty.numel() as u32,
                padding: 0,
            }
        });
        let amax = operands.outputs[self.amax()];
        let copy = |n: usize| operands.outputs.get(self.amax() + n).map_or(DevicePtr(0), |t| t.place);
        let none = Floats::none();
        let gate_up = match self.source {
            CastSource::SwigluGrad { .. } => inputs[1].place,
            _ => DevicePtr(0),
        };
        let [rstd, w] = match self.source {
            CastSource::Norm => [inputs[1].into(), inputs[2].into()],
            _ => [none; 2],
        };
        let given = given.first().map_or(DevicePtr(0), |tensor| tensor.place);
        let given_as = |kind| if self.given == kind { given } else { DevicePtr(0) };
        Arguments {
            x: x.place,
            gate_up,
            gate_up_scale: kept.map_or(DevicePtr(0), |at| inputs[at + 1].place),
            gate_up_rows: rows as u64,
            keep: copy(1),
            keep_scale: copy(2),
            rstd,
            w,
            scale: given_as(Given::Scale),
            measured: given_as(Given::Amax),
            amax: amax.place,
            sides,
            rows: rows as u32,
            cols: cols as u32,
            accumulate: amax.accumulate.into(),
            largest: max_finite(self.format),
            across: cover.across as u32,
            down: cover.down as u32,
        }
    }

    /// The means for a kernel that computes a tensor by areas to cast it, if the cast is local; `operands`
    /// are those of the cast. None if rows are no multiples of 8.
    pub(crate) fn fused(self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Option<FusedCast>, CudaError> {
        let arguments = self.arguments(operands);
        let cover = self.cover([arguments.rows as usize, arguments.cols as usize]);
        if !cover.vector {
            return Ok(None);
        }
        let is_given = self.is_given();
        let of = number(self.source);
        let defines = self.defines(of, if is_given { GIVEN } else { FUSED });
        let before = match self.is_clear(&arguments) {
            true => None,
            false => {
                let clear = gpu.function(&SOURCE, &defines, "quantize_clear")?;
                // SAFETY: the kernel takes one `Arguments`, and has a thread for every scale.
                Some(unsafe { Work::launch(clear, clearing(&arguments), arguments) })
            }
        };
        let launch = cover.launch(high(of));
        let after = match is_given {
            // A scale of 0 is replaced by that of the amax reduced meanwhile.
            true => {
                let name = format!("quantize_{}_{}", cover.path, suffix(operands.inputs[0].ty));
                let function = gpu.function(&SOURCE, &self.defines(of, CAST), &name)?;
                // SAFETY: as for a cast on its own.
                Some(unsafe { Work::launch(function, launch, arguments) })
            }
            false => None,
        };
        Ok(Some(FusedCast { arguments, defines, path: cover.path, launch, before, after }))
    }

    /// True if a separate launch saves gate and up: their halves are no multiples of tiles.
    fn saves_apart(&self, inputs: &[TensorType]) -> bool {
        self.source == CastSource::SwigluSaving && !self.source.extents(inputs).1.is_multiple_of(TILE)
    }
}

/// The workspace of [`saving`].
pub(crate) fn saving_workspace(gate_up: &[TensorType]) -> Vec<TensorType> {
    let mut types = SAVE.workspace(&gate_up[..1]);
    types.push(TensorType::new(DType::F32, [1]));
    types
}

/// Saves gate and up in these numbers and scales.
pub(crate) fn saving(
    gpu: &Gpu,
    gate_up: CudaTensor,
    copy: &[CudaOutput],
    workspace: &[CudaTensor],
) -> Result<Work, CudaError> {
    // Nothing reads its amax.
    let amax = CudaOutput { ty: workspace[1].ty, place: workspace[1].place, accumulate: false };
    let outputs = [copy[0], copy[1], amax];
    SAVE.prepare(gpu, &Operands { inputs: &[gate_up], outputs: &outputs, workspace: &workspace[..1] })
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
    down: u32,
    across: u32,
    format: u32,
}

impl CudaKernel for Dequantize {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (q, scales, x) = (operands.inputs[0], operands.inputs[1], operands.outputs[0]);
        let (rows, cols) = q.ty.shape.rows_cols();
        let ((high, wide), (down, across)) =
            (self.scaling.region(rows, cols), self.scaling.steps(rows, cols));
        let arguments = Back {
            q: q.place,
            inv_scale: scales.into(),
            x: x.place,
            rows: rows as u32,
            cols: cols as u32,
            high: high as u32,
            wide: wide as u32,
            down: down as u32,
            across: across as u32,
            format: format(q.ty.dtype) as u32,
        };
        let (path, n) = if cols.is_multiple_of(WIDTH) { ("vector", WIDTH) } else { ("any", 1) };
        let function = gpu.function(&DEQUANTIZE, &[], &format!("dequantize_{path}_{}", suffix(x.ty)))?;
        let threads = warps_of(cols.div_ceil(n), ELEMENTWISE_THREADS as usize);
        let launch = plane([rows, cols.div_ceil(n * threads as usize)], [threads, 1]);
        // SAFETY: the kernel takes one `Back`. q is [rows, cols] in the format and x of the type that the
        // name says, in rows of eights where the path is that; there is a scale for each region.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
