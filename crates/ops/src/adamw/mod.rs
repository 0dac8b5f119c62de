//! AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2) over all parameters in one op.
//!
//! For every element, with g = coefficient * grad:
//!
//! ```text
//! m' = beta1 m + (1 - beta1) g                    mhat = m' / (1 - beta1^t)
//! v' = beta2 v + (1 - beta2) g^2                  vhat = v' / (1 - beta2^t)
//! master' = master - lr (mhat / (sqrt(vhat) + eps) + weight_decay * master)
//! ```
//!
//! in f32 (f64 where the masters are), the two bias corrections in f64 from t, the number of updates applied. The copy of the new master
//! that GEMMs read is written in the same pass.
//!
//! Moments may be stored in bf16 (DeepSeek-V3, arXiv 2412.19437, section 3.3.3): they are widened on reading, and the update takes m' and v'
//! before they are rounded. They are rounded up or down by chance, right in the mean: to the nearest number, a moment would stay as it is
//! wherever a step moves it by less than half a unit, and v by no more than that in any step for a beta2 above 0.998, so that it could
//! never fall. The numbers that decide are those of a Philox stream: of the seed, t, the parameter's place and the element's. Every device
//! rounds to the same bits.
//!
//! Deliberately absent: a pass that clears gradients. The first micro-step of the next step overwrites them.

mod cpu;
mod cuda;
#[cfg(test)]
mod tests;

use crate::float_shaped;
use crate::quantize::{Known, Layouts, Quantize};
use crate::registry::{Fill, MULTIPROCESSORS, OnCard, Registered, Sample, SampleInput};
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, Scaling, TensorType};

/// Inputs before those of the parameters: lr, coefficient, applied, skip.
const CONTROLS: usize = 4;
/// Inputs of a parameter: master, m, v, grad. The first three are also outputs, in place.
const OPERANDS: usize = 4;
/// The first of the streams that round moments: behind all that a model draws from.
pub const SITES: u32 = 1 << 31;

/// `(lr [], coefficient [], applied u32[1], skip u32[], then for each parameter master, m, v, grad, and behind all for each cast with a known
/// scale that, f32[1, 1]) -> (for each parameter master', m', v' in place[, compute], behind all the largest magnitudes f32[1] of the masters'
/// that are measured, and behind those what casts of some to FP8 make ([`Quantize`]))`.
///
/// `applied` is t and already counts this update, so it is at least 1 unless `skip` is set. The gradient is multiplied by `coefficient`
/// (clipping). With `skip` other than 0 no bit of masters and moments changes, and the compute copies are made from the masters as they are.
///
/// Moments in bf16 are rounded by the stream (t, [`SITES`] + p) of the seed, p the parameter's place among `parameters`: element i by its word i, m
/// by the lower half and v by the upper ([`round_bf16_stochastic`](xtrain_tensor::formats::round_bf16_stochastic)).
#[derive(Clone, Debug)]
pub struct AdamW {
    parameters: Vec<AdamWParameter>,
    beta1: f64,
    beta2: f64,
    eps: f64,
    seed: u64,
    in_place: Vec<(usize, usize)>,
    /// Whose new masters are measured.
    measured: Vec<usize>,
    /// Whose are cast, and how: by blocks, or with a scale that is known.
    casts: Vec<(usize, Quantize)>,
}

/// How one parameter is updated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWParameter {
    /// The decoupled decay, multiplied by the learning rate: 0 for norms, biases and embeddings.
    pub weight_decay: f64,
    /// The element type of the copy that GEMMs read, where it differs from the master's.
    pub compute: Option<DType>,
}

