//! Casts to and from the formats that need a scale: what the FP8 recipes put before GEMMs, and DeepSeek-V3's E5M6 for a saved activation.
//!
//! The elements of a region ([`Scaling`]) share `scale = max_finite(format) / amax`, at most the largest finite f32, where amax is the
//! largest magnitude in the region; it multiplies before the cast, and its reciprocal comes out. An amax of 0 gives scale 1. So does an
//! amax that is infinite or NaN, and it comes out as it is, so that the step can be marked as not finite: the cast itself saturates and
//! would hide an infinity.
//!
//! GEMMs of FP8 sum over what lies side by side in memory, in both factors. A tensor that is one GEMM's factor as it stands is another's
//! as its transpose, with scales of its own; one pass over the tensor makes either or both.
//!
//! E5M6 is scaled as the others are: DeepSeek-V3 (arXiv 2412.19437, section 3.3.3) keeps that activation with tile scales of powers of two
//! as well, one rule is simpler than two, and with its 5 bits of exponent the region's small values stay 30 binary orders apart from its
//! largest one. Whoever wants no scaling gets it from a power of two: it changes no bit of a mantissa.

mod cpu;
pub(crate) mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
mod source;
#[cfg(test)]
mod tests;

pub(crate) use cpu::{dequantized, keep, largest_magnitude};
pub(crate) use cuda::{DEQUANTIZE, saving, saving_workspace};
pub use source::{CastSource, Given};

use crate::matrix;
use crate::registry::OnGpu;
use std::sync::Arc;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand, Quantization, Rebuild, Source};
use xtrain_tensor::{DType, Scaling, TensorType};

/// `(x [R, C] (, scale f32[1, 1] or amax f32[1])) -> (q [R, C], inv_scale) as it stands, (q [C, R], inv_scale) transposed, amax f32[1]`;
/// which of the pairs is made says [`Layouts`], and [`Scaling::shape`] the shape of the scales, which are f32.
///
/// q is x * scale in f32, rounded to nearest even and saturated to the largest finite value; NaN stays NaN. amax is the element of x of
/// the largest bits without the sign, a NaN if there is one; it accumulates as the largest of all. Where a scale is given it is used for
/// the whole tensor, whatever amax is; where it is 0 there is none yet, and that of amax takes its place. What is cast may be what another op
/// would make: then its inputs stand in the place of x, and what it makes beside is behind amax ([`Of`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantize {
    /// What is cast.
    pub source: CastSource,
    /// E4M3 or E5M2; E5M6 (packed) as it stands only.
    pub format: DType,
    /// Which elements share a scale.
    pub scaling: Scaling,
    /// Whether scales are rounded down to a power of two, so that scaling adds no rounding error.
    pub pow2_scales: bool,
    /// What is made.
    pub layouts: Layouts,
    /// What of the whole tensor is known before.
    pub given: Given,
}

impl Quantize {
    /// The cast of a tensor.
    pub const fn new(format: DType, scaling: Scaling, pow2_scales: bool, layouts: Layouts) -> Self {
        Quantize { source: CastSource::Input, format, scaling, pow2_scales, layouts, given: Given::Nothing }
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

/// The cast that keeps gate and up for the backward.
pub(crate) const SAVE: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::RowMajor);

/// In which layouts a tensor is quantized.
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
    /// Whether each is made: as it stands, transposed.
    pub fn made(self) -> [bool; 2] {
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
    /// Which elements share a scale.
    pub scaling: Scaling,
}

/// Numbers and scales of what [`SAVE`] makes of gate and up.
pub(crate) fn saved_types(gate_up: TensorType) -> [TensorType; 2] {
    let (rows, cols) = gate_up.shape.rows_cols();
    [gate_up.with_dtype(DType::E4M3), TensorType::new(DType::F32, Scaling::Tile.shape(rows, cols))]
}

fn is_scaled(dtype: DType) -> bool {
    matches!(dtype, DType::E4M3 | DType::E5M2 | DType::E5M6)
}

fn is_plain(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16)
}

impl Op for Quantize {
    /// By what it casts, so that profiles tell the casts apart.
    fn name(&self) -> &'static str {
        match self.source {
            CastSource::Input => "quantize",
            CastSource::Swiglu { .. } | CastSource::SwigluSaving => "swiglu_quantize",
            CastSource::SwigluGrad { .. } => "swiglu_grad_quantize",
            CastSource::Norm => "norm_quantize",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, self.inputs())?;
        let own = self.source.inputs();
        let cast = self.source.infer(&inputs[..own])?;
        let (rows, cols) = matrix("what is quantized", cast)?;
        OpError::ensure(rows > 0 && cols > 0 && is_plain(cast.dtype), || {
            format!("what is quantized must be f32 or bf16 and not empty, not {cast}")
        })?;
        OpError::ensure(is_scaled(self.format), || {
            format!("{} takes no scale; quantize makes e4m3, e5m2 or e5m6", self.format)
        })?;
        OpError::ensure(self.format != DType::E5M6 || self.layouts == Layouts::RowMajor, || {
            "e5m6 is no factor of a GEMM: quantize makes it as the tensor stands only".into()
        })?;
        if let (Some(&given), Some(expected)) = (inputs.get(own), self.given.ty()) {
            OpError::ensure(given == expected && self.scaling == Scaling::Tensor, || {
                let scaling = self.scaling;
                format!("what is known of a whole tensor is {expected}, not {given} by {scaling:?}")
            })?;
        }
        let measures =
            matches!(self.source, CastSource::Input | CastSource::Norm) && self.format != DType::E5M6;
        OpError::ensure(self.given != Given::Amax || measures, || {
            format!("no amax is known of what {:?} casts to {}", self.source, self.format)
        })?;
        let mut made = Vec::new();
        for (is_made, [rows, cols]) in self.layouts.made().into_iter().zip([[rows, cols], [cols, rows]]) {
            if is_made {
                made.push(TensorType::new(self.format, [rows, cols]));
                made.push(TensorType::new(DType::F32, self.scaling.shape(rows, cols)));
            }
        }
        made.push(TensorType::new(DType::F32, [1]));
        if self.source == CastSource::SwigluSaving {
            made.extend(saved_types(inputs[0]));
        }
        Ok(made)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    /// The transpose, which the backward reads: it costs little once what is cast is there.
    fn is_cheap(&self, output: usize) -> bool {
        self.layouts == Layouts::Both && matches!(output, 2 | 3)
    }

    /// In the layouts that are not saved; a second cast has the same amax.
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

impl Op for Dequantize {
    fn name(&self) -> &'static str {
        "dequantize"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity("dequantize", inputs, 2)?;
        let (rows, cols) = matrix("what is dequantized", inputs[0])?;
        OpError::ensure(rows > 0 && cols > 0 && is_scaled(inputs[0].dtype), || {
            format!("what is dequantized must be e4m3, e5m2 or e5m6 and not empty, not {}", inputs[0])
        })?;
        OpError::ensure(is_plain(self.out), || format!("dequantize makes f32 or bf16, not {}", self.out))?;
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
