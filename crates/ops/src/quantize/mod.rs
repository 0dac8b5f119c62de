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
mod of;
#[cfg(test)]
mod tests;

pub(crate) use cpu::{dequantized, keep, largest_magnitude};
pub(crate) use cuda::{DEQUANTIZE, keeping, keeping_workspace};
pub use of::{Known, Of};

use crate::matrix;
use crate::registry::{Fill, OnCard, Registered, Sample, SampleInput};
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
    pub of: Of,
    /// E4M3 or E5M2; E5M6 (packed) as it stands only.
    pub format: DType,
    /// Which elements share a scale.
    pub scaling: Scaling,
    /// Whether scales are rounded down to a power of two, so that scaling adds no rounding error.
    pub pow2_scales: bool,
    /// What is made.
    pub layouts: Layouts,
    /// What of the whole tensor is known before.
    pub known: Known,
}

impl Quantize {
    /// The cast of a tensor.
    pub const fn new(format: DType, scaling: Scaling, pow2_scales: bool, layouts: Layouts) -> Self {
        Quantize { of: Of::Input, format, scaling, pow2_scales, layouts, known: Known::Nothing }
    }

    /// The cast of an operand, in the layouts that GEMMs need: row-major, transposed.
    pub fn of_operand(quantization: Quantization, layouts: [bool; 2]) -> Self {
        let Quantization { format, scaling, pow2_scales, delayed } = quantization;
        let layouts = match layouts {
            [_, false] => Layouts::Direct,
            [false, true] => Layouts::Transposed,
            [true, true] => Layouts::Both,
        };
        let known = if delayed { Known::Scale } else { Known::Nothing };
        Quantize { known, ..Quantize::new(format, scaling, pow2_scales, layouts) }
    }
}

/// The cast that keeps gate and up for the backward.
pub(crate) const KEEP: Quantize = Quantize::new(DType::E4M3, Scaling::Tile, true, Layouts::Direct);

/// In which layouts a tensor is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layouts {
    /// As it stands.
    Direct,
    /// Its transpose.
    Transposed,
    /// Both, in this order.
    Both,
}

