//! AdamW (Loshchilov & Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101, algorithm 2) over
//! all parameters in one op.
//!
//! For every element, with g = coefficient * grad:
//!
//! ```text
//! m' = beta1 m + (1 - beta1) g                    mhat = m' / (1 - beta1^t)
//! v' = beta2 v + (1 - beta2) g^2                  vhat = v' / (1 - beta2^t)
//! master' = master - lr (mhat / (sqrt(vhat) + eps) + weight_decay * master)
//! ```
//!
//! in f32 (f64 if the masters are), the two bias corrections in f64 from t, the number of updates applied.
//! The same pass writes the copy of the new master that GEMMs read.
//!
//! Moments may be stored in bf16 (DeepSeek-V3, arXiv 2412.19437, section 3.3.3): they are widened on reading,
//! and the update uses m' and v' before they are rounded. They use stochastic rounding, whose mean is exact.
//! Rounded to nearest, a moment would not change in a step that moves it by less than half a unit; with beta2
//! above 0.998 no step moves v by more, so v could never fall. The random numbers come from a Philox stream
//! keyed by seed, t, the index of the parameter and that of the element. Every device rounds to the same
//! bits.
//!
//! Deliberately absent: a pass that clears gradients. The first micro-step of the next step overwrites them.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use crate::float_shaped;
use crate::on_gpu::OnGpu;
use crate::quantize::Quantize;
use xtrain_cuda::KernelSource;
use xtrain_program::{Op, OpError, Operand};
use xtrain_tensor::{DType, TensorType};

/// Inputs before those of the parameters: lr, coefficient, applied, skip.
const CONTROLS: usize = 4;
/// Inputs of a parameter: master, m, v, grad. The first three are also outputs, in place.
const OPERANDS: usize = 4;
/// The first stream of stochastic rounding; models draw from lower ones.
pub const SITES: u32 = 1 << 31;

/// One AdamW update of all parameters.
///
/// Inputs: the scalars `lr`, `coefficient`, `applied` (`u32[1]`) and `skip` (u32); for each parameter master,
/// m, v, grad; for each cast with a delayed scale, that scale (`f32[1, 1]`). Outputs: for each parameter
/// master', m', v' in place and, if it has one, its compute copy; the amaxes of measured masters (`f32[1]`);
/// the outputs of casts of masters to FP8 ([`Quantize`]).
///
/// `applied` is t and already counts this update, so it is at least 1 unless `skip` is set. The gradient is
/// multiplied by `coefficient` (clipping). If `skip` is not 0, no bit of masters and moments changes, and the
/// compute copies are written from the unchanged masters.
///
/// Moments in bf16 are rounded by the stream (t, [`SITES`] + p) of the seed, with p the index of the
/// parameter among those of the model, `first_parameter` for the first of `parameters`: element i of the
/// parameter by its word i, m by the lower half and v by the upper
/// ([`round_bf16_stochastic`](xtrain_tensor::formats::round_bf16_stochastic)).
#[derive(Clone, Debug)]
pub struct AdamW {
    parameters: Vec<AdamWParameter>,
    /// The index of the first among those of the model.
    first_parameter: usize,
    beta1: f64,
    beta2: f64,
    eps: f64,
    seed: u64,
    in_place: Vec<(usize, usize)>,
    /// Parameters of whose new masters the amax is written.
    measured: Vec<usize>,
    /// Parameters whose new masters are cast: by blocks, or with a delayed scale.
    casts: Vec<(usize, Quantize)>,
}

/// The options of a parameter's update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWParameter {
    /// The decoupled decay, multiplied by the learning rate: 0 for norms, biases and embeddings.
    pub weight_decay: f64,
    /// The element type of the copy that GEMMs read, if it differs from the master's.
    pub compute: Option<DType>,
    /// The index of the first element of the operands in the parameter: not 0 if a rank has later rows of it.
    /// A parameter that is cast begins with a whole row.
    pub first_element: u64,
}

