//! Precision recipes: named choices of the types that a program computes in.

use serde::{Deserialize, Serialize};
use xtrain_program::Precision;

/// A recipe, as numerics.md defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recipe {
    /// Everything in f32.
    Fp32,
    /// f32 masters, gradients of parameters and moments; bf16 activations and GEMM operands, f32 sums.
    Bf16,
}

impl Recipe {
    /// The types that the precision pass applies.
    pub const fn precision(self) -> Precision {
        match self {
            Recipe::Fp32 => Precision::FP32,
            Recipe::Bf16 => Precision::BF16,
        }
    }

    /// The recipe's name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            Recipe::Fp32 => "fp32",
            Recipe::Bf16 => "bf16",
        }
    }
}
