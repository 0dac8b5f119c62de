//! The GPU kernels of [`Quantize`] and [`Dequantize`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::variants::{CONSTANTS, FORMAT_NUMBERS, Phase, WIDTH, format_number, own_variants};
use super::{Amaxes, CastSource, Dequantize, Given, Quantize, SAVE};
use crate::device::{ELEMENTWISE_THREADS, Floats, plane, suffix, warps_of};
use crate::tail::{TAIL, end_of_groups};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaOutput, CudaTensor, Defines, DevicePtr, Gpu, Header, KernelSource, Launch,
    Operands, Work, kernel_struct,
};
use xtrain_tensor::formats::max_finite;
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// Device code of scales that are powers of two; before [`PIECE`].
pub(crate) const SCALES: Header = Header::new("quantize/scales.cuh", include_str!("scales.cuh"));
/// Device code that casts an area that a block holds in registers.
pub(crate) const PIECE: Header =
    Header::new("quantize/piece.cuh", include_str!("piece.cuh")).with_constants(CONSTANTS);
pub(crate) const AREA: Header = Header::new("quantize/area.cuh", include_str!("area.cuh"));
const COMPUTED: Header = Header::new("quantize/source.cuh", include_str!("source.cuh"));

pub(super) const SOURCE: KernelSource = KernelSource {
    headers: &[crate::swiglu::GATE, SCALES, TAIL, PIECE, COMPUTED, AREA],
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
        /// Or the indices of a gather.
        gate_up: DevicePtr,
        gate_up_scale: DevicePtr,
        /// Or copies of a token.
        gate_up_rows: u64,
        /// Or the gradient of the weights of rows.
        saved: DevicePtr,
        /// Or parts of that gradient.
        saved_scale: DevicePtr,
        of_rows: Floats,
        w: Floats,
        given_scale: DevicePtr,
        given_amax: DevicePtr,
        amax: DevicePtr,
        /// The end of groups of rows, or the sources of rows.
        end: DevicePtr,
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
    /// The amaxes of the regions of each written layout, if an earlier launch than the cast reduces them; and
    /// the workspace of a separate save, or the sums over the columns of areas for the gradient of the
    /// weights of rows.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (rows, cols) = self.source.extents(inputs);
        let reduces = self.reduces_amaxes([rows, cols]);
        let layouts = self.layouts.written().into_iter().zip([[rows, cols], [cols, rows]]);
        let amaxes = |[rows, cols]: [usize; 2]| TensorType::new(DType::U32, self.scaling.shape(rows, cols));
        let own =
            layouts.filter(|(is_written, _)| *is_written && reduces).map(|(_, extents)| amaxes(extents));
        let further = match self.source {
            _ if self.saves_apart(inputs) => saving_workspace(),
            source if source.has_dweights() => {
                vec![TensorType::new(DType::F32, [(cols / 2).div_ceil(TILE), rows])]
            }
            _ => Vec::new(),
        };
        own.chain(further).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        self.prepare_until(gpu, operands, self.end_of_groups(operands))
    }
}

impl Quantize {
    /// The place of the end of groups of rows, or of the sources of rows, if tails are undefined; null
    /// otherwise.
    fn end_of_groups(self, operands: &Operands<'_>) -> DevicePtr {
        let sources = operands.inputs.get(1).filter(|_| self.source == CastSource::Permute);
        match (sources, self.source.weights()) {
            (Some(sources), _) if self.tail.is_undefined() => sources.place,
            (_, starts) => end_of_groups(self.tail, starts.map(|weights| &operands.inputs[weights + 1])),
        }
    }