impl AdamW {
    /// An update of these parameters, the first of a model, with the decay rates of the moments, the addend
    /// to the root of the second moment, and the seed of stochastic rounding.
    pub fn new(parameters: Vec<AdamWParameter>, [beta1, beta2]: [f64; 2], eps: f64, seed: u64) -> Self {
        let mut in_place = Vec::with_capacity(3 * parameters.len());
        let mut output = 0;
        for (p, parameter) in parameters.iter().enumerate() {
            let input = CONTROLS + OPERANDS * p;
            in_place.extend((0..3).map(|k| (output + k, input + k)));
            output += 3 + usize::from(parameter.compute.is_some());
        }
        let (measured, casts) = (Vec::new(), Vec::new());
        AdamW { parameters, first_parameter: 0, beta1, beta2, eps, seed, in_place, measured, casts }
    }

    /// This update of parameters that follow others in the model.
    pub fn from_parameter(self, first: usize) -> Self {
        AdamW { first_parameter: first, ..self }
    }

    /// The outputs that are new masters.
    pub(crate) fn masters(&self) -> impl Iterator<Item = usize> {
        let outputs = |p: &AdamWParameter| 3 + usize::from(p.compute.is_some());
        self.parameters.iter().scan(0, move |next, p| Some(std::mem::replace(next, *next + outputs(p))))
    }

    /// The index of the first amax: after masters, moments and compute copies.
    fn first_amax(&self) -> usize {
        self.parameters.iter().map(|p| 3 + usize::from(p.compute.is_some())).sum()
    }

    /// The index of the first output of each cast, after all others.
    fn cast_outputs(&self) -> impl Iterator<Item = usize> {
        let first = self.first_amax() + self.measured.len();
        self.casts.iter().scan(first, |next, (_, cast)| Some(std::mem::replace(next, *next + cast.outputs())))
    }

    /// The input that is each cast's delayed scale, if it has one.
    fn scales(&self) -> impl Iterator<Item = Option<usize>> {
        let first = CONTROLS + OPERANDS * self.parameters.len();
        self.casts.iter().scan(first, |next, (_, cast)| {
            let scale = cast.is_given().then_some(*next);
            *next += usize::from(cast.is_given());
            Some(scale)
        })
    }

    /// The update that also casts the new master of parameter `p`: the casts are its last outputs, the
    /// delayed scale its last input. None if that master is already measured or cast, because one launch
    /// updates a parameter and casts it once.
    pub(crate) fn casting(&self, p: usize, cast: Quantize) -> Option<AdamW> {
        let is_first = self.casts.iter().all(|&(q, _)| q != p) && !self.measured.contains(&p);
        let casts = self.casts.iter().copied().chain([(p, cast)]).collect();
        is_first.then(|| AdamW { casts, ..self.clone() })
    }

    /// The update that also writes the amax of the new master of parameter `p`, as its last output. None if
    /// it already casts, because the outputs of casts come after all amaxes.
    pub(crate) fn measuring(&self, p: usize) -> Option<AdamW> {
        let measured = self.measured.iter().copied().chain([p]).collect();
        self.casts.is_empty().then(|| AdamW { measured, ..self.clone() })
    }

    /// The index of the amax of the new master of parameter `p`.
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
                 delayed scales), not {}",
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
            let master = inputs[CONTROLS + OPERANDS * p];
            outputs.extend(cast.infer(&[master].into_iter().chain(scale).collect::<Vec<_>>())?);
            let (first, row) =
                (self.parameters[p].first_element, master.shape.last().map_or(1, |&n| n as u64));
            OpError::ensure(first.is_multiple_of(row), || {
                format!("parameter {p}, which is cast, begins with element {first}, inside a row of {row}")
            })?;
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
    /// The type of the compute copy, or an error about `[master, m, v, grad]`.
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

impl OnGpu for AdamW {
    const SOURCES: &'static [KernelSource] = &[cuda::SOURCE, cuda::CAST];
}
