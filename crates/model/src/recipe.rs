//! Precision recipes: named choices of the types that a program computes in.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_program::{LinearGemm, Precision, Quantization};
use xtrain_tensor::{DType, Scaling};

/// A recipe, as numerics.md defines it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// Everything in fp32.
    Fp32,
    /// Activations and GEMM operands in bf16, sums in fp32. On the CPU bf16 is emulated by rounding, which is
    /// slower than `fp32`.
    Bf16,
    /// As `bf16`, with the linear layers of the blocks in FP8: E4M3 for inputs and weights, E5M2 for
    /// gradients, one scale per tensor, from the tensor's own amax.
    Fp8Current,
    /// As `fp8-current` with delayed scales: from the amax of earlier steps.
    Fp8Delayed,
    /// As `fp8-current` with E4M3 for all and a scale, a power of two, for each row of the left and each
    /// column of the right operand of a GEMM.
    Fp8Row,
    /// As `fp8-current` with E4M3 for all and scales, powers of two, for tiles of 128 numbers along the
    /// summed dimension, and for blocks of 128 x 128 of the weights (DeepSeek-V3).
    Fp8Block,
}

impl Recipe {
    /// All recipes.
    pub const ALL: [Recipe; 6] = [
        Recipe::Fp32,
        Recipe::Bf16,
        Recipe::Fp8Current,
        Recipe::Fp8Delayed,
        Recipe::Fp8Row,
        Recipe::Fp8Block,
    ];

    /// The recipes with FP8.
    pub const FP8: [Recipe; 4] = [Recipe::Fp8Current, Recipe::Fp8Delayed, Recipe::Fp8Row, Recipe::Fp8Block];

    /// The types that the precision pass applies.
    pub const fn precision(self) -> Precision {
        match self {
            Recipe::Fp32 => Precision::FP32,
            _ => Precision::BF16,
        }
    }

    /// The recipe's name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            Recipe::Fp32 => "fp32",
            Recipe::Bf16 => "bf16",
            Recipe::Fp8Current => "fp8-current",
            Recipe::Fp8Delayed => "fp8-delayed",
            Recipe::Fp8Row => "fp8-row",
            Recipe::Fp8Block => "fp8-block",
        }
    }

    /// A recipe with FP8.
    pub fn is_fp8(self) -> bool {
        Recipe::FP8.contains(&self)
    }

    /// The casts of a GEMM's two operands.
    pub(crate) fn operands(self, gemm: LinearGemm) -> Option<[Quantization; 2]> {
        let delayed = self == Recipe::Fp8Delayed;
        let cast = |format, scaling, pow2_scales| Quantization { format, scaling, pow2_scales, delayed };
        // Inputs, weights, and gradients of outputs.
        let [x, w, dy] = match self {
            Recipe::Fp32 | Recipe::Bf16 => return None,
            Recipe::Fp8Current | Recipe::Fp8Delayed => {
                let forward = cast(DType::E4M3, Scaling::Tensor, false);
                [forward, forward, cast(DType::E5M2, Scaling::Tensor, false)]
            }
            Recipe::Fp8Row => [cast(DType::E4M3, Scaling::Row, true); 3],
            Recipe::Fp8Block => {
                let tiles = cast(DType::E4M3, Scaling::Tile, true);
                [tiles, cast(DType::E4M3, Scaling::Block, true), tiles]
            }
        };
        Some(match gemm {
            LinearGemm::Fprop => [x, w],
            LinearGemm::Dgrad => [dy, w],
            LinearGemm::Wgrad => [dy, x],
        })
    }
}
