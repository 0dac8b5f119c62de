//! Samples: ops with example inputs, from which the tests of all ops are generated.
//!
//! Compiled only for tests, by the feature `samples`.

use std::ops::Range;
use std::sync::Arc;
use xtrain_program::{Differentiable, Op, Operand};
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

/// An op with example inputs.
pub struct Sample {
    /// The op.
    pub op: SampleOp,
    /// Its inputs.
    pub inputs: Vec<SampleInput>,
    /// Number of outputs that are differentiated; the remaining ones are only saved for the backward.
    pub roots: usize,
    /// True if the first output is a loss, whose gradient is one.
    pub loss: bool,
    /// Allowed difference between GPU and CPU results.
    pub tolerance: GpuTolerance,
    /// True if repeated runs on a GPU give equal bits.
    pub deterministic: bool,
}

/// Allowed difference between an op's results on a GPU and on the CPU (docs/numerics.md).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GpuTolerance {
    /// A relative error for outputs in f32, and for sums in f64. Outputs in bf16 may differ by their
    /// rounding; all others must be equal to the bit.
    Rounding {
        /// The relative error.
        f32: f64,
    },
    /// A relative error of 4e-3 for outputs in f32. Operands are rounded to bf16 after they are scaled, and
    /// the mean of these errors is not 0: FP8 values times one scale have as many relative errors as
    /// mantissas.
    RoundedOperands,
    /// [`GpuTolerance::DEFAULT`], with a relative error of 3e-2 for outputs in FP8, which are cast from
    /// values that the op computes.
    FusedCast {
        /// True if outputs in bf16 must be equal to the bit: stochastic rounding does not depend on the
        /// device.
        exact_bf16: bool,
    },
    /// A relative error of 4e-3 for losses and of 3e-2 for all other outputs: GEMMs run on casts of values
    /// that the op computes.
    ScaledLoss,
    /// Equal to the bit.
    Exact,
}

impl GpuTolerance {
    /// The tolerance of ops whose GPU kernel sums in another order than the CPU kernel.
    pub const DEFAULT: GpuTolerance = GpuTolerance::Rounding { f32: 1e-5 };
}

/// A sample's op.
#[derive(Clone)]
pub enum SampleOp {
    /// An op of the model's forward, whose gradients are checked.
    Forward(Arc<dyn Differentiable>),
    /// An op that a pass or the optimizer emits.
    Plain(Arc<dyn Op>),
}

/// An input of a sample.
#[derive(Clone, Debug)]
pub struct SampleInput {
    /// Its type. Plain floats are F32 here; the checks also run them in other types.
    pub ty: TensorType,
    /// Its contents.
    pub fill: Fill,
    /// True if it is a parameter in models, so that its gradient accumulates.
    pub parameter: bool,
    /// True if programs pass it in their compute type although the op accepts any type.
    pub computed: bool,
    /// An axis and the first of its indices whose elements are NaNs: a tail that the op must not read.
    pub tail: Option<(usize, usize)>,
}

/// The contents of a sample's input.
#[derive(Clone, Debug)]
pub enum Fill {
    /// Normal numbers of this mean and standard deviation.
    Normal(f32, f32),
    /// Standard normal numbers in these rows, and zeros in the others: a ragged tensor.
    NormalRows(Vec<Range<usize>>),
    /// Integers from 0 up to, not including, this.
    Ids(i32),
    /// These values, rounded into the input's type.
    Values(Vec<f64>),
    /// The values of this function of an element's index, rounded into the input's type. They are computed
    /// when a test needs them: a test process lists thousands of samples and runs one.
    Each(Values),
}

/// A function of an element's index.
#[derive(Clone)]
pub struct Values(Arc<dyn Fn(usize) -> f64 + Send + Sync>);

impl std::fmt::Debug for Values {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("values by index")
    }
}

impl Fill {
    /// The values of a function of an element's index.
    pub(crate) fn each(value: impl Fn(usize) -> f64 + Send + Sync + 'static) -> Fill {
        Fill::Each(Values(Arc::new(value)))
    }
}

impl Sample {
    /// A sample of an op with a backward.
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

