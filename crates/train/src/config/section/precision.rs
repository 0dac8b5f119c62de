//! `[precision]`: the recipe. A table of its own because recipes are data: FP8 recipes and their overrides
//! by layer and by GEMM are further keys of this section.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

section! {
    /// The keys of `[precision]`. What the section is for stands at
    /// [`Config::precision`](crate::config::Config).
    pub struct PrecisionConfig {
        /// The recipe by name.
        #[schemars(extend("x-aliases" = [
            "dtype", "mixed_precision", "precision", "torch_dtype", "mixed_precision_param"
        ]))]
        pub recipe: Recipe = Recipe::Auto,
    }
}

/// A precision recipe by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Recipe {
    /// `bf16` on a GPU, `fp32` on the CPU. The resolved configuration names which.
    Auto,
    /// Everything in fp32.
    Fp32,
    /// Matrix products and activations in bf16. On the CPU bf16 is emulated by rounding, which is slower than
    /// `fp32`.
    Bf16,
}
