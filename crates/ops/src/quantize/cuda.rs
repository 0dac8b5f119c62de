//! The GPU kernels of [`Quantize`] and [`Dequantize`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::variants::{CONSTANTS, FORMAT_NUMBERS, Phase, WIDTH, format_number, own_variants};
use super::{Amaxes, CastSource, Dequantize, Given, Quantize, SAVE};
use crate::device::{ELEMENTWISE_THREADS, Floats, plane, suffix, warps_of};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, Defines, DevicePtr, Gpu, Header, KernelSource, Launch,
    Operands, Work, kernel_struct,
};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// Device code that casts an area that a block holds in registers.
pub(crate) const PIECE: Header =
    Header::new("quantize/piece.cuh", include_str!("piece.cuh")).with_constants(CONSTANTS);
pub(crate) const AREA: Header = Header::new("quantize/area.cuh", include_str!("area.cuh"));
const COMPUTED: Header = Header::new("quantize/source.cuh", include_str!("source.cuh"));

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[crate::swiglu::GATE, PIECE, COMPUTED, AREA],
    structs: &[QuantizeArguments::LAYOUT],
    variants: own_variants,
    ..KernelSource::new("quantize/kernel.cu", include_str!("kernel.cu"))
};

pub(crate) const DEQUANTIZE: KernelSource = KernelSource {
    constants: &[FORMAT_NUMBERS],
    structs: &[DequantizeArguments::LAYOUT],
    ..KernelSource::new("quantize/dequantize.cu", include_str!("dequantize.cu"))
};

/// The most threads of a block that reduces an amax, and its fewest rows.
const MEASURING_THREADS: usize = 256;
const MEASURING_ROWS: usize = 2;
/// Rows of blocks that reduce an amax that is seldom needed.
const FEW_BLOCKS: usize = 128;

kernel_struct! {
    /// One layout of the result; all zeros if it is not written.
    #[derive(Default)]
    struct CastLayout {
        q: DevicePtr,
        inv_scale: DevicePtr,
        amaxes: DevicePtr,
        rows: u32,
        cols: u32,
        down: u32,
        across: u32,
        scales: u32,
        padding: u32,
    }

    pub(crate) struct QuantizeArguments {
        x: DevicePtr,
        gate_up: DevicePtr,
        gate_up_scale: DevicePtr,
        gate_up_rows: u64,
        saved: DevicePtr,
        saved_scale: DevicePtr,
        rstd: Floats,
        w: Floats,
        given_scale: DevicePtr,
        given_amax: DevicePtr,
        amax: DevicePtr,
        row_major: CastLayout,
        transposed: CastLayout,
        rows: u32,
        cols: u32,
        accumulate: u32,
        max_finite: f32,
        areas_across: u32,
        areas_down: u32,
    }

    struct DequantizeArguments {
        q: DevicePtr,
        inv_scale: Floats,
        x: DevicePtr,
        rows: u32,
        cols: u32,
        region_rows: u32,
        region_cols: u32,
        down: u32,
        across: u32,
        format: u32,
    }
}

impl QuantizeArguments {
    fn layouts(&self) -> [CastLayout; 2] {
        [self.row_major, self.transposed]
    }

    /// The arguments of the kernel that clears scales and amaxes, if amaxes are given.
    fn without_amaxes(self) -> Self {
        let without = |layout| CastLayout { amaxes: DevicePtr(0), ..layout };
        let [row_major, transposed] = self.layouts().map(without);
        QuantizeArguments { row_major, transposed, ..self }
    }

    /// A launch with a thread for every scale.
    fn clear_launch(&self) -> Launch {
        let scales = self.layouts().map(|layout| layout.scales as usize).into_iter().max();
        let blocks = scales.unwrap_or(0).max(1).div_ceil(MEASURING_THREADS);
        Launch::row(blocks as u32, MEASURING_THREADS as u32)
    }
}

