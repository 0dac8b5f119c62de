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
        pub lr: f64 = 3e-4,
        /// Decay rates of the first and second moment.
        #[schemars(extend("items" = { "type": "number", "minimum": 0.0, "exclusiveMaximum": 1.0 }))]
        pub betas: [f64; 2] = [0.9, 0.95],
        /// Added to the root of the second moment.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        pub eps: f64 = 1e-8,
        /// Type of both moments. `bf16` saves 4 bytes per parameter, in checkpoints too, and uses stochastic
        /// rounding (docs/numerics.md). A run may be resumed with the other type.
        pub moments: MomentFormat = MomentFormat::Fp32,
        /// Weight decay of the matrices; norms, biases and embeddings have none.
        #[schemars(extend("minimum" = 0.0))]
        pub weight_decay: f64 = 0.1,
        /// Largest global L2 norm of the gradient; a larger one is scaled down to it. 0 turns clipping off.
        #[schemars(extend("minimum" = 0.0))]
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
