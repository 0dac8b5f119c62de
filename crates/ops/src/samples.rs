//! Samples: ops with inputs, from which tests draw.
//!
//! Compiled for tests alone, by the feature `samples`.

use std::sync::Arc;
use xtrain_program::{Differentiable, Op, Operand};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// An op with inputs to run it on.
pub struct Sample {
    /// The op.
    pub op: SampleOp,
    /// Its inputs.
    pub inputs: Vec<SampleInput>,
    /// The number of outputs that are differentiated; those after them are only saved for the backward.
    pub roots: usize,
    /// True if the first output is a loss, whose gradient is one.
    pub loss: bool,
    /// The allowed distance of a GPU's results from the CPU's.
    pub tolerance: GpuTolerance,
    /// True if a GPU gives the same bits every time.
    pub deterministic: bool,
}

/// The allowed distance of an op's results on a GPU from the CPU's (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GpuTolerance {
    /// Relative error of outputs in f32. Outputs in bf16 may differ by their rounding, all others in no bit.
    Rounding {
        /// The relative error.
        f32: f64,
    },
    /// As [`GpuTolerance::DEFAULT`], but a relative error of 3e-2 for outputs in FP8: they are cast from
    /// values that the op computes.
    FusedCast {
        /// True if outputs in bf16 must be equal to the bit: stochastic rounding is the same everywhere.
        exact_bf16: bool,
    },
    /// A relative error of 4e-3 for losses and of 3e-2 for all other outputs: GEMMs run on casts of values
    /// that the op computes.
    ScaledLoss,
    /// None: equal to the bit.
    Exact,
}

impl GpuTolerance {
    /// For sums in another order.
    pub const DEFAULT: GpuTolerance = GpuTolerance::Rounding { f32: 1e-5 };
}

/// A sample's op.
#[derive(Clone)]
pub enum SampleOp {
    /// One that models are traced from: its gradients are checked.
    Forward(Arc<dyn Differentiable>),
    /// One that passes or the optimizer emit.
    Plain(Arc<dyn Op>),
}

/// An input of a sample.
#[derive(Clone, Debug)]
pub struct SampleInput {
    /// Its type; plain floats are given as F32 and retyped by the check.
    pub ty: TensorType,
    /// Its contents.
    pub fill: Fill,
    /// True if models give it as a parameter, so that its gradient accumulates.
    pub parameter: bool,
    /// True if programs pass it in their compute type although the op accepts any type.
    pub computed: bool,
}

/// The contents of a sample's input.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Normal numbers of this mean and standard deviation.
    Normal(f32, f32),
    /// Integers from 0 to below this.
    Ids(i32),
    /// These values, rounded into the input's type.
    Values(Vec<f64>),
}

impl Sample {
    /// A sample of an op that models are traced from.
    pub(crate) fn forward(op: impl Differentiable + Sampled, inputs: impl Into<Vec<SampleInput>>) -> Self {
        let inputs = inputs.into();
        let types: Vec<TensorType> = inputs.iter().map(|input| input.ty).collect();
        let (tolerance, deterministic) = (op.tolerance(&types), op.is_deterministic());
        let op = SampleOp::Forward(Arc::new(op));
        Sample { op, inputs, roots: 1, loss: false, tolerance, deterministic }
    }

    /// A sample of an op without a backward.
    pub(crate) fn plain(op: impl Sampled, inputs: impl Into<Vec<SampleInput>>) -> Self {
        let inputs = inputs.into();
        let types: Vec<TensorType> = inputs.iter().map(|input| input.ty).collect();
        let (tolerance, deterministic) = (op.tolerance(&types), op.is_deterministic());
        let op = SampleOp::Plain(Arc::new(op));
        Sample { op, inputs, roots: 0, loss: false, tolerance, deterministic }
    }

    /// The sample with the first `n` outputs differentiated.
    pub fn roots(self, n: usize) -> Self {
        Sample { roots: n, ..self }
    }

    /// The op.
    pub fn op(&self) -> &dyn Op {
        match &self.op {
            SampleOp::Forward(op) => op.as_ref(),
            SampleOp::Plain(op) => op.as_ref(),
        }
    }

    /// The inputs as in a program that computes in `dtype`: operands that the op declares `Full` stay f32
    /// beside bf16.
    pub fn tensors(&self, dtype: DType, seed: u64) -> Vec<HostTensor> {
        let tensor =
            |(n, input): (usize, &SampleInput)| input.tensor(self.plain_type(n, dtype), seed, n as u32);
        self.inputs.iter().enumerate().map(tensor).collect()
    }

