//! What an op is: shape inference, cost, and, for what models are made of, its backward.

use crate::Backward;
use crate::quantized::{LinearGemm, Quantization, ScaledGemm};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use thiserror::Error;
use xtrain_tensor::{DType, TensorType};

/// An operation on tensors. An implementor is one instance's attributes (eps, head counts): a plain value.
///
/// Kernels are not part of this trait; an executor finds them by the implementor's type in a [`crate::KernelTable`].
///
/// Passes call the hooks in their own order, each on what those before it left in the program. [`Op::infer`] is called wherever an instance is
/// made. Then precision asks for [`Op::operand`] and the backward for [`Op::accumulates`]; kept for [`Op::may_keep_in_fp8`], [`Op::linear_gemm`]
/// and [`Op::keeping`]; quantized for [`Op::linear_gemm`], [`Op::inner_gemms`] and [`Op::with_fp8_gemms`]; fuse for [`Op::fuse`], of what has
/// been fused too, until no two become one. Recompute comes behind it and asks for [`Op::may_repeat`], [`Op::is_cheap`] and [`Op::rebuild`],
/// then for [`Op::with_outputs`] in the forward, and last for [`Op::remaking`] in the backward. Measured comes behind all and the update: it
/// asks what makes a reader's input for [`Op::casting`], then the reader for [`Op::with_known_amax`], and only then that maker for
/// [`Op::measuring`]. So an op that a pass puts in answers the hooks of the passes behind: a fused cast is cheap, rebuilt and repeated as the
/// plain one is. The plan and the engines ask for [`Op::in_place`], and what reports for [`Op::cost`].
pub trait Op: Any + Debug + Send + Sync {
    /// The op's name in dumps, traces and errors, e.g. `rms_norm`.
    fn name(&self) -> &'static str;

    /// The types of the outputs for inputs of these types, those saved for the backward among them, or what is wrong with the inputs.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError>;

    /// How the precision pass may treat an input.
    fn operand(&self, _input: usize) -> Operand {
        Operand::Compute
    }

    /// Pairs (output, input) where the output is computed in the input's memory. Executors hand the kernel the output already
    /// holding the input's values: shared memory where the input dies here, else a copy.
    fn in_place(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Whether the kernel can add to an output instead of overwriting it. Gradients of parameters need it.
    fn accumulates(&self, _output: usize) -> bool {
        false
    }

    /// The arithmetic of one run: floating-point operations (a multiply-add counts two). Bytes follow from the operands.
    fn cost(&self, _inputs: &[TensorType], _outputs: &[TensorType]) -> Cost {
        Cost::default()
    }

    /// Which product of a linear layer it is, where it is one that may be computed of FP8 factors ([`crate::quantized`]).
    fn linear_gemm(&self) -> Option<LinearGemm> {
        None
    }

    /// Which products of a linear layer it has inside, where they may be computed of FP8 factors ([`crate::quantized`]): of its inputs 0
    /// and 1, x and the weight, and of what it makes and nobody else sees in the place of dy. [`Op::with_fp8_gemms`] then has an op for
    /// any of them.
    fn inner_gemms(&self) -> Vec<LinearGemm> {
        Vec::new()
    }

    /// The op that computes these products, in the order of [`LinearGemm::ALL`], of FP8 factors. It makes what this one makes and, behind that,
    /// largest magnitudes `f32[1]`: of x and of what is in the place of dy, each if it is cast with a scale of earlier steps, then one of all
    /// that is cast otherwise. It takes x and the inputs behind the weight;
    /// then, for each product that reads the weight, that as this one does, or numbers and scales; then the scales of its casts that are of
    /// earlier steps.
    fn with_fp8_gemms(&self, _: [Option<ScaledGemm>; 3]) -> Option<Arc<dyn Op>> {
        None
    }

    /// Whether making this output again is nearly free (norms, activations), given the outputs that are not: what the recompute
    /// policy `norms` leaves unsaved. Asked of what runs forward.
    fn is_cheap(&self, _output: usize) -> bool {
        false
    }

    /// Whether its input may be kept in FP8 for the backward ([`crate::kept`]), which makes its output again of that. Asked of what runs
    /// forward, of one input.
    fn may_keep_in_fp8(&self) -> bool {
        false
    }

    /// The op that also makes, behind what this one makes, numbers and scales of its input in this format, which are kept so. None where
    /// that is a cast of its own.
    fn keeping(&self, _: Quantization) -> Option<Arc<dyn Op>> {
        None
    }

    /// Whether a second run with the same inputs changes nothing more, even where the first one added to an output: a largest value stays
    /// what it is. What may not be repeated is kept, whatever is recomputed.
    fn may_repeat(&self) -> bool {
        false
    }

    /// How to make the outputs that were not kept, given which were. The default runs the same op on the same inputs.
    fn rebuild(&self, _kept: &[bool]) -> Option<Rebuild> {
        None
    }

    /// The op that makes fewer of the outputs, and which, where it is known which are read.
    fn with_outputs(&self, _read: &[bool]) -> Option<(Arc<dyn Op>, Vec<usize>)> {
        None
    }

    /// How this op and the only `reader` of an output, which is its input at `position`, become one that never writes that output
    /// ([`crate::fuse`]).
    fn fuse(&self, _output: usize, _reader: &dyn Op, _position: usize) -> Option<Fusion> {
        None
    }

    /// The op that makes this one's outputs and, behind them, the largest magnitude of this output as it is stored, `f32[1]`
    /// ([`crate::measured`]).
    fn measuring(&self, _output: usize) -> Option<Arc<dyn Op>> {
        None
    }

    /// The op that makes this one's outputs and, behind them, those of `reader`: `made` says of each of the reader's inputs which output of
    /// this one it is, as it is stored, and the first is one. It takes the reader's other inputs behind this one's ([`crate::measured`]).
    fn casting(&self, _made: &[Option<usize>], _reader: &dyn Op) -> Option<Arc<dyn Op>> {
        None
    }

    /// The op that takes the largest magnitude of its first input, `f32[1]` behind its inputs, where this one would measure it.
    fn with_known_amax(&self) -> Option<Arc<dyn Op>> {
        None
    }

    /// The op that makes this one's outputs and, behind them, the first output of `other`, whose inputs are this one's at `positions`. A
    /// gradient that reads what `other` reads makes its output again on the way, where running `other` would read it once more.
    fn remaking(&self, _other: &dyn Op, _positions: &[usize]) -> Option<Arc<dyn Op>> {
        None
    }
}

/// An op that models are traced from: it brings its own backward.
pub trait Differentiable: Op {
    /// Emits the ops that form the gradients of the inputs from those of the outputs, and hands them to
    /// [`Backward::set_grad`].
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError>;
}

/// How the precision pass may treat an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// An activation, or a parameter read in the compute type.
    Compute,
    /// Kept as it is: norm weights, tables, control scalars.
    Full,
}

