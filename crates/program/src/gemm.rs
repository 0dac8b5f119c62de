//! The GEMMs of a linear layer, their operands, and the FP8 formats of these.

use crate::Origin;
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

    /// The name in recipes and reports.
    pub const fn name(self) -> &'static str {
        match self {
            LinearGemm::Fprop => "fprop",
            LinearGemm::Dgrad => "dgrad",
            LinearGemm::Wgrad => "wgrad",
        }
    }

    /// Rows and columns of the result, and the inner extent, for a layer with these numbers of outputs and
    /// inputs.
    pub const fn extents(self, tokens: usize, outputs: usize, inputs: usize) -> [usize; 3] {
        match self {
            LinearGemm::Fprop => [tokens, outputs, inputs],
            LinearGemm::Dgrad => [tokens, inputs, outputs],
            LinearGemm::Wgrad => [outputs, inputs, tokens],
        }
    }

    /// For each operand, true if the GEMM reads it transposed: in FP8, tensor cores need both operands
    /// contiguous along the inner extent.
    pub(crate) const fn transposed(self) -> [bool; 2] {
        match self {
            LinearGemm::Fprop => [false, false],
            LinearGemm::Dgrad => [false, true],
            LinearGemm::Wgrad => [true, true],
        }
    }
}

/// An operand of the GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinearOperand {
    /// x.
    Input,
    /// w.
    Weight,
    /// dy.
    OutputGradient,
}

impl LinearOperand {
    /// All three.
    pub const ALL: [LinearOperand; 3] =
        [LinearOperand::Input, LinearOperand::Weight, LinearOperand::OutputGradient];

    /// The name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            LinearOperand::Input => "input",
            LinearOperand::Weight => "weight",
            LinearOperand::OutputGradient => "output gradient",
        }
    }

    /// The GEMMs that read it, each with the index of the operand and true if it is transposed.
    pub(crate) const fn reads(self) -> [(LinearGemm, usize, bool); 2] {
        match self {
            LinearOperand::Input => [(LinearGemm::Fprop, 0, false), (LinearGemm::Wgrad, 1, true)],
            LinearOperand::Weight => [(LinearGemm::Fprop, 1, false), (LinearGemm::Dgrad, 1, true)],
            LinearOperand::OutputGradient => [(LinearGemm::Dgrad, 0, false), (LinearGemm::Wgrad, 0, true)],
        }
    }
}

/// A tensor that is cast as an operand of a linear layer's GEMMs, and so may have a scale of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CastOperand {
    /// x.
    Input,
    /// x as wgrad alone reads it: fprop is not in FP8, or x is restored from fewer bits.
    WgradInput,
    /// w.
    Weight,
    /// dy.
    OutputGradient,
}

impl CastOperand {
    /// All four.
    pub const ALL: [CastOperand; 4] =
        [CastOperand::Input, CastOperand::WgradInput, CastOperand::Weight, CastOperand::OutputGradient];

    /// The name in reports, and of delayed scales.
    pub const fn name(self) -> &'static str {
        match self {
            CastOperand::Input => "input",
            CastOperand::WgradInput => "input of wgrad",
            CastOperand::Weight => "weight",
            CastOperand::OutputGradient => "output gradient",
        }
    }
}

impl From<LinearOperand> for CastOperand {
    fn from(operand: LinearOperand) -> Self {
        match operand {
            LinearOperand::Input => CastOperand::Input,
            LinearOperand::Weight => CastOperand::Weight,
            LinearOperand::OutputGradient => CastOperand::OutputGradient,
        }
    }
}

/// The static scale of a tensor that a layer casts, if it has one.
pub type StaticScale<'a> = &'a dyn Fn(&Origin, CastOperand) -> Option<f32>;

/// The format of a cast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// E4M3 or E5M2.
    pub format: DType,
    /// The elements that share a scale, in the layout in which the GEMM reads the operand.
    pub scaling: Scaling,
    /// True if scales are powers of two.
    pub pow2_scales: bool,
    /// True if the scale, one for the whole tensor, is known before the cast: it comes from the amaxes of
    /// earlier steps (delayed scaling), or is static.
    pub delayed: bool,
}

/// The formats of a GEMM on FP8 operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ScaledGemm {
    /// The format of each operand.
    pub operands: [Quantization; 2],
    /// True if the tensor cores may accumulate whole sums, which is faster and less precise.
    pub fast_accumulation: bool,
}