    /// The inputs in a program that computes in `dtype`; operands that the op declares `Full` stay f32 in a
    /// bf16 program.
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
        let stays_f32 = self.op().operand(input) == Operand::Full && !self.inputs[input].computed;
        if stays_f32 && dtype == DType::BF16 { DType::F32 } else { dtype }
    }

    /// The sample with the first output taken as a loss.
    pub fn loss(self) -> Self {
        Sample { loss: true, ..self }
    }
}

impl SampleInput {
    fn new(ty: TensorType, fill: Fill) -> Self {
        SampleInput { ty, fill, parameter: false, computed: false, tail: None }
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

    /// Whole numbers of these values.
    pub fn integers<const N: usize>(shape: [usize; N], values: impl IntoIterator<Item = i32>) -> Self {
        let fill = Fill::Values(values.into_iter().map(f64::from).collect());
        SampleInput::new(TensorType::new(DType::I32, shape), fill)
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

    /// The input in a type that the checks do not change.
    pub fn in_format(self, dtype: DType) -> Self {
        SampleInput { ty: self.ty.with_dtype(dtype), ..self }
    }

    /// The input as a tensor, plain floats in `dtype`; `seed` and `site` select the random numbers.
    fn tensor(&self, dtype: DType, seed: u64, site: u32) -> HostTensor {
        let ty = if self.ty.dtype == DType::F32 { self.ty.with_dtype(dtype) } else { self.ty };
        let rng = Philox::new(seed, 0, site);
        let mut values: Vec<f64> = match &self.fill {
            Fill::Normal(mean, std) => {
                let mut x = vec![0.0; ty.numel()];
                rng.fill_normal(*std, &mut x);
                x.into_iter().map(|x| f64::from(x + mean)).collect()
            }
            Fill::NormalRows(live) => {
                let (rows, cols) = ty.shape.rows_cols();
                let (mut x, mut ragged) = (vec![0.0; rows * cols], vec![0.0; rows * cols]);
                rng.fill_normal(1.0, &mut x);
                for rows in live {
                    let range = rows.start * cols..rows.end * cols;
                    ragged[range.clone()].copy_from_slice(&x[range]);
                }
                ragged.into_iter().map(f64::from).collect()
            }
            Fill::Ids(below) => {
                (0..ty.numel() as u64).map(|i| f64::from(rng.word(i) % *below as u32)).collect()
            }
            Fill::Values(values) => values.clone(),
            Fill::Each(Values(value)) => (0..ty.numel()).map(value.as_ref()).collect(),
        };
        let cols = if ty.shape.len() == 1 { 1 } else { ty.shape.rows_cols().1.max(1) };
        for (n, value) in values.iter_mut().enumerate() {
            if self.tail.is_some_and(|(axis, first)| [n / cols, n % cols][axis] >= first) {
                *value = f64::NAN;
            }
        }
        HostTensor::from_f64(ty, &values)
    }

    /// The input with NaNs from an index of its rows (axis 0) or of its columns (axis 1) on.
    pub(crate) fn without(self, axis: usize, first: usize) -> Self {
        SampleInput { tail: Some((axis, first)), ..self }
    }

    /// The input with other contents.
    pub fn fill(self, fill: Fill) -> Self {
        SampleInput { fill, ..self }
    }
}

/// An op with samples.
pub(crate) trait Sampled: Op + Sized {
    /// Samples of small odd sizes.
    fn samples() -> Vec<Sample>;

    /// A sample large enough for several CPU threads.
    fn large() -> Sample;

    /// Allowed difference between GPU and CPU results, for inputs of these types.
    fn tolerance(&self, _inputs: &[TensorType]) -> GpuTolerance {
        GpuTolerance::DEFAULT
    }

    /// True if repeated runs on a GPU give equal bits.
    fn is_deterministic(&self) -> bool {
        true
    }

    /// Samples for GPUs only: sizes at which the kernels take different paths, too large for gradient checks.
    fn gpu_samples() -> Vec<Sample> {
        Vec::new()
    }

    /// Samples large enough to occupy a GPU with this number of multiprocessors.
    fn busy_samples(_multiprocessors: usize) -> Vec<Sample> {
        Vec::new()
    }
}

/// Multiprocessors of an H100, to which the sizes of [`Sampled::busy_samples`] are relative.
pub(crate) const MULTIPROCESSORS: usize = 132;
