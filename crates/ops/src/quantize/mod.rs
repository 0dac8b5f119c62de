//! Casts to and from the formats that need a scale: the operands of FP8 GEMMs, and DeepSeek-V3's E5M6 for a
//! saved activation.
//!
//! The elements of a region ([`Scaling`]) share `scale = max_finite(format) / amax`, at most the largest
//! finite f32. The scale multiplies before the cast; its reciprocal is an output. An amax of 0 gives scale 1.
//! So does an amax that is infinite or NaN, and the cast emits it unchanged, so that the step can be marked
//! as not finite: the cast itself saturates and would hide an infinity.
//!
//! FP8 GEMMs sum along rows in memory, in both operands. A tensor that is one GEMM's operand row-major is
//! another's transposed, with scales of its own; one pass over the tensor writes either layout or both.
//!
//! E5M6 has a scale like the FP8 formats: DeepSeek-V3 (arXiv 2412.19437, section 3.3.3) saves that activation
//! with tile scales of powers of two, and one rule is simpler than two. Its 5 exponent bits cover 30 powers
//! of two below a region's amax. A scale that is a power of two changes no bit of a mantissa.
//!
//! The GPU kernels are compiled for a source, a format, a scaling, a phase and the layouts (`variants`).

mod amaxes;
mod cpu;
pub(crate) mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
mod source;
#[cfg(test)]
mod tests;
pub(crate) mod variants;

pub use amaxes::Amaxes;
pub(crate) use cpu::{Matrix, dequantized, save};
pub(crate) use cuda::{DEQUANTIZE, saving, saving_workspace};
pub use source::{CastSource, Given};

use crate::matrix;
use crate::on_gpu::OnGpu;
use crate::tail;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{
    Arithmetic, Cost, KernelCost, Op, OpError, Operand, Quantization, RaggedOp, Rebuild, Source, Tail,
};
use xtrain_tensor::{DType, Scaling, TILE, TensorType};

/// `(x [R, C] (, scale f32[1, 1]) (, amax f32[1] or f32[n])) -> (q [R, C], inv_scale) row-major, (q [C, R],
/// inv_scale) transposed, amax f32[1]`. [`Layouts`] says which of the pairs there are, [`Given`] which of the
/// further inputs; scales are f32 of the shape [`Scaling::shape`].
///
/// q is x * scale in f32, rounded to nearest even and saturated to the largest finite value; NaN stays NaN.
/// amax is the magnitude of x with the largest bits, a NaN if there is one; it accumulates as a maximum. A
/// given scale applies to the whole tensor, whatever its amax; a scale of 0 means "not set", and the amax
/// gives the scale. If the amax of the tensor is given alone, it is the output too; if those of rows are, the
/// output is 0. With another [`CastSource`] than `Input` the op casts a value that it computes itself:
/// that value's inputs take the place of x, and further outputs come after amax.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize {
    /// The value to cast.
    pub source: CastSource,
    /// E4M3 or E5M2; E5M6 (packed) row-major only.
    pub format: DType,
    /// The elements that share a scale.
    pub scaling: Scaling,
    /// True if scales are rounded down to a power of two, so that scaling adds no rounding error.
    pub pow2_scales: bool,
    /// The layouts of the result.
    pub layouts: Layouts,
    /// Scales or amaxes that are inputs.
    pub given: Given,
    /// The tails of all ragged outputs, if the source is of rows by experts.
    pub tail: Tail,
}

impl Quantize {
    /// The cast of a tensor.
    pub const fn new(format: DType, scaling: Scaling, pow2_scales: bool, layouts: Layouts) -> Self {
        let (source, given, tail) = (CastSource::Input, Given::Nothing, Tail::Zeros);
        Quantize { source, format, scaling, pow2_scales, layouts, given, tail }
    }

    /// The cast of an operand, in the layouts that GEMMs need: row-major, transposed.
    pub fn of_operand(quantization: Quantization, layouts: [bool; 2]) -> Self {
        let Quantization { format, scaling, pow2_scales, delayed } = quantization;
        let layouts = match layouts {
            [_, false] => Layouts::RowMajor,
            [false, true] => Layouts::Transposed,
            [true, true] => Layouts::Both,
        };
        let given = if delayed { Given::Scale } else { Given::Nothing };
        Quantize { given, ..Quantize::new(format, scaling, pow2_scales, layouts) }
    }
}

/// The cast that saves gate and up for the backward.
pub(crate) const SAVE: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);

/// The layouts of a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layouts {
    /// The tensor's own.
    RowMajor,
    /// Its transpose.
    Transposed,
    /// Both, in this order.
    Both,
}