impl Layouts {
    /// Whether each is made: as it stands, transposed.
    pub fn made(self) -> [bool; 2] {
        match self {
            Layouts::Direct => [true, false],
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

/// Numbers and scales of what [`KEEP`] makes of gate and up.
pub(crate) fn kept_types(gate_up: TensorType) -> [TensorType; 2] {
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
        match self.of {
            Of::Input => "quantize",
            Of::Swiglu { .. } | Of::SwigluSaving => "swiglu_quantize",
            Of::SwigluGrad { .. } => "swiglu_grad_quantize",
            Of::Norm => "norm_quantize",
        }
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        OpError::arity(self.name(), inputs, self.inputs())?;
        let own = self.of.inputs();
        let cast = self.of.infer(&inputs[..own])?;
        let (rows, cols) = matrix("what is quantized", cast)?;
        OpError::ensure(rows > 0 && cols > 0 && is_plain(cast.dtype), || {
            format!("what is quantized must be f32 or bf16 and not empty, not {cast}")
        })?;
        OpError::ensure(is_scaled(self.format), || {
            format!("{} takes no scale; quantize makes e4m3, e5m2 or e5m6", self.format)
        })?;
        OpError::ensure(self.format != DType::E5M6 || self.layouts == Layouts::Direct, || {
            "e5m6 is no factor of a GEMM: quantize makes it as the tensor stands only".into()
        })?;
        if let (Some(&given), Some(expected)) = (inputs.get(own), self.known.ty()) {
            OpError::ensure(given == expected && self.scaling == Scaling::Tensor, || {
                let scaling = self.scaling;
                format!("what is known of a whole tensor is {expected}, not {given} by {scaling:?}")
            })?;
        }
        let measures = matches!(self.of, Of::Input | Of::Norm) && self.format != DType::E5M6;
        OpError::ensure(self.known != Known::Amax || measures, || {
            format!("no amax is known of what {:?} casts to {}", self.of, self.format)
        })?;
        let mut made = Vec::new();
        for (is_made, [rows, cols]) in self.layouts.made().into_iter().zip([[rows, cols], [cols, rows]]) {
            if is_made {
                made.push(TensorType::new(self.format, [rows, cols]));
                made.push(TensorType::new(DType::F32, self.scaling.shape(rows, cols)));
            }
        }
        made.push(TensorType::new(DType::F32, [1]));
        if self.of == Of::SwigluSaving {
            made.extend(kept_types(inputs[0]));
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
            (Layouts::Both, [false, _, true, true, ..]) => (Layouts::Direct, vec![0, 1, 4]),
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

impl Registered for Quantize {
    fn samples() -> Vec<Sample> {
        let sample = |format, scaling, pow2_scales, layouts, shape| {
            let op = Quantize::new(format, scaling, pow2_scales, layouts);
            Sample::plain(op, [SampleInput::activation(shape)])
        };
        let current = Quantize::new(DType::E5M2, Scaling::Tensor, false, Layouts::Both);
        let given = Quantize { known: Known::Scale, ..current };
        let measured = Quantize { known: Known::Amax, ..current };
        let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![100.0]));
        let of = |of, scaling| Quantize { of, scaling, ..current };
        vec![
            sample(DType::E4M3, Scaling::Tensor, false, Layouts::Direct, [13, 7]),
            sample(DType::E5M2, Scaling::Row, false, Layouts::Both, [3, 17]),
            sample(DType::E4M3, Scaling::Row, true, Layouts::Transposed, [19, 5]),
            sample(DType::E4M3, Scaling::Tile, true, Layouts::Both, [3, 131]),
            sample(DType::E5M2, Scaling::Tile, false, Layouts::Transposed, [131, 3]),
            sample(DType::E4M3, Scaling::Block, true, Layouts::Both, [129, 130]),
            sample(DType::E5M6, Scaling::Tile, true, Layouts::Direct, [3, 129]),
            Sample::plain(given, [SampleInput::activation([5, 140]), scale]),
            Sample::plain(measured, [SampleInput::activation([5, 140]), amax()]),
            Sample::plain(of(Of::Swiglu { kept: false }, Scaling::Tile), [SampleInput::activation([7, 22])]),
            Sample::plain(of(Of::SwigluSaving, Scaling::Row), [SampleInput::activation([7, 22])]),
            Sample::plain(
                of(Of::SwigluGrad { kept: false }, Scaling::Row),
                [SampleInput::activation([7, 11]), SampleInput::activation([7, 22])],
            ),
            Sample::plain(
                of(Of::Norm, Scaling::Tensor),
                [
                    SampleInput::activation([7, 11]),
                    SampleInput::activation([7]),
                    SampleInput::parameter([11]),
                ],
            ),
        ]
    }

    fn large() -> Sample {
        let op = Quantize::new(DType::E4M3, Scaling::Tensor, true, Layouts::Both);
        Sample::plain(op, [SampleInput::activation([300, 160])])
    }
}

impl Registered for Dequantize {
    fn samples() -> Vec<Sample> {
        let sample = |format, scaling: Scaling, out| {
            let q = SampleInput::activation([5, 131]).in_format(format);
            Sample::plain(Dequantize { out, scaling }, [q, SampleInput::activation(scaling.shape(5, 131))])
        };
        vec![
            sample(DType::E4M3, Scaling::Tensor, DType::F32),
            sample(DType::E5M2, Scaling::Tile, DType::BF16),
            sample(DType::E5M6, Scaling::Row, DType::F32),
        ]
    }

    fn large() -> Sample {
        let q = SampleInput::activation([300, 160]).in_format(DType::E4M3);
        let op = Dequantize { out: DType::BF16, scaling: Scaling::Block };
        Sample::plain(op, [q, SampleInput::activation(Scaling::Block.shape(300, 160))])
    }
}

impl OnCard for Quantize {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE];

    /// Every format with every scaling in every layout, in rows and columns of whole vectors and in others, over several areas; and what a
    /// scale must make an exception of.
    fn card_samples() -> Vec<Sample> {
        let mut all = made_on_the_way();
        // Zeros, what f32 holds at its ends, an infinity and numbers that are none, each in a tile of its own.
        let special = [0.0, 1e-44, 3e38, f64::INFINITY, f64::NAN, -0.0];
        let value = |i: usize| match i.is_multiple_of(5) {
            true => special[i / 128 % 6],
            false => (i % 128) as f64 * 1e-3 * (i / 128 % 3 / 2) as f64,
        };
        let special = SampleInput::activation([4, 768])
            .computed()
            .fill(Fill::Values((0..4 * 768).map(value).collect()));
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            let layouts = match format {
                DType::E5M6 => &[Layouts::Direct][..],
                _ => &[Layouts::Direct, Layouts::Transposed, Layouts::Both],
            };
            for (scaling, &layouts) in Scaling::ALL.iter().flat_map(|&s| layouts.iter().map(move |l| (s, l)))
            {
                for (n, shape) in [[304, 264], [256, 384], [131, 277], [1, 1]].into_iter().enumerate() {
                    let op = Quantize::new(format, scaling, n < 2, layouts);
                    all.push(Sample::plain(op, [SampleInput::activation(shape).computed()]));
                }
                let op = Quantize::new(format, scaling, false, layouts);
                all.push(Sample::plain(op, [special.clone()]));
                if scaling == Scaling::Tensor {
                    let scale = |value| SampleInput::activation([1, 1]).fill(Fill::Values(vec![value]));
                    let measured = (format != DType::E5M6).then(|| (Known::Amax, amax()));
                    let scales = [scale(0.37), scale(0.0)].map(|scale| (Known::Scale, scale));
                    let all_known: Vec<_> = scales.into_iter().chain(measured).collect();
                    for (known, beside) in all_known {
                        let op = Quantize { known, ..op };
                        all.push(Sample::plain(
                            op,
                            [SampleInput::activation([304, 264]).computed(), beside.clone()],
                        ));
                        all.push(Sample::plain(op, [special.clone(), beside]));
                    }
                }
            }
        }
        all
    }
}

/// An amax that was measured.
fn amax() -> SampleInput {
    SampleInput::activation([1]).fill(Fill::Values(vec![5.5]))
}

/// Casts of what is made on the way: of whole areas, of tiles that rows end with, of rows of eights in each layout, and of any.
fn made_on_the_way() -> Vec<Sample> {
    let mut all = Vec::new();
    for [rows, cols] in [[256, 384], [304, 256], [131, 264], [70, 77]] {
        let gate_up = |kept| match kept {
            false => vec![SampleInput::activation([rows, 2 * cols]).computed()],
            true => vec![
                SampleInput::activation([rows, 2 * cols]).in_format(DType::E4M3),
                SampleInput::activation(Scaling::Tile.shape(rows, 2 * cols)),
            ],
        };
        let of = |of| {
            let inputs: Vec<SampleInput> = match of {
                Of::Input => vec![SampleInput::activation([rows, cols]).computed()],
                Of::Swiglu { kept } => gate_up(kept),
                Of::SwigluSaving => gate_up(false),
                Of::SwigluGrad { kept } => {
                    [vec![SampleInput::activation([rows, cols]).computed()], gate_up(kept)].concat()
                }
                Of::Norm => vec![
                    SampleInput::activation([rows, cols]).computed(),
                    SampleInput::activation([rows]),
                    SampleInput::parameter([cols]),
                ],
            };
            (of, inputs)
        };
        let swiglu =
            [false, true].into_iter().flat_map(|kept| [Of::Swiglu { kept }, Of::SwigluGrad { kept }]);
        for (of, inputs) in swiglu.chain([Of::Norm, Of::SwigluSaving]).map(of) {
            for (scaling, pow2_scales) in
                [(Scaling::Tensor, false), (Scaling::Row, true), (Scaling::Tile, true)]
            {
                let op = Quantize { of, ..Quantize::new(DType::E4M3, scaling, pow2_scales, Layouts::Both) };
                all.push(Sample::plain(op, inputs.clone()));
            }
            // A copy is kept of whole areas.
            if [rows, cols] == (if of == Of::SwigluSaving { [256, 384] } else { [131, 264] }) {
                for layouts in [Layouts::Direct, Layouts::Transposed] {
                    for scaling in [Scaling::Tensor, Scaling::Row, Scaling::Tile] {
                        let op = Quantize::new(DType::E4M3, scaling, scaling != Scaling::Tensor, layouts);
                        all.push(Sample::plain(Quantize { of, ..op }, inputs.clone()));
                    }
                    let op = Quantize::new(DType::E4M3, Scaling::Tensor, false, layouts);
                    let scale = SampleInput::activation([1, 1]).fill(Fill::Values(vec![0.37]));
                    let given = Quantize { of, known: Known::Scale, ..op };
                    all.push(Sample::plain(given, [inputs.clone(), vec![scale]].concat()));
                }
            }
            let whole = Quantize { of, ..Quantize::new(DType::E5M2, Scaling::Tensor, false, Layouts::Both) };
            if matches!(of, Of::SwigluGrad { .. }) {
                all.push(Sample::plain(whole, inputs.clone()));
            }
            let scale = |value| SampleInput::activation([1, 1]).fill(Fill::Values(vec![value]));
            let measured = (of == Of::Norm).then(|| (Known::Amax, amax()));
            let scales = [scale(0.37), scale(0.0)].map(|scale| (Known::Scale, scale));
            for (known, beside) in scales.into_iter().chain(measured) {
                let op = Quantize { known, ..whole };
                all.push(Sample::plain(op, [inputs.clone(), vec![beside]].concat()));
            }
        }
    }
    all
}

impl OnCard for Dequantize {
    const SOURCES: &'static [KernelSource] = &[DEQUANTIZE];

    fn card_samples() -> Vec<Sample> {
        let mut all = Vec::new();
        for format in [DType::E4M3, DType::E5M2, DType::E5M6] {
            for scaling in Scaling::ALL {
                for ([rows, cols], out) in [([300, 264], DType::BF16), ([131, 277], DType::F32)] {
                    let q = SampleInput::activation([rows, cols]).in_format(format);
                    let scales = SampleInput::activation(scaling.shape(rows, cols));
                    all.push(Sample::plain(Dequantize { out, scaling }, [q, scales]));
                }
            }
        }
        all
    }
}
