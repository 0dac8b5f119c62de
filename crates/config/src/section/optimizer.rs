//! `[optimizer]`: AdamW or Muon, and gradient clipping.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_model::optimizer::{AdamWSpec, MuonSpec, Optimizer};
use xtrain_tensor::DType;

section! {
    /// The keys of `[optimizer]`. The section is described at
    /// [`Config::optimizer`](crate::Config).
    pub struct OptimizerConfig {
        /// The optimizer. A resumed run keeps it. `muon` saves 4 bytes for each number of a matrix of blocks.
        pub kind: OptimizerKind = OptimizerKind::AdamW,
        /// Decay rate of `muon`'s momentum.
        #[schemars(extend("minimum" = 0.0, "exclusiveMaximum" = 1.0))]
        #[schemars(extend("x-default" = format!("{MOMENTUM} for `muon`"), "x-example" = MOMENTUM))]
        pub momentum: Option<f64> = None,
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
        /// rounding (docs/numerics.md). A run may be resumed with the other type. Not with `muon`.
        pub moments: MomentFormat = MomentFormat::Fp32,
        /// Weight decay of the matrices; norms, biases and embeddings have none.
        #[schemars(extend("minimum" = 0.0))]
        pub weight_decay: f64 = 0.1,
        /// Largest global L2 norm of the gradient; a larger one is scaled down to it. 0 turns clipping off.
        #[schemars(extend("minimum" = 0.0))]
        pub grad_clip: f64 = 1.0,
    }
}

/// The default momentum, as in torch.optim.Muon.
const MOMENTUM: f64 = 0.95;

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// AdamW.
    AdamW,
    /// [Muon](numerics.md#the-optimizer-step) for matrices of blocks, with AdamW's `lr`; AdamW for the rest.
    Muon,
}

impl OptimizerKind {
    /// Name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            OptimizerKind::AdamW => "adamw",
            OptimizerKind::Muon => "muon",
        }
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
    /// The reason why a run with this optimizer cannot go on with the state of `before`, if so.
    pub fn refuses_state_of(&self, before: &OptimizerConfig) -> Option<String> {
        let (before, now) = (before.kind.name(), self.kind.name());
        (before != now).then(|| {
            format!(
                "the checkpoint has the state of optimizer.kind = \"{before}\", and now it is \"{now}\"; resume with \"{before}\", or export \
                 the weights (xtrain export) and begin a new run with \"{now}\" from that folder (model.init_from)"
            )
        })
    }

    /// Fills in the momentum that Muon has by default.
    pub(crate) fn fill(&mut self) {
        if self.kind == OptimizerKind::Muon {
            self.momentum.get_or_insert(MOMENTUM);
        }
    }

    /// The optimizer of a run with this seed.
    pub fn optimizer(&self, seed: u64) -> Optimizer {
        let adamw = AdamWSpec {
            betas: self.betas,
            eps: self.eps,
            weight_decay: self.weight_decay,
            moments: self.moments.into(),
            seed,
        };
        match self.kind {
            OptimizerKind::AdamW => Optimizer::AdamW(adamw),
            OptimizerKind::Muon => {
                Optimizer::Muon(MuonSpec { momentum: self.momentum.unwrap_or(MOMENTUM), adamw })
            }
        }
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