impl CudaKernel for Quantize {
    /// The amaxes of the regions of each written layout, and the workspace of a separate save.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (rows, cols) = self.source.extents(inputs);
        let layouts = self.layouts.written().into_iter().zip([[rows, cols], [cols, rows]]);
        let amaxes = |[rows, cols]: [usize; 2]| TensorType::new(DType::U32, self.scaling.shape(rows, cols));
        let own = layouts.filter(|(is_written, _)| *is_written).map(|(_, extents)| amaxes(extents));
        let for_saving = if self.saves_apart(inputs) { saving_workspace(inputs) } else { Vec::new() };
        own.chain(for_saving).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        if self.saves_apart(&types) {
            let (outputs, copy) = operands.outputs.split_at(operands.outputs.len() - 2);
            let (workspace, saving_workspace) = operands.workspace.split_at(operands.workspace.len() - 2);
            let save = saving(gpu, operands.inputs[0], copy, saving_workspace)?;
            let cast = Quantize { source: CastSource::Swiglu { restored: false }, ..*self };
            let cast = cast.prepare(gpu, &Operands { inputs: operands.inputs, outputs, workspace })?;
            return Ok(Work::sequence(vec![save, cast]));
        }
        let (rows, cols) = self.source.extents(&types);
        let dtype = suffix(types[0].with_dtype(self.source.dtype(&types)));
        let arguments = self.arguments(operands);
        let cover = self.cover([rows, cols]);
        let packed_pairs = self.format == DType::E5M6 && !cover.vector;
        let phases = self.phases(packed_pairs);
        let function = |phase, name: &str| gpu.function(&SOURCE, &self.defines(phase), name);
        let mut steps = Vec::new();
        // No block raises a given amax.
        let (needs_clear, cleared) = match (self.given, self.scaling) {
            (Given::Amax, scaling) => (scaling == Scaling::Row, arguments.without_amaxes()),
            _ => (packed_pairs || !self.is_clear(&arguments), arguments),
        };
        let clear = needs_clear.then(|| function(phases[0], "quantize_clear")).transpose()?;
        for &phase in phases {
            let (path, launch) = self.launch(phase, [rows, cols]);
            steps.push((function(phase, &format!("quantize_{path}_{dtype}"))?, launch));
        }
        if packed_pairs {
            let phase = if self.is_given() { Phase::CastGiven } else { Phase::Measure };
            let blocks = (rows * cols).div_ceil(2).div_ceil(MEASURING_THREADS);
            let launch = Launch::row(blocks as u32, MEASURING_THREADS as u32);
            steps.push((function(phase, &format!("quantize_pair_{dtype}"))?, launch));
        }
        // SAFETY: the kernels take one `QuantizeArguments`. The value to cast is [rows, cols], and its inputs
        // have the sizes that `CastSource` gives and the type in the kernel's name; each written layout has
        // its own extents, in the format, with its scales and a word for each of them; a saved copy is as
        // large as gate and up, with a scale for each tile. The areas cover the matrix, so do the blocks that
        // reduce the amax, which loop over further rows, and the other launches cover every scale or pair of
        // elements.
        let work = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        // SAFETY: likewise.
        let clear = clear.map(|clear| unsafe { Work::launch(clear, arguments.clear_launch(), cleared) });
        Ok(Work::sequence(clear.into_iter().chain(steps.into_iter().map(work)).collect()))
    }
}

/// The cast in a kernel that computes a tensor by areas: its arguments, macros and launches.
pub(crate) struct FusedCast {
    pub(crate) arguments: QuantizeArguments,
    pub(crate) defines: Defines,
    /// `whole` if the matrix consists of whole areas, `vector` if rows are multiples of 8.
    pub(crate) path: &'static str,
    /// One block for each area.
    pub(crate) launch: Launch,
    /// Launches before and after it.
    pub(crate) before: Option<Work>,
    pub(crate) after: Option<Work>,
}

/// The grid of areas over the value to cast.
struct Cover {
    /// The path in the kernels' names.
    path: &'static str,
    /// True if rows are multiples of 8.
    vector: bool,
    /// Columns of the value, or of one of its halves.
    cols: usize,
    /// Blocks in a row, and in a column.
    across: usize,
    down: usize,
}

impl Cover {
    /// One block for each area.
    fn launch(&self, source: CastSource) -> Launch {
        plane([self.across, self.down], [source.threads(), 1])
    }
}