/// The arithmetic of one run of an op.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Floating-point operations; a multiply-add counts two. A float, because a step of a large model has more than 64 bits count.
    pub flops: f64,
}

/// A cheaper way to make the outputs of an instance that were not kept.
pub struct Rebuild {
    /// The op that makes them.
    pub op: Arc<dyn Op>,
    /// Its inputs, as inputs and kept outputs of the original.
    pub inputs: Vec<Source>,
    /// For each output of `op`, which output of the original it is equal to (to the bit).
    pub outputs: Vec<usize>,
}

/// An op and the only reader of one of its outputs in other terms: that output is never written.
pub struct Fusion {
    /// What makes the op's other outputs, in their order, and behind them what the new one needs beside; and which of the op's inputs it
    /// reads. None where nothing is left to make, or the new op makes them.
    pub rest: Option<(Arc<dyn Op>, Vec<usize>)>,
    /// The op in the reader's place, which makes the reader's outputs and behind them, where nothing else does, the op's others.
    pub op: Arc<dyn Op>,
    /// Its inputs.
    pub inputs: Vec<Fused>,
}

/// An input of what an op and its reader become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fused {
    /// An input or another output of the op.
    Made(Source),
    /// The n-th of what the rest makes behind the op's other outputs.
    Beside(usize),
    /// The reader's n-th input.
    Read(usize),
}

/// An operand of the original instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its n-th input.
    Input(usize),
    /// Its n-th output.
    Output(usize),
}

/// The few ops that passes insert. Handed in, because this crate names none.
pub trait PassOps {
    /// `a + b`, in place of `a`.
    fn add(&self) -> Arc<dyn Op>;
    /// One input converted to `dtype`.
    fn cast(&self, dtype: DType) -> Arc<dyn Op>;
}

/// Operands that an op cannot take: what was wrong and with which shapes.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct OpError(pub String);

impl OpError {
    /// An error if `condition` does not hold.
    pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), OpError> {
        if condition { Ok(()) } else { Err(OpError(message())) }
    }

    /// An error unless there are exactly `n` inputs.
    pub fn arity(op: &str, inputs: &[TensorType], n: usize) -> Result<(), OpError> {
        OpError::ensure(inputs.len() == n, || format!("{op} takes {n} inputs, not {}", inputs.len()))
    }
}
