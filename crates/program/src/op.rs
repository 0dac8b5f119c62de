//! The `Op` trait: shape inference, cost, and for ops of models the backward.

use crate::cost::{Arithmetic, Cost};
use crate::{Backward, Gemms};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use thiserror::Error;
use xtrain_tensor::{DType, TensorType};

/// An operation on tensors. An implementor is one instance's attributes (eps, head counts): a plain value.
///
/// Kernels are not part of this trait; an executor finds them by the implementor's type in a
/// [`crate::KernelTable`]. Nor are fusions: they are a table of rewrites ([`crate::fuse`]). Which pass calls
/// which method is said where the passes are listed (`PIPELINE` of xtrain-train); the plan and the engines
/// call [`Op::in_place`], reports and estimates of time call [`Op::cost`].
pub trait Op: Any + Debug + Send + Sync {
    /// Its name in dumps, traces and errors, e.g. `rms_norm`.
    fn name(&self) -> &'static str;

    /// The types of the outputs for inputs of these types, those saved for the backward among them, or an
    /// error about the inputs.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError>;

    /// How the precision pass may treat an input.
    fn operand(&self, _input: usize) -> Operand {
        Operand::Compute
    }

    /// Pairs (output, input) where the output is computed in the input's memory. When the kernel starts, the
    /// output already holds the input's values: executors share the memory if the input dies here, else they
    /// copy.
    fn in_place(&self) -> &[(usize, usize)] {
        &[]
    }

    /// True if the kernel can add to this output instead of overwriting it. Gradients of parameters need it.
    fn accumulates(&self, _output: usize) -> bool {
        false
    }

    /// The work of one run, on which estimates of its time are based: by default, to read each input and to
    /// write each output once.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_operands(Arithmetic::None, inputs, outputs)
    }

    /// True if recomputing this output is nearly free (norms, activations), given the outputs that are not:
    /// such outputs the recompute policy `norms` leaves unsaved. Called for forward ops.
    fn is_cheap(&self, _output: usize) -> bool {
        false
    }

    /// How to compute the outputs that are not `saved`.
    fn rebuild(&self, _saved: &[bool]) -> Rebuild {
        Rebuild::Same
    }

    /// The linear layer's GEMMs that the op computes and that may run on FP8 operands, for inputs of these
    /// types.
    fn gemms(&self, _inputs: &[TensorType]) -> Option<Gemms> {
        None
    }
}

/// An op of models, with its backward.
pub trait Differentiable: Op {
    /// Emits the ops that compute the gradients of the inputs from those of the outputs, and sets them with
    /// [`Backward::set_grad`].
    fn backward(&self, cx: &mut Backward<'_>) -> Result<(), OpError>;
}

/// How the precision pass may treat an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// An activation, or a parameter read in the compute type.
    Compute,
    /// Left as it is: norm weights, tables, control scalars.
    Full,
}

/// How the outputs of an instance that were not saved are computed.
pub enum Rebuild {
    /// By the same op from the same inputs. For ops that only assign their outputs.
    Same,
    /// Not at all: the op writes state or adds to an output, so it runs once and its outputs are saved.
    Never,
    /// By this op. Running it beside the original changes nothing, even if the original adds to an output:
    /// that is a maximum.
    By {
        /// The op.
        op: Arc<dyn Op>,
        /// Its inputs, as inputs and saved outputs of the original.
        inputs: Vec<Source>,
        /// For each output of `op`, the output of the original that it equals to the bit.
        outputs: Vec<usize>,
    },
}

/// An operand of the original instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its n-th input.
    Input(usize),
    /// Its n-th output.
    Output(usize),
}

/// The ops that the first passes insert. Callers hand them in, because this crate names none.
pub trait PassOps {
    /// `a + b`, in place of `a`.
    fn add(&self) -> Arc<dyn Op>;
    /// One input converted to `dtype`.
    fn cast(&self, dtype: DType) -> Arc<dyn Op>;
}

/// The error of an op that refuses its operands, with their shapes.
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