impl CudaKernel for Amaxes {
    /// With an amax for each column, a word for that of the matrix, which the kernel reduces too.
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        if self.by_column { vec![TensorType::new(DType::U32, [1])] } else { Vec::new() }
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (x, amaxes, none) = (operands.inputs[0], operands.outputs[0], DevicePtr(0));
        let (rows, cols) = x.ty.shape.rows_cols();
        let cast = self.cast();
        let cover = cast.cover([rows, cols]);
        let (down, across) = cast.scaling.steps(cols, rows);
        let transposed = CastLayout {
            // It is cleared like the amaxes, and not written otherwise.
            inv_scale: amaxes.place,
            amaxes: amaxes.place,
            rows: cols as u32,
            cols: rows as u32,
            down: down as u32,
            across: across as u32,
            scales: amaxes.ty.numel() as u32,
            ..CastLayout::default()
        };
        let arguments = QuantizeArguments {
            x: x.place,
            gate_up: none,
            gate_up_scale: none,
            gate_up_rows: rows as u64,
            saved: none,
            saved_scale: none,
            rstd: Floats::none(),
            w: Floats::none(),
            given_scale: none,
            given_amax: none,
            amax: operands.workspace.first().map_or(amaxes.place, |word| word.place),
            row_major: CastLayout::default(),
            transposed,
            rows: rows as u32,
            cols: cols as u32,
            accumulate: 0,
            max_finite: max_finite(cast.format),
            areas_across: cover.across as u32,
            areas_down: cover.down as u32,
        };
        let function = |name: &str| gpu.function(&SOURCE, &cast.defines(Phase::Measure), name);
        let (path, launch) = cast.launch(Phase::Measure, [rows, cols]);
        let measure = function(&format!("quantize_{path}_{}", suffix(x.ty)))?;
        let steps = [(function("quantize_clear")?, arguments.clear_launch()), (measure, launch)];
        // SAFETY: the kernels take one `QuantizeArguments`. x is [rows, cols] of the type in the kernel's
        // name, and there is a word for each amax. The areas, or the blocks that reduce the amax, cover the
        // matrix, and a thread clears each amax.
        let work = |(function, launch)| unsafe { Work::launch(function, launch, arguments) };
        Ok(Work::sequence(steps.into_iter().map(work).collect()))
    }
}

impl Quantize {
    /// The path in the kernel's name, and the grid, of a phase for a value of these extents.
    fn launch(self, phase: Phase, [rows, cols]: [usize; 2]) -> (&'static str, Launch) {
        let cover = self.cover([rows, cols]);
        if self.scaling != Scaling::Tensor || !phase.measures() {
            return (cover.path, cover.launch(self.source_in(phase)));
        }
        let (path, across) = if cover.vector { ("vector", cover.cols / WIDTH) } else { ("any", cols) };
        let threads = warps_of(across, MEASURING_THREADS);
        let most = if phase == Phase::MeasureUnset { FEW_BLOCKS } else { u16::MAX.into() };
        let down = rows.div_ceil(MEASURING_ROWS).min(most);
        (path, plane([across.div_ceil(threads as usize), down], [threads, 1]))
    }

    fn cover(self, [rows, cols]: [usize; 2]) -> Cover {
        let is_halved = matches!(self.source, CastSource::SwigluGrad { .. });
        let half = if is_halved { cols / 2 } else { cols };
        let vector = half.is_multiple_of(WIDTH);
        let (path, across) = match (vector, half.is_multiple_of(TILE) && rows.is_multiple_of(TILE)) {
            // A block casts an area of each half.
            (_, true) => ("whole", half / TILE),
            (true, _) => ("vector", cols.div_ceil(TILE)),
            (false, _) => ("any", cols.div_ceil(TILE)),
        };
        Cover { path, vector, cols: half, across, down: rows.div_ceil(TILE) }
    }

    /// True if nothing needs clearing before areas are cast: by tiles or blocks, without scales that belong
    /// to no region (cuBLASLt pads rows of blocks to fours), and with an amax that accumulates.
    fn is_clear(self, arguments: &QuantizeArguments) -> bool {
        let has_padding = arguments.layouts().iter().any(|layout| {
            let (rows, cols) = (layout.rows as usize, layout.cols as usize);
            let (region_rows, region_cols) = self.scaling.region(rows, cols);
            let regions = rows.div_ceil(region_rows.max(1)) * cols.div_ceil(region_cols.max(1));
            regions != layout.scales as usize
        });
        self.is_within_areas() && arguments.accumulate != 0 && !has_padding
    }