impl AdamW {
    /// An update of these parameters, with the decay rates of the moments, what is added to the root of the second, and the seed of what
    /// rounds them where they are bf16.
    pub fn new(parameters: Vec<AdamWParameter>, [beta1, beta2]: [f64; 2], eps: f64, seed: u64) -> Self {
        let mut in_place = Vec::with_capacity(3 * parameters.len());
        let mut output = 0;
        for (p, parameter) in parameters.iter().enumerate() {
            let input = CONTROLS + OPERANDS * p;
            in_place.extend((0..3).map(|k| (output + k, input + k)));
            output += 3 + usize::from(parameter.compute.is_some());
        }
        AdamW { parameters, beta1, beta2, eps, seed, in_place, measured: Vec::new(), casts: Vec::new() }
    }

    /// Which outputs are the new masters.
    pub(crate) fn masters(&self) -> impl Iterator<Item = usize> {
        let made = |p: &AdamWParameter| 3 + usize::from(p.compute.is_some());
        self.parameters.iter().scan(0, move |next, p| Some(std::mem::replace(next, *next + made(p))))
    }

    /// Which output is the first amax: behind masters, moments and compute copies.
    fn first_amax(&self) -> usize {
        self.parameters.iter().map(|p| 3 + usize::from(p.compute.is_some())).sum()
    }

    /// The first output of each cast, behind all others.
    fn cast_outputs(&self) -> impl Iterator<Item = usize> {
        let first = self.first_amax() + self.measured.len();
        self.casts.iter().scan(first, |next, (_, cast)| Some(std::mem::replace(next, *next + cast.outputs())))
    }

    /// Which input each cast's scale is, where it is known.
    fn scales(&self) -> impl Iterator<Item = Option<usize>> {
        let first = CONTROLS + OPERANDS * self.parameters.len();
        self.casts.iter().scan(first, |next, (_, cast)| {
            let scale = cast.is_given().then_some(*next);
            *next += usize::from(cast.is_given());
            Some(scale)
        })
    }

    /// The update that also casts the new master of parameter `p`, after its other outputs; the delayed scale is its last input. None if
    /// that one is measured or cast already: one launch updates a parameter, and casts it once.
    pub(crate) fn casting(&self, p: usize, cast: Quantize) -> Option<AdamW> {
        let is_first = self.casts.iter().all(|&(q, _)| q != p) && !self.measured.contains(&p);
        let casts = self.casts.iter().copied().chain([(p, cast)]).collect();
        is_first.then(|| AdamW { casts, ..self.clone() })
    }

    /// The update that also writes the amax of the new master of parameter `p`, as its last output. None after casts, whose outputs come
    /// after all amaxes.
    pub(crate) fn measuring(&self, p: usize) -> Option<AdamW> {
        let measured = self.measured.iter().copied().chain([p]).collect();
        self.casts.is_empty().then(|| AdamW { measured, ..self.clone() })
    }

    /// Which output the amax of the new master of parameter `p` is.
    pub(crate) fn amax(&self, p: usize) -> Option<usize> {
        Some(self.first_amax() + self.measured.iter().position(|&q| q == p)?)
    }

    /// The parameters in the order of the operands.
    pub fn parameters(&self) -> &[AdamWParameter] {
        &self.parameters
    }
}

impl Op for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let expected = CONTROLS + OPERANDS * self.parameters.len() + self.scales().flatten().count();
        OpError::ensure(inputs.len() == expected, || {
            format!(
                "adamw of {} parameters takes {expected} inputs (lr, coefficient, applied, skip, then master, m, v and grad of each, and \
                 scales that are known), not {}",
                self.parameters.len(),
                inputs.len()
            )
        })?;
        float_shaped("the learning rate", inputs[0], &[])?;
        float_shaped("the clipping coefficient", inputs[1], &[])?;
        OpError::ensure(inputs[2] == TensorType::new(DType::U32, [1]), || {
            format!("the count of applied updates must be u32[1], not {}", inputs[2])
        })?;
        OpError::ensure(inputs[3] == TensorType::new(DType::U32, []), || {
            format!("the flag that skips the update must be u32[], not {}", inputs[3])
        })?;
        let mut outputs = Vec::new();
        for (p, parameter) in self.parameters.iter().enumerate() {
            let operands = &inputs[CONTROLS + OPERANDS * p..][..OPERANDS];
            let copy = parameter.infer(operands).map_err(|e| OpError(format!("parameter {p}: {e}")))?;
            outputs.extend_from_slice(&operands[..3]);
            outputs.extend(copy);
        }
        outputs.extend(self.measured.iter().map(|_| TensorType::new(DType::F32, [1])));
        for (&(p, cast), scale) in self.casts.iter().zip(self.scales()) {
            let scale = scale.map(|scale| inputs[scale]);
            let of: Vec<_> = [inputs[CONTROLS + OPERANDS * p]].into_iter().chain(scale).collect();
            outputs.extend(cast.infer(&of)?);
        }
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn in_place(&self) -> &[(usize, usize)] {
        &self.in_place
    }
}