    /// As `prepare`, with this place of the end of groups.
    fn prepare_until(self, gpu: &Gpu, operands: &Operands<'_>, end: DevicePtr) -> Result<Work, CudaError> {
        let types: Vec<TensorType> = operands.inputs.iter().map(|t| t.ty).collect();
        if self.saves_apart(&types) {
            let (outputs, copy) = operands.outputs.split_at(operands.outputs.len() - 2);
            let (workspace, of_saving) = operands.workspace.split_at(operands.workspace.len() - 1);
            let weighted = self.source.is_weighted();
            let end = self.end_of_groups(operands);
            let save = saving(gpu, operands.inputs[0], copy, of_saving, end)?;
            let cast = Quantize { source: CastSource::Swiglu { restored: false, weighted }, ..self };
            let cast = cast.prepare(gpu, &Operands { inputs: operands.inputs, outputs, workspace })?;
            return Ok(Work::sequence(vec![save, cast]));
        }
        let (rows, cols) = self.source.extents(&types);
        let dtype = suffix(types[0].with_dtype(self.source.dtype(&types)));
        let arguments = QuantizeArguments { end, ..self.arguments(operands) };
        let packed_pairs = self.has_packed_pairs([rows, cols]);
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
            let arguments = self.in_phase(phase, arguments, operands);
            let (path, launch) = self.launch(phase, [arguments.rows as usize, cols]);
            let gathers = self.source == CastSource::Permute && !self.measures_tokens(phase);
            let launch = if gathers { in_bands(launch, gpu.info().l2_bytes, types[0]) } else { launch };
            steps.push((function(phase, &format!("quantize_{path}_{dtype}"))?, launch, arguments));
        }
        if self.source.has_dweights() {
            let launch = Launch::row(rows.div_ceil(MEASURING_THREADS) as u32, MEASURING_THREADS as u32);
            steps.push((function(phases[phases.len() - 1], "quantize_dweights")?, launch, arguments));
        }
        if packed_pairs {
            let phase = if self.is_given() { Phase::CastGiven } else { Phase::Measure };
            let blocks = (rows * cols).div_ceil(2).div_ceil(MEASURING_THREADS);
            let launch = Launch::row(blocks as u32, MEASURING_THREADS as u32);
            steps.push((function(phase, &format!("quantize_pair_{dtype}"))?, launch, arguments));
        }
        // SAFETY: the kernels take one `QuantizeArguments`. The value to cast is [rows, cols], and its inputs
        // have the sizes that `CastSource` gives and the type in the kernel's name; each written layout has
        // its own extents, in the format, with its scales and a word for each of them; a saved copy is as
        // large as gate and up, with a scale for each tile, and each row has a sum for each area of dgate.
        // Indices of a gather come from `dispatch`: they are -1 or within the tensors. The areas cover the
        // matrix, so do the blocks that reduce the amax, which loop over further rows, and the other launches
        // cover every scale, row or pair of elements.
        let work = |(function, launch, arguments)| unsafe { Work::launch(function, launch, arguments) };
        // SAFETY: likewise.
        let clear = clear.map(|clear| unsafe { Work::launch(clear, arguments.clear_launch(), cleared) });
        Ok(Work::sequence(clear.into_iter().chain(steps.into_iter().map(work)).collect()))
    }
}

