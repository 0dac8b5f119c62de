//! The list of all ops: their kernels, the ops that passes insert, and the samples that checks and benchmarks draw from.

use crate::quantize::{Dequantize, Quantize};
use std::sync::Arc;
use xtrain_cuda::{CudaKernel, KernelSource};
use xtrain_program::measure_casts::MeasureOps;
use xtrain_program::quantize::QuantizeOps;
use xtrain_program::{Differentiable, KernelTable, Op, Operand, PassOps, Quantization};
use xtrain_tensor::{CpuKernel, DType, HostTensor, Philox, Scaling, TensorType};

/// The CPU kernels by op.
pub type CpuKernels = KernelTable<dyn CpuKernel>;

/// The kernels on a card by op.
pub type CudaKernels = KernelTable<dyn CudaKernel>;

/// An op with inputs to try it on.
pub struct Sample {
    /// The op.
    pub op: SampleOp,
    /// Its inputs.
    pub inputs: Vec<SampleInput>,
    /// How many of the first outputs are differentiated; those after them are only saved for the backward.
    pub roots: usize,
    /// Whether the first output is a loss, whose gradient is one.
    pub loss: bool,
}

/// The op of a sample.
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
    /// Whether models give it as a parameter, so that its gradient accumulates.
    pub parameter: bool,
    /// True if programs pass it in their compute type although the op accepts any type.
    pub computed: bool,
}

/// How a sample's input is filled.
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
    pub fn forward(op: impl Differentiable, inputs: impl Into<Vec<SampleInput>>) -> Self {
        Sample { op: SampleOp::Forward(Arc::new(op)), inputs: inputs.into(), roots: 1, loss: false }
    }

    /// A sample of an op without a backward.
    pub fn plain(op: impl Op, inputs: impl Into<Vec<SampleInput>>) -> Self {
        Sample { op: SampleOp::Plain(Arc::new(op)), inputs: inputs.into(), roots: 0, loss: false }
    }

    /// The same with the first `n` outputs differentiated.
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

    /// The inputs as a program that computes in `dtype` has them: what the op keeps as it is stays f32 beside bf16.
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

    /// The same with the first output taken as a loss.
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

    /// The same in a format that the check keeps.
    pub fn in_format(self, dtype: DType) -> Self {
        SampleInput { ty: self.ty.with_dtype(dtype), ..self }
    }

    /// The input itself, its plain floats as `dtype`; `seed` and `site` say which random numbers.
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

    /// The same filled otherwise.
    pub fn fill(self, fill: Fill) -> Self {
        SampleInput { fill, ..self }
    }
}

/// What the registry wants of an op.
pub(crate) trait Registered: Op + CpuKernel + Sized {
    /// Uses of the op at small odd sizes.
    fn samples() -> Vec<Sample>;

    /// A use that is large enough for several threads.
    fn large() -> Sample;
}

/// What the registry wants of an op that cards compute.
pub(crate) trait OnCard: Op + CudaKernel + Sized {
    /// The sources of its kernels.
    const SOURCES: &'static [KernelSource];

    /// Uses that run on a GPU alone: of sizes that its kernels tell apart, and too large for gradient checks.
    fn card_samples() -> Vec<Sample> {
        Vec::new()
    }

    /// Uses that keep a GPU of so many multiprocessors busy.
    fn busy_samples(_multiprocessors: usize) -> Vec<Sample> {
        Vec::new()
    }
}

/// Multiprocessors of an H100, for which the sizes of [`OnCard::busy_samples`] were chosen.
pub(crate) const MULTIPROCESSORS: usize = 132;