impl AdamWParameter {
    /// The type of the compute copy, or what is wrong with `[master, m, v, grad]`.
    fn infer(&self, operands: &[TensorType]) -> Result<Option<TensorType>, OpError> {
        let master = operands[0];
        let allowed: &[DType] = match master.dtype.compute() {
            DType::F64 => &[DType::F64],
            _ => &[DType::F32, DType::BF16],
        };
        let names = || allowed.iter().map(|d| d.name()).collect::<Vec<_>>().join(" or ");
        for (what, ty) in ["the master", "m", "v", "the gradient"].into_iter().zip(operands) {
            OpError::ensure(ty.shape == master.shape && allowed.contains(&ty.dtype), || {
                format!("{what} is {ty}; with a master of {master} it must be {} of its shape", names())
            })?;
        }
        let copy = self.compute.map(|dtype| master.with_dtype(dtype));
        OpError::ensure(copy.is_none_or(|c| allowed.contains(&c.dtype)), || {
            format!("the copy of a master of {master} must be {}, not {:?}", names(), self.compute)
        })?;
        Ok(copy)
    }
}

impl Registered for AdamW {
    fn samples() -> Vec<Sample> {
        vec![sample([5, 7], 1, 0), sample([5, 7], 30, 0), sample([5, 7], 30, 1)]
    }

    fn large() -> Sample {
        sample([300, 500], 30, 0)
    }
}

/// An update of a matrix with decay and a bf16 copy, and of a vector without.
fn sample(matrix: [usize; 2], applied: u32, skip: u32) -> Sample {
    let mut inputs = vec![
        SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
        SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
        SampleInput::counters([applied]),
        SampleInput::flag(skip),
    ];
    inputs.extend(operands(matrix));
    inputs.extend(operands([13]));
    let parameters = vec![
        AdamWParameter { weight_decay: 0.1, compute: Some(DType::BF16) },
        AdamWParameter { weight_decay: 0.0, compute: None },
    ];
    let measured = vec![1, 0];
    let op = AdamW { measured, ..AdamW::new(parameters, [0.9, 0.95], 1e-8, 7) };
    Sample::plain(op, inputs)
}

impl OnCard for AdamW {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, cuda::CAST];

    /// Many parameters of very different lengths, with and without copies and decay, updated and skipped; then with moments in bf16, both or
    /// one of them, and without copies; and masters that are cast.
    fn busy_samples(multiprocessors: usize) -> Vec<Sample> {
        let most = 1_000_003 * multiprocessors / MULTIPROCESSORS;
        let lengths = [1, 2, 7, 8, 9, 63, 500, 16_383, 16_384, 16_385, 40_001, most / 10, most];
        let sample = |applied, skip, moments: [DType; 2]| {
            let copies = if moments == [DType::F32; 2] {
                [None, Some(DType::BF16), Some(DType::F32)]
            } else {
                [None; 3]
            };
            let mut inputs = vec![
                SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
                SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
                SampleInput::counters([applied]),
                SampleInput::flag(skip),
            ];
            let mut parameters = Vec::new();
            for n in 0..3 * lengths.len() {
                let [master, m, v, grad] = operands([lengths[n % lengths.len()]]);
                inputs.extend([master, m.in_format(moments[0]), v.in_format(moments[1]), grad]);
                parameters
                    .push(AdamWParameter { weight_decay: 0.1 * (n % 2) as f64, compute: copies[n % 3] });
            }
            let op = AdamW::new(parameters, [0.9, 0.95], 1e-8, 0xFEDC_BA98_7654_3210);
            Sample::plain(AdamW { measured: (0..lengths.len()).step_by(2).collect(), ..op }, inputs)
        };
        let (f32s, bf16s) = ([DType::F32; 2], [DType::BF16; 2]);
        let one = [DType::F32, DType::BF16];
        vec![
            sample(7, 0, f32s),
            sample(7, 1, f32s),
            sample(9, 0, bf16s),
            sample(9, 1, bf16s),
            sample(10, 0, one),
            casting(0, f32s),
            casting(1, f32s),
            casting(0, bf16s),
        ]
    }
}

