//! Precision recipes: named choices of the types that a program computes in.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_program::Precision;

/// A recipe, as numerics.md defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Recipe {
    /// Everything in fp32.
    Fp32,
    /// Activations and the operands of matrix products in bf16, their sums in fp32. On the CPU bf16 is emulated by
    /// rounding, which is slower than `fp32`.
    Bf16,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Recipe; 2] = [Recipe::Fp32, Recipe::Bf16];

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