impl Layouts {
    /// For each layout (row-major, transposed), true if it is written.
    pub fn written(self) -> [bool; 2] {
        match self {
            Layouts::RowMajor => [true, false],
            Layouts::Transposed => [false, true],
            Layouts::Both => [true, true],
        }
    }
}

/// `(q [R, C], inv_scale) -> x' [R, C]`: q * inv_scale in f32, rounded once into `out`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dequantize {
    /// F32 or BF16.
    pub out: DType,
    /// The elements that share a scale.
    pub scaling: Scaling,
}

/// The types of the numbers and scales that [`SAVE`] writes for gate and up.
pub(crate) fn saved_types(gate_up: TensorType) -> [TensorType; 2] {
    let (rows, cols) = gate_up.shape.rows_cols();
    [gate_up.with_dtype(DType::E4M3), TensorType::new(DType::F32, Scaling::Tile.shape(rows, cols))]
}

impl Quantize {
    /// True if it casts each row of a tensor to E4M3 with powers of two for tiles, or to FP8 with a given
    /// scale: if rows can be cast before they are permuted ([`crate::retile::Retile`]).
    pub(crate) fn is_of_tokens(self) -> bool {
        let is_fp8 = matches!(self.format, DType::E4M3 | DType::E5M2);
        let is_by_token = match (self.scaling, self.given) {
            (Scaling::Tile, Given::Nothing) => self.format == DType::E4M3 && self.pow2_scales,
            (Scaling::Tensor, Given::Scale) => is_fp8,
            _ => false,
        };
        self.source == CastSource::Input && is_by_token
    }

    /// True if it can leave tails undefined: it casts rows by experts, by tiles or with one scale.
    fn has_tail(&self) -> bool {
        let is_ragged = self.source == CastSource::Permute || self.source.is_weighted();
        is_ragged && matches!(self.scaling, Scaling::Tile | Scaling::Tensor)
    }

    /// The axis along which an output is ragged, and the rows of the ragged tensor for each index of that
    /// axis; None if it is not ragged.
    fn ragged_axis(&self, output: usize) -> Option<(usize, usize)> {
        let (is_scales, transposed) = (output % 2 == 1, !self.layouts.written()[0] || output > 1);
        if output > self.amax() {
            // The gradient of weights, or numbers and scales of the saved copy.
            return Some((output - self.amax() - 1, 1));
        }
        match (is_scales, transposed) {
            _ if output == self.amax() => None,
            (true, _) if self.scaling == Scaling::Tensor => None,
            (true, true) => Some((0, TILE)),
            (false, false) => Some((0, 1)),
            (true, false) | (false, true) => Some((1, 1)),
        }
    }

    /// Checks the inputs after those of the source.
    fn check_given(&self, given: &[TensorType], [rows, cols]: [usize; 2]) -> Result<(), OpError> {
        let of_rows = match (self.scaling, self.layouts) {
            (Scaling::Row, Layouts::RowMajor) => Some(rows),
            (Scaling::Row, Layouts::Transposed) => Some(cols),
            _ => None,
        };
        let of_tensor = (self.scaling == Scaling::Tensor).then_some(1);
        let amaxes = if self.given == Given::Amax { of_tensor.or(of_rows) } else { of_tensor };
        let expected = [
            self.given.scale().map(|n| (n, of_tensor.map(|n| TensorType::new(DType::F32, [n, n])))),
            self.given.amax().map(|n| (n, amaxes.map(|n| TensorType::new(DType::F32, [n])))),
        ];
        for (n, expected) in expected.into_iter().flatten() {
            OpError::ensure(Some(given[n]) == expected, || {
                let (scaling, layouts) = (self.scaling, self.layouts);
                match expected {
                    Some(expected) => format!("the given scale or amax is {expected}, not {}", given[n]),
                    None => format!("a cast with scaling {scaling:?} to {layouts:?} takes no scale or amax"),
                }
            })?;
        }
        let takes_amax =
            matches!(self.source, CastSource::Input | CastSource::Norm) && self.format != DType::E5M6;
        OpError::ensure(self.given.amax().is_none() || takes_amax, || {
            format!("a cast of {:?} to {} takes no amax", self.source, self.format)
        })
    }
}

fn is_scaled(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::E5M2 | DType::E5M6)
}

fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