/// Declares the list of ops; `: card` stands behind those that cards compute.
macro_rules! ops {
    ($($op:path $(: $card:ident)?),* $(,)?) => {
        /// The CPU kernels of all ops.
        pub fn cpu_kernels() -> CpuKernels {
            let mut table = CpuKernels::default();
            $(table.register::<$op>(|op| op);)*
            table
        }

        /// The kernels on a card.
        pub fn cuda_kernels() -> CudaKernels {
            let mut table = CudaKernels::default();
            $($(on!($card, table.register::<$op>(|op| op));)?)*
            table
        }

        /// A large sample of each op.
        pub fn large_samples() -> Vec<Sample> {
            vec![$(<$op as Registered>::large()),*]
        }

        /// Samples of all ops.
        pub fn samples() -> Vec<Sample> {
            let mut all = Vec::new();
            $(all.extend(<$op as Registered>::samples());)*
            all
        }

        /// Samples that run on a GPU alone, one of so many multiprocessors.
        pub fn card_samples(multiprocessors: usize) -> Vec<Sample> {
            let mut all = Vec::new();
            $($(on!($card, all.extend(<$op as OnCard>::card_samples()));)?)*
            $($(on!($card, all.extend(<$op as OnCard>::busy_samples(multiprocessors)));)?)*
            all
        }

        /// The sources of all kernels, each once.
        pub fn kernel_sources() -> Vec<KernelSource> {
            let mut all: Vec<KernelSource> = Vec::new();
            let mut add = |sources: &[KernelSource]| {
                for source in sources {
                    if all.iter().all(|s| s.name != source.name) {
                        all.push(*source);
                    }
                }
            };
            $($(on!($card, add(<$op as OnCard>::SOURCES));)?)*
            all
        }
    };
}

/// What is done for an op with the mark `card`, the only one that there is.
macro_rules! on {
    (card, $what:expr) => {
        $what
    };
}

ops![
    crate::adamw::AdamW: card,
    crate::add::Add: card,
    crate::attention::Attention: card,
    crate::attention::AttentionGrad: card,
    crate::cached_attention::CachedAttention: card,
    crate::cast::Cast: card,
    crate::cast_statistics::CastStatistics: card,
    crate::clip::Clip: card,
    crate::delayed_scaling::DelayedScaling: card,
    crate::dropout::Dropout: card,
    crate::embedding::Embedding: card,
    crate::embedding::EmbeddingGrad: card,
    crate::grad_norm::GradNorm: card,
    crate::linear::Linear: card,
    crate::linear::LinearDgrad: card,
    crate::linear::LinearWgrad: card,
    crate::linear::BiasGrad: card,
    crate::linear_cross_entropy::LinearCrossEntropy: card,
    crate::linear_cross_entropy::LinearCrossEntropyGrad: card,
    crate::linear_cross_entropy::ScaledLinearCrossEntropy: card,
    crate::normal::Normal: card,
    crate::qk_norm_rope::QkNormRope: card,
    crate::qk_norm_rope::QkNormRopeGrad: card,
    crate::quantize::Dequantize: card,
    crate::quantize::Quantize: card,
    crate::rms_norm::RmsNorm: card,
    crate::rms_norm::AddRmsNorm: card,
    crate::rms_norm::Rms: card,
    crate::rms_norm::RmsNormGrad: card,
    crate::scaled_matmul::ScaledMatmul: card,
    crate::swiglu::Swiglu: card,
    crate::swiglu::SwigluGrad: card,
    crate::swiglu::SwigluSaving: card,
];

/// The ops that passes insert.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassSet;

impl PassOps for PassSet {
    fn add(&self) -> Arc<dyn Op> {
        Arc::new(crate::add::Add)
    }

    fn cast(&self, dtype: DType) -> Arc<dyn Op> {
        Arc::new(crate::cast::Cast { to: dtype })
    }
}

impl QuantizeOps for PassSet {
    fn quantize(&self, quantization: Quantization, layouts: [bool; 2]) -> Arc<dyn Op> {
        Arc::new(Quantize::of_operand(quantization, layouts))
    }

    fn dequantize(&self, out: DType) -> Arc<dyn Op> {
        Arc::new(Dequantize { out, scaling: Scaling::Tile })
    }
}

impl MeasureOps for PassSet {
    fn cast_statistics(&self, scaling: Scaling, transposed: bool) -> Arc<dyn Op> {
        Arc::new(crate::cast_statistics::CastStatistics { scaling, transposed })
    }
}
