//! The GEMMs of a linear layer, and what FP8 operands need to be said of them.

use crate::Op;
use std::sync::Arc;
use xtrain_tensor::{DType, Scaling};

/// A GEMM of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearGemm {
    /// `y_to = x_ti w_oi^T (+ bias_o)`: inputs x, w, bias.
    Fprop,
    /// `dx_ti = dy_to w_oi`: inputs dy, w.
    Dgrad,
    /// `dw_oi = dy_to^T x_ti`: inputs dy, x.
    Wgrad,
}

impl LinearGemm {
    /// All three.
    pub const ALL: [LinearGemm; 3] = [LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad];

    /// Its name, also that of its instances' role.
    pub const fn name(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "fprop",
            LinearGemm::Dgrad => "dgrad",
            LinearGemm::Wgrad => "wgrad",
        }
    }

    /// Rows and columns of the result, and the length of the sums, for a layer of so many outputs and inputs.
    pub const fn extents(self, tokens: usize, outputs: usize, inputs: usize) -> [usize; 3] {
        match self {
            LinearGemm::Fprop => [tokens, outputs, inputs],
            LinearGemm::Dgrad => [tokens, inputs, outputs],
            LinearGemm::Wgrad => [outputs, inputs, tokens],
        }
    }

    /// For each of its operands, true if the GEMM needs it transposed: FP8 tensor cores want both along the
    /// sums.
    pub(crate) const fn transposed(self) -> [bool; 2] {
        match self {
            LinearGemm::Fprop => [false, false],
            LinearGemm::Dgrad => [false, true],
            LinearGemm::Wgrad => [true, true],
        }
    }
}

/// How a tensor is cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// E4M3 or E5M2.
    pub format: DType,
    /// The elements that share a scale, seen as the GEMM sees the operand.
    pub scaling: Scaling,
    /// True if scales are powers of two.
    pub pow2_scales: bool,
    /// True if the scale, one for the whole tensor, comes from amaxes of earlier steps (delayed scaling).
    pub delayed: bool,
}

/// How a GEMM runs on FP8 operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledGemm {
    /// How its operands are cast.
    pub operands: [Quantization; 2],
    /// True if sums may stay in the tensor cores.
    pub fast_accumulation: bool,
}

/// The GEMMs that an op computes and that may run on FP8 operands ([`Op::gemms`]).
pub struct Gemms {
    /// Each at most once.
    pub list: Vec<OpGemm>,
    /// Returns the FP8 twin.
    pub in_fp8: Fp8Twin,
}

/// The op that computes the GEMMs for which there is a `Some`, in the order of [`LinearGemm::ALL`], on FP8
/// operands.
///
/// If both operands of the op's only GEMM are inputs, the twin takes numbers and scales of both, then the
/// op's further inputs.
///
/// Else the op casts its [`OperandSource::Inside`]s itself, a weight is input 1, and the twin takes the op's
/// inputs but for the weight; then, for fprop and dgrad, each if it is computed, numbers and scales of the
/// weight, or the weight; then the delayed scales of its casts. After the op's outputs it writes amaxes
/// `f32[1]`: of x and of dy, each if its scale is delayed, then one of all other casts.
pub type Fp8Twin = Box<dyn Fn([Option<ScaledGemm>; 3]) -> Arc<dyn Op>>;

/// One GEMM of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpGemm {
    /// Which of a linear layer's.
    pub kind: LinearGemm,
    /// Both operands.
    pub operands: [OperandSource; 2],
    /// Rows and columns of the result, and the length of the sums.
    pub extents: [usize; 3],
}

/// An operand of a GEMM of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperandSource {
    /// The op's n-th input.
    Input(usize),
    /// Computed or cut inside the op, which therefore casts it.
    Inside,
}

impl Gemms {
    /// The one GEMM that the op is, with its inputs 0 and 1 as operands.
    pub fn only(&self) -> Option<OpGemm> {
        match *self.list {
            [gemm] if gemm.operands == [OperandSource::Input(0), OperandSource::Input(1)] => Some(gemm),
            _ => None,
        }
    }
}