/// The launch of areas whose rows are gathered from `x`, by bands of columns: the x axis of the grid is the
/// areas across a band, the y axis the areas down, the z axis the bands. Experts read a token one after the
/// other, and meanwhile about as many bytes are written, so the columns of a band take a quarter of the L2
/// cache.
fn in_bands(launch: Launch, l2_bytes: usize, x: TensorType) -> Launch {
    let [across, down, _] = launch.grid;
    let column_bytes = x.dtype.bytes(x.shape[0] * TILE).max(1);
    let bands = across.div_ceil((l2_bytes / 4 / column_bytes).clamp(1, across as usize) as u32);
    Launch { grid: [across.div_ceil(bands), down, bands], ..launch }
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
            of_rows: Floats::none(),
            w: Floats::none(),
            given_scale: none,
            given_amax: none,
            amax: operands.workspace.first().map_or(amaxes.place, |word| word.place),
            end: none,
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
    /// True if a phase reduces the amax of gathered rows over the tokens that have one, so that each token is
    /// read once.
    fn measures_tokens(self, phase: Phase) -> bool {
        self.source == CastSource::Permute && self.scaling == Scaling::Tensor && phase.measures()
    }

    /// The arguments of a phase. If it measures tokens, these are its rows.
    fn in_phase(
        self,
        phase: Phase,
        arguments: QuantizeArguments,
        operands: &Operands<'_>,
    ) -> QuantizeArguments {
        if !self.measures_tokens(phase) {
            return arguments;
        }
        let rows = operands.inputs[2];
        QuantizeArguments { gate_up: rows.place, rows: rows.ty.shape[0] as u32, ..arguments }
    }

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
        let by_row = self.given == Given::Amax && self.scaling == Scaling::Row;
        let reduces = self.reduces_amaxes([rows, cols]);
        let (mut pairs, mut own) = (operands.outputs.chunks_exact(2), operands.workspace.iter());
        let [row_major, transposed] = self.layouts.written().map(|is_written| {
            let pair = if is_written { pairs.next() } else { None };
            let Some(pair) = pair else { return CastLayout::default() };
            let amaxes = own.next().filter(|_| reduces).map_or(none, |amaxes| amaxes.place);
            let (rows, cols) = pair[0].ty.shape.rows_cols();
            let (down, across) = self.scaling.steps(rows, cols);
            CastLayout {
                q: pair[0].place,
                inv_scale: pair[1].place,
                amaxes: if by_row { given_place(self.given.amax()) } else { amaxes },
                rows: rows as u32,
                cols: cols as u32,
                down: down as u32,
                across: across as u32,
                scales: pair[1].ty.numel() as u32,
                padding: 0,
            }
        });
        let amax = operands.outputs[self.amax()];
        let further = |n: usize| operands.outputs.get(self.amax() + n).map_or(none, |t| t.place);
        let of_areas = operands.workspace.last().filter(|_| self.source.has_dweights());
        let (gate_up, gate_up_rows) = match self.source {
            CastSource::SwigluGrad { .. } => (inputs[1].place, rows),
            CastSource::Permute => (inputs[1].place, inputs[2].ty.shape[1]),
            _ => (none, rows),
        };
        let [of_rows, w] = match self.source {
            CastSource::Norm => [inputs[1].into(), inputs[2].into()],
            source => [source.weights().map_or(Floats::none(), |n| inputs[n].into()), Floats::none()],
        };
        QuantizeArguments {
            x: inputs[0].place,
            gate_up,
            gate_up_scale: self.source.restored().map_or(none, |q| inputs[q + 1].place),
            gate_up_rows: gate_up_rows as u64,
            saved: further(1),
            saved_scale: of_areas.map_or(further(2), |sums| sums.place),
            of_rows,
            w,
            given_scale: given_place(self.given.scale()),
            given_amax: given_place(self.given.amax().filter(|_| !by_row)),
            amax: amax.place,
            end: none,
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

    /// True if two elements of a packed format, perhaps of two rows, share a byte.
    fn has_packed_pairs(self, extents: [usize; 2]) -> bool {
        self.format == DType::E5M6 && !self.cover(extents).vector
    }

    /// True if another launch than that of the cast reduces amaxes of regions.
    fn reduces_amaxes(self, extents: [usize; 2]) -> bool {
        self.phases(self.has_packed_pairs(extents)) != [Phase::Fused]
    }

    /// True if a separate launch saves gate and up: their halves are no multiples of tiles.
    fn saves_apart(&self, inputs: &[TensorType]) -> bool {
        let saves = matches!(self.source, CastSource::SwigluSaving { .. });
        saves && !self.source.extents(inputs).1.is_multiple_of(TILE)
    }
}

/// The workspace of [`saving`]: an amax that nothing reads.
pub(crate) fn saving_workspace() -> Vec<TensorType> {
    vec![TensorType::new(DType::F32, [1])]
}

/// Work that saves gate and up in FP8: `copy` is the numbers and the scales. `end` is the place of the end of
/// groups of rows if their tail is left undefined, else null.
pub(crate) fn saving(
    gpu: &Gpu,
    gate_up: CudaTensor,
    copy: &[CudaOutput],
    workspace: &[CudaTensor],
    end: DevicePtr,
) -> Result<Work, CudaError> {
    let amax = CudaOutput { ty: workspace[0].ty, place: workspace[0].place, accumulate: false };
    let outputs = [copy[0], copy[1], amax];
    SAVE.prepare_until(gpu, &Operands { inputs: &[gate_up], outputs: &outputs, workspace: &[] }, end)
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