    /// True if the inputs in a bf16 program differ from those in an f32 program.
    pub fn differs_in_bf16(&self) -> bool {
        let differs = |(n, input): (usize, &SampleInput)| {
            input.ty.dtype == DType::F32 && self.plain_type(n, DType::BF16) == DType::BF16
        };
        self.inputs.iter().enumerate().any(differs)
    }

    /// The type of a floating-point input in a program that computes in `dtype`.
    fn plain_type(&self, input: usize, dtype: DType) -> DType {
        let is_kept = self.op().operand(input) == Operand::Full && !self.inputs[input].computed;
        if is_kept && dtype == DType::BF16 { DType::F32 } else { dtype }
    }

    /// The sample with the first output taken as a loss.
    pub fn loss(self) -> Self {
        Sample { loss: true, ..self }
    }
}

impl SampleInput {
    fn new(ty: TensorType, fill: Fill) -> Self {
        SampleInput { ty, fill, parameter: false, computed: false }
    }

    /// An activation of standard normal numbers.
    pub fn activation<const N: usize>(shape: [usize; N]) -> Self {
        SampleInput::new(TensorType::new(DType::F32, shape), Fill::Normal(0.0, 1.0))
    }

    /// A parameter of standard normal numbers.
    pub fn parameter<const N: usize>(shape: [usize; N]) -> Self {
        SampleInput { parameter: true, ..SampleInput::activation(shape) }
    }

    /// Integers below `below`.
    pub fn ids(len: usize, below: i32) -> Self {
        SampleInput::new(TensorType::new(DType::I32, [len]), Fill::Ids(below))
    }

    /// Control words.
    pub fn counters<const N: usize>(words: [u32; N]) -> Self {
        let fill = Fill::Values(words.into_iter().map(f64::from).collect());
        SampleInput::new(TensorType::new(DType::U32, [N]), fill)
    }

    /// A control word of rank 0: a flag.
    pub fn flag(word: u32) -> Self {
        let fill = Fill::Values(vec![word.into()]);
        SampleInput::new(TensorType::new(DType::U32, []), fill)
    }

    /// Marks an input that programs pass in their compute type although the op accepts any type.
    pub fn computed(self) -> Self {
        SampleInput { computed: true, ..self }
    }

    /// The input in a format that the check doesn't change.
    pub fn in_format(self, dtype: DType) -> Self {
        SampleInput { ty: self.ty.with_dtype(dtype), ..self }
    }

    /// The input's contents, plain floats as `dtype`; `seed` and `site` select the random numbers.
    fn tensor(&self, dtype: DType, seed: u64, site: u32) -> HostTensor {
        let ty = if self.ty.dtype == DType::F32 { self.ty.with_dtype(dtype) } else { self.ty };
        let rng = Philox::new(seed, 0, site);
        let values: Vec<f64> = match &self.fill {
            Fill::Normal(mean, std) => {
                let mut x = vec![0.0; ty.numel()];
                rng.fill_normal(*std, &mut x);
                x.into_iter().map(|x| f64::from(x + mean)).collect()
            }
            Fill::Ids(below) => {
                (0..ty.numel() as u64).map(|i| f64::from(rng.word(i) % *below as u32)).collect()
            }
            Fill::Values(values) => values.clone(),
        };
        HostTensor::from_f64(ty, &values)
    }

    /// The input with other contents.
    pub fn fill(self, fill: Fill) -> Self {
        SampleInput { fill, ..self }
    }
}

/// An op with samples.
pub(crate) trait Sampled: Op + Sized {
    /// Uses of the op at small odd sizes.
    fn samples() -> Vec<Sample>;

    /// A use that is large enough for several threads.
    fn large() -> Sample;

    /// The allowed distance of a GPU's results from the CPU's, with inputs of these types.
    fn tolerance(&self, _inputs: &[TensorType]) -> GpuTolerance {
        GpuTolerance::DEFAULT
    }

    /// True if a GPU gives the same bits every time.
    fn is_deterministic(&self) -> bool {
        true
    }

    /// Uses for GPUs alone: of sizes that its kernels tell apart, and too large for gradient checks.
    fn gpu_samples() -> Vec<Sample> {
        Vec::new()
    }

    /// Uses that keep a GPU of so many multiprocessors busy.
    fn busy_samples(_multiprocessors: usize) -> Vec<Sample> {
        Vec::new()
    }
}

/// Multiprocessors of an H100, for which the sizes of [`Sampled::busy_samples`] were chosen.
pub(crate) const MULTIPROCESSORS: usize = 132;
