//! `[precision]`: the recipe. A table of its own because recipes are data: FP8 recipes and their overrides
//! by layer and by GEMM are further keys of this section.

use xtrain_model::Recipe;

section! {
    /// The keys of `[precision]`. What the section is for stands at
    /// [`Config::precision`](crate::config::Config).
    pub struct PrecisionConfig {
        /// The recipe by name.
        #[schemars(extend("x-default" = "`\"bf16\"` on a GPU, `\"fp32\"` on the CPU"))]
        #[schemars(extend("x-aliases" = [
            "dtype", "mixed_precision", "precision", "torch_dtype", "mixed_precision_param"
        ]))]
        pub recipe: Option<Recipe> = None,
    }
}