/// Masters that are cast: whole blocks, rows that are not made of eights, cut ones, and with scales that are given and that are none yet. Some
/// are no numbers.
fn casting(skip: u32, moments: [DType; 2]) -> Sample {
    let by_blocks = |layouts| Quantize::new(DType::E4M3, Scaling::Block, true, layouts);
    let with_scale = |format, layouts| {
        let cast = Quantize::new(format, Scaling::Tensor, false, layouts);
        Quantize { known: Known::Scale, ..cast }
    };
    let of = [
        ([256, 128], by_blocks(Layouts::Both)),
        ([70, 77], by_blocks(Layouts::Both)),
        ([131, 264], by_blocks(Layouts::Transposed)),
        ([128, 256], with_scale(DType::E4M3, Layouts::Both)),
        ([40, 24], with_scale(DType::E5M2, Layouts::Direct)),
        ([130, 40], by_blocks(Layouts::Direct)),
        ([130, 24], with_scale(DType::E4M3, Layouts::Direct)),
        ([40, 136], with_scale(DType::E4M3, Layouts::Transposed)),
    ];
    let mut inputs = vec![
        SampleInput::activation([]).fill(Fill::Values(vec![0.02])),
        SampleInput::activation([]).fill(Fill::Values(vec![0.75])),
        SampleInput::counters([5]),
        SampleInput::flag(skip),
    ];
    for (n, (shape, _)) in of.iter().enumerate() {
        let [master, m, v, grad] = operands(*shape);
        let special = [0.0, 1e-44, 3e38, f64::INFINITY, f64::NAN, -0.0];
        // In the second block.
        let value = |i: usize| if i < 128 * 128 { (i % 97) as f64 - 40.0 } else { special[i % 6] };
        let master =
            if n == 0 { master.fill(Fill::Values((0..256 * 128).map(value).collect())) } else { master };
        inputs.extend([master, m.in_format(moments[0]), v.in_format(moments[1]), grad]);
    }
    inputs.extend(
        [0.0, 30.0, 7.0, 0.5].map(|scale| SampleInput::activation([1, 1]).fill(Fill::Values(vec![scale]))),
    );
    // As an embedding that is the head too has both a copy and casts.
    let copy = |n: usize| (n.is_multiple_of(2)).then_some(DType::BF16);
    let parameters = (0..of.len()).map(|n| AdamWParameter { weight_decay: 0.1, compute: copy(n) }).collect();
    let casts = of.iter().enumerate().map(|(n, (_, cast))| (n, *cast)).collect();
    Sample::plain(AdamW { casts, ..AdamW::new(parameters, [0.9, 0.95], 1e-8, 3) }, inputs)
}

/// Master, m, v and grad of a sample.
fn operands<const N: usize>(shape: [usize; N]) -> [SampleInput; OPERANDS] {
    let normal = || SampleInput::activation(shape);
    let squares = (0..shape.iter().product()).map(|i: usize| 0.1 + 0.01 * i as f64).collect();
    [normal(), normal(), normal().fill(Fill::Values(squares)), normal()]
}
