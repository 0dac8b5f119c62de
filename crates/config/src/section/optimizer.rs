//! `[optimizer]`: AdamW and gradient clipping.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_model::optimizer::{AdamWSpec, Optimizer};
use xtrain_tensor::DType;

section! {
    /// The keys of `[optimizer]`. The section is described at
    /// [`Config::optimizer`](crate::Config).
    pub struct OptimizerConfig {
        /// Peak learning rate.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-aliases" = [
            "learning_rate", "max_lr", "peak_lr", "base_lr", "max_learning_rate", "peak_learning_rate"
        ]))]
        pub lr: f64 = 3e-4,
        /// Decay rates of the first and second moment.
        #[schemars(extend("items" = { "type": "number", "minimum": 0.0, "exclusiveMaximum": 1.0 }))]
        #[schemars(extend("x-aliases" = ["adam_betas"]))]
        pub betas: [f64; 2] = [0.9, 0.95],
        /// Added to the root of the second moment.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-aliases" = ["epsilon", "adam_eps", "adam_epsilon"]))]
        pub eps: f64 = 1e-8,
        /// Type of both moments. `bf16` saves 4 bytes per parameter, in checkpoints too, and uses stochastic
        /// rounding (docs/numerics.md). A run may be resumed with the other type.
        #[schemars(extend("x-aliases" = ["exp_avg_dtype", "exp_avg_sq_dtype", "optimizer_state_dtype", "opt_m_dtype", "opt_v_dtype"]))]
        pub moments: MomentFormat = MomentFormat::Fp32,
        /// Weight decay of the matrices; norms, biases and embeddings have none.
        #[schemars(extend("minimum" = 0.0))]
        #[schemars(extend("x-aliases" = ["wd"]))]
        pub weight_decay: f64 = 0.1,
        /// Largest global L2 norm of the gradient; a larger one is scaled down to it. 0 turns clipping off.
        #[schemars(extend("minimum" = 0.0))]
        #[schemars(extend("x-aliases" = [
            "max_norm", "max_grad_norm", "clip_grad", "clip_grad_norm", "gradient_clipping",
            "gradient_clip_val", "gradient_clip", "grad_norm_clip", "clip", "max_gradient_norm"
        ]))]
        pub grad_clip: f64 = 1.0,
    }
}

/// Type of the moments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum MomentFormat {
    /// Stored as computed.
    Fp32,
    /// bfloat16, with stochastic rounding.
    Bf16,
}

impl OptimizerConfig {
    /// The optimizer of a run with this seed.
    pub fn optimizer(&self, seed: u64) -> Optimizer {
        Optimizer::AdamW(AdamWSpec {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            moments: self.moments.into(),
            seed,
        })
    }
}

impl From<MomentFormat> for DType {
    fn from(format: MomentFormat) -> Self {
        match format {
            MomentFormat::Fp32 => DType::F32,
            MomentFormat::Bf16 => DType::BF16,
        }
    }
}