    fn arguments(self, operands: &Operands<'_>) -> QuantizeArguments {
        let none = DevicePtr(0);
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        let (inputs, given) = operands.inputs.split_at(self.source.inputs());
        let (rows, cols) = self.source.extents(&types);
        let cover = self.cover([rows, cols]);
        let given_place = |n: Option<usize>| n.map_or(none, |n| given[n].place);
        let of_rows = self.given == Given::Amax && self.scaling == Scaling::Row;
        let mut pairs = operands.outputs.chunks_exact(2).zip(operands.workspace);
        let [row_major, transposed] = self.layouts.written().map(|is_written| {
            let pair = if is_written { pairs.next() } else { None };
            let Some((pair, amaxes)) = pair else { return CastLayout::default() };
            let (rows, cols) = pair[0].ty.shape.rows_cols();
            let (down, across) = self.scaling.steps(rows, cols);
            CastLayout {
                q: pair[0].place,
                inv_scale: pair[1].place,
                amaxes: if of_rows { given_place(self.given.amax()) } else { amaxes.place },
                rows: rows as u32,
                cols: cols as u32,
                down: down as u32,
                across: across as u32,
                scales: pair[1].ty.numel() as u32,
                padding: 0,
            }
        });
        let amax = operands.outputs[self.amax()];
        let saved = |n: usize| operands.outputs.get(self.amax() + n).map_or(none, |t| t.place);
        let gate_up = match self.source {
            CastSource::SwigluGrad { .. } => inputs[1].place,
            _ => none,
        };
        let [rstd, w] = match self.source {
            CastSource::Norm => [inputs[1].into(), inputs[2].into()],
            _ => [Floats::none(); 2],
        };
        QuantizeArguments {
            x: inputs[0].place,
            gate_up,
            gate_up_scale: self.source.restored().map_or(none, |q| inputs[q + 1].place),
            gate_up_rows: rows as u64,
            saved: saved(1),
            saved_scale: saved(2),
            rstd,
            w,
            given_scale: given_place(self.given.scale()),
            given_amax: given_place(self.given.amax().filter(|_| !of_rows)),
            amax: amax.place,
            row_major,
            transposed,
            rows: rows as u32,
            cols: cols as u32,
            accumulate: amax.accumulate.into(),
            max_finite: max_finite(self.format),
            areas_across: cover.across as u32,
            areas_down: cover.down as u32,
        }
    }

    /// The cast for a kernel that computes a tensor by areas, if the cast is local; `operands` are those of
    /// the cast. None if rows are no multiples of 8.
    pub(crate) fn fused(self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Option<FusedCast>, CudaError> {
        let arguments = self.arguments(operands);
        let cover = self.cover([arguments.rows as usize, arguments.cols as usize]);
        if !cover.vector {
            return Ok(None);
        }
        let defines = self.defines(self.fused_phase());
        let before = match self.is_clear(&arguments) {
            true => None,
            false => {
                let clear = gpu.function(&SOURCE, &defines, "quantize_clear")?;
                // SAFETY: the kernel takes one `QuantizeArguments`, and has a thread for every scale.
                Some(unsafe { Work::launch(clear, arguments.clear_launch(), arguments) })
            }
        };
        let launch = cover.launch(self.source);
        let after = match self.is_given() {
            // If the given scale is 0, it casts by the amax that the fused kernel has reduced.
            true => {
                let name = format!("quantize_{}_{}", cover.path, suffix(operands.inputs[0].ty));
                let function = gpu.function(&SOURCE, &self.defines(Phase::Cast), &name)?;
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

/// Work that saves gate and up in FP8: `copy` is the numbers and the scales.
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

impl CudaKernel for Dequantize {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (q, scales, x) = (operands.inputs[0], operands.inputs[1], operands.outputs[0]);
        let (rows, cols) = q.ty.shape.rows_cols();
        let (region_rows, region_cols) = self.scaling.region(rows, cols);
        let (down, across) = self.scaling.steps(rows, cols);
        let arguments = DequantizeArguments {
            q: q.place,
            inv_scale: scales.into(),
            x: x.place,
            rows: rows as u32,
            cols: cols as u32,
            region_rows: region_rows as u32,
            region_cols: region_cols as u32,
            down: down as u32,
            across: across as u32,
            format: format_number(q.ty.dtype) as u32,
        };
        let (path, n) = if cols.is_multiple_of(WIDTH) { ("vector", WIDTH) } else { ("any", 1) };
        let function = gpu.function(&DEQUANTIZE, &[], &format!("dequantize_{path}_{}", suffix(x.ty)))?;
        let threads = warps_of(cols.div_ceil(n), ELEMENTWISE_THREADS as usize);
        let launch = plane([rows, cols.div_ceil(n * threads as usize)], [threads, 1]);
        // SAFETY: the kernel takes one `DequantizeArguments`. q is [rows, cols] in the format and x of the
        // type that the name says, in rows of eights where the path is that; there is a scale for each
        // region.
        Ok(unsafe { Work::launch(function, launch, arguments) })
    }
}