impl Op for Quantize {
    /// Named by its source, so that profiles distinguish the casts.
    fn name(&self) -> &'static str {
        match self.source {
            CastSource::Input => "quantize",
            CastSource::Swiglu { .. } | CastSource::SwigluSaving { .. } => "swiglu_quantize",
            CastSource::SwigluGrad { .. } => "swiglu_grad_quantize",
            CastSource::Norm => "norm_quantize",
            CastSource::Permute => "permute_quantize",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, self.inputs())?;
        let own = self.source.inputs();
        let cast = self.source.infer(&inputs[..own])?;
        let (rows, cols) = matrix("the value to quantize", cast)?;
        OpError::ensure(rows > 0 && cols > 0 && is_plain(cast.dtype), || {
            format!("the value to quantize must be f32 or bf16 and not empty, not {cast}")
        })?;
        OpError::ensure(is_scaled(self.format), || {
            format!("{} takes no scale; quantize casts to e4m3, e5m2 or e5m6", self.format)
        })?;
        OpError::ensure(self.format != DType::E5M6 || self.layouts == Layouts::RowMajor, || {
            "e5m6 cannot be an operand of a GEMM: quantize writes it row-major only".into()
        })?;
        self.check_given(&inputs[own..], [rows, cols])?;
        let mut outputs = Vec::new();
        for (is_written, [rows, cols]) in self.layouts.written().into_iter().zip([[rows, cols], [cols, rows]])
        {
            if is_written {
                outputs.push(TensorType::new(self.format, [rows, cols]));
                outputs.push(TensorType::new(DType::F32, self.scaling.shape(rows, cols)));
            }
        }
        outputs.push(TensorType::new(DType::F32, [1]));
        outputs.extend(self.source.further_outputs(inputs));
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// Where the scale needs the amax of more than a tile, another kernel reads the inputs first.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        let mut cost = Cost::of_operands(Arithmetic::None, inputs, outputs);
        if self.given == Given::Nothing && !self.is_within_areas() {
            let bytes = inputs.iter().map(|ty| ty.bytes() as f64).sum();
            cost.kernels.push(KernelCost::of_bytes(bytes));
        }
        tail::cost(cost, self.source.extents(inputs).0, self.tail)
    }

    /// The transpose, which the backward reads: a second cast costs little once its input is there.
    fn is_cheap(&self, output: usize) -> bool {
        self.layouts == Layouts::Both && matches!(output, 2 | 3)
    }

    /// The cast in the layouts that are not saved; its amax is equal.
    fn rebuild(&self, saved: &[bool]) -> Rebuild {
        let inputs = (0..self.inputs()).map(Source::Input).collect();
        let (layouts, outputs) = match (self.layouts, saved) {
            (Layouts::Both, [true, _, false, ..]) => (Layouts::Transposed, vec![2, 3, 4]),
            (Layouts::Both, [false, _, true, true, ..]) => (Layouts::RowMajor, vec![0, 1, 4]),
            _ => (self.layouts, (0..saved.len()).collect()),
        };
        Rebuild::By { op: Arc::new(Quantize { layouts, ..*self }), inputs, outputs }
    }

    fn accumulates(&self, output: usize) -> bool {
        output == self.amax()
    }
}

impl RaggedOp for Quantize {
    fn reads_tail(&self, input: usize) -> bool {
        !self.tail.is_undefined() || self.source.weights().is_none_or(|last| input > last)
    }

    fn tail(&self, output: usize) -> Option<Tail> {
        self.ragged_axis(output).filter(|_| self.has_tail()).map(|_| self.tail)
    }

    fn with_tail(&self, tail: Tail) -> Option<Arc<dyn Op>> {
        self.has_tail().then(|| Arc::new(Quantize { tail, ..*self }) as Arc<dyn Op>)
    }
}

impl Op for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dequantize", inputs, 2)?;
        let (rows, cols) = matrix("the operand of dequantize", inputs[0])?;
        OpError::ensure(rows > 0 && cols > 0 && is_scaled(inputs[0].dtype), || {
            format!("dequantize takes e4m3, e5m2 or e5m6 that is not empty, not {}", inputs[0])
        })?;
        OpError::ensure(is_plain(self.out), || format!("dequantize writes f32 or bf16, not {}", self.out))?;
        let shape = self.scaling.shape(rows, cols);
        OpError::ensure(is_plain(inputs[1].dtype) && *inputs[1].shape == shape, || {
            format!("the scales of {} must be f32 or bf16 of shape {shape:?}, not {}", inputs[0], inputs[1])
        })?;
        Ok(vec![inputs[0].with_dtype(self.out)])
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }
}

impl OnGpu for Quantize {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}

impl OnGpu for Dequantize {
    const SOURCES: &'static [KernelSource] = &[DEQUANTIZE];
}

impl OnGpu for Amaxes {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];
}
