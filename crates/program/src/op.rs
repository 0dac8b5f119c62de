//! The `Op` trait, and the types in which ops answer passes, engines and reports.

use crate::collective::Collective;
use crate::cost::{Arithmetic, Cost};
use crate::{LinearGemm, ScaledGemm};
use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use thiserror::Error;
use xtrain_rank::Groups;
use xtrain_tensor::{DType, TensorType};

/// An operation on tensors. A value of an implementing type holds the attributes of one use: eps, head
/// counts.
///
/// Kernels are not part of this trait: an executor looks them up by the implementing type in a
/// [`crate::KernelTable`]. Fusions are not either: they are a table of rewrites ([`crate::fuse`]). The list
/// of passes (`PIPELINE` of xtrain-train) says which pass calls which method. The plan and the engines call
/// [`Op::in_place`] and [`Op::collective`]; reports and estimates of time call [`Op::cost`].
pub trait Op: Any + Debug + Send + Sync {
    /// The name in dumps, traces and errors, for example `rms_norm`.
    fn name(&self) -> &'static str;

    /// The types of all outputs for inputs of these types, including outputs that are saved for the backward.
    ///
    /// # Errors
    /// The op does not accept these inputs.
    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError>;

    /// The treatment of an input by the precision pass.
    fn operand(&self, _input: usize) -> Operand {
        Operand::Compute
    }

    /// Pairs (output, input) of which the output is computed in the memory of the input. When the kernel
    /// starts, the output holds the input's values: the two share memory if nothing reads the input
    /// afterwards; else the executor copies them.
    fn in_place(&self) -> &[(usize, usize)] {
        &[]
    }

    /// True if the kernel can add to this output instead of overwriting it, as gradients of parameters need.
    fn accumulates(&self, _output: usize) -> bool {
        false
    }

    /// The collective that the op is, and the ranks that take part. Such an op has one output and no kernel:
    /// engines move its first input, and its instances run on the communication lane. Further inputs are for
    /// its backward.
    fn collective(&self) -> Option<(Collective, Groups)> {
        None
    }

    /// The work of one run, from which its time is estimated. By default, each input is read and each output
    /// written once.
    fn cost(&self, inputs: &[TensorType], outputs: &[TensorType]) -> Cost {
        Cost::of_operands(Arithmetic::None, inputs, outputs)
    }

    /// True if recomputing this output is nearly free (norms, activations), given the outputs that are not
    /// cheap. The recompute policy `norms` does not save such outputs. Called for forward ops.
    fn is_cheap(&self, _output: usize) -> bool {
        false
    }

    /// The method by which the backward recomputes the outputs that are not `saved`.
    fn rebuild(&self, _saved: &[bool]) -> Rebuild {
        Rebuild::Same
    }

    /// True if the weights that the op reads are gathered apart from the rest of its block
    /// ([`crate::shard`]), because they are much larger.
    fn gathers_apart(&self) -> bool {
        false
    }

    /// The GEMMs of a linear layer that the op computes for inputs of these types and that may run on FP8
    /// operands.
    fn gemms(&self, _inputs: &[TensorType]) -> Option<Gemms> {
        None
    }
}

/// The treatment of an input by the precision pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Converted: an activation, or a parameter that is read in the compute type.
    Compute,
    /// Not converted: norm weights, tables, control scalars.
    Full,
}

/// The method by which the backward recomputes the outputs of an instance that were not saved.
pub enum Rebuild {
    /// This op runs again, on the same inputs. For ops that assign all of their outputs.
    Same,
    /// None: the op writes state or adds to an output, so it runs once and its outputs are saved.
    Never,
    /// This op runs. Running it in addition to the original changes no value: if the original adds to an
    /// output, that output is a maximum.
    By {
        /// The op.
        op: Arc<dyn Op>,
        /// Its inputs: inputs and saved outputs of the original.
        inputs: Vec<Source>,
        /// For each output of `op`, the output of the original that has equal bits.
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

/// The GEMMs of an op that may run on FP8 operands ([`Op::gemms`]).
pub struct Gemms {
    /// The GEMMs; each kind appears at most once.
    pub list: Vec<OpGemm>,
    /// Returns the op that computes them on FP8 operands.
    pub in_fp8: Fp8Twin,
}

/// Constructor of an op's FP8 twin. The twin computes on FP8 operands the GEMMs whose entry is `Some`, in the
/// order of [`LinearGemm::ALL`].
///
/// If the op is a single GEMM with both operands as inputs, the inputs of the twin are numbers and scales of
/// both operands, then the op's further inputs.
///
/// Otherwise the op has a weight as input 1 and casts its operands [`OperandSource::Inside`] itself. The
/// inputs of the twin are the op's inputs without the weight; then, for each of fprop and dgrad that the op
/// computes, numbers and scales of the weight if that GEMM is `Some`, else the weight; then the delayed
/// scales of the op's casts. The outputs of the twin are the op's outputs, then amaxes `f32[1]`: that of x
/// and that of dy, each if its scale is delayed, then one amax of all other casts.
pub type Fp8Twin = Box<dyn Fn([Option<ScaledGemm>; 3]) -> Arc<dyn Op>>;

/// One GEMM of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpGemm {
    /// Fprop, dgrad or wgrad.
    pub kind: LinearGemm,
    /// The source of each operand.
    pub operands: [OperandSource; 2],
    /// Rows and columns of the result, and the inner extent, over which it sums.
    pub extents: [usize; 3],
}

/// The source of an operand of a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    /// The op's n-th input.
    Input(usize),
    /// Computed or sliced inside the op, which therefore casts it itself.
    Inside,
}

impl Gemms {
    /// The GEMM of an op that is a single GEMM with inputs 0 and 1 as operands.
    pub fn only(&self) -> Option<OpGemm> {
        match *self.list {
            [gemm] if gemm.operands == [OperandSource::Input(0), OperandSource::Input(1)] => Some(gemm),
            _ => None,
        }
    }
}

/// The ops that the first passes insert. The caller supplies them, because this crate names no op.
pub trait PassOps {
    /// `a + b`, computed in the memory of `a`.
    fn add(&self) -> Arc<dyn Op>;
    /// One input converted to `dtype`.
    fn cast(&self, dtype: DType) -> Arc<dyn Op>;
}

/// The error of an op that rejects its operands.
#[derive(Clone, Error, PartialEq, Eq)]
#[error("{0}")]
pub struct OpError(pub String);

xtrain_tensor::debug_as_display!(OpError);

impl OpError {
    /// Returns an error if `condition` is false.
    pub fn ensure(condition: bool, message: impl FnOnce() -> String) -> Result<(), OpError> {
        if condition { Ok(()) } else { Err(OpError(message())) }
    }

    /// Returns an error unless there are exactly `n` inputs.
    pub fn arity(op: &str, inputs: &[TensorType], n: usize) -> Result<(), OpError> {
        OpError::ensure(inputs.len() == n, || format!("{op} takes {n} inputs, not {}", inputs.len()))
    }
}
