//! `[schedule]`: the learning rate over the steps.
//!
//! Keys and defaults only; the trainer computes the curve.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

const WARMUP_STEPS: u64 = 100;
const MIN_LR_RATIO: f64 = 0.1;
const DECAY_FRACTION: f64 = 0.1;

section! {
    /// The keys of `[schedule]`. The section is described at
    /// [`Config::schedule`](crate::Config).
    pub struct ScheduleConfig {
        /// Learning rate after the warmup.
        pub kind: ScheduleKind = ScheduleKind::Cosine,
        /// Length of the linear warmup. 0 starts at the peak.
        #[schemars(extend("x-unit" = "steps"))]
        #[schemars(extend("x-default" = format!("{WARMUP_STEPS}, or a tenth of the steps if that is less")))]
        #[schemars(extend("x-example" = 100))]
        pub warmup_steps: Option<u64> = None,
        /// Final learning rate as a fraction of `optimizer.lr`. Not with `min_lr` or kind `constant`.
        #[schemars(range(max = 1.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = format!("{MIN_LR_RATIO}")))]
        pub min_lr_ratio: Option<f64> = None,
        /// Final learning rate. At most `optimizer.lr`. Not with `min_lr_ratio` or kind `constant`.
        #[schemars(extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = "`min_lr_ratio * optimizer.lr`", "x-example" = 3e-5))]
        pub min_lr: Option<f64> = None,
        /// Length of the final decay of kind `wsd`. Not with `decay_fraction`.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "steps", "x-default" = "`decay_fraction` of the steps"))]
        pub decay_steps: Option<u64> = None,
        /// Length of the final decay of kind `wsd`, as a fraction of all steps. Not with `decay_steps`.
        #[schemars(range(max = 1.0), extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-default" = format!("{DECAY_FRACTION} for `wsd`")))]
        pub decay_fraction: Option<f64> = None,
        /// Shape of the final decay of kind `wsd`.
        #[schemars(extend("x-default" = "\"sqrt\" for `wsd`"))]
        pub decay_shape: Option<DecayShape> = None,
    }
}

impl ScheduleConfig {
    /// Final learning rate for a peak of `lr`; the peak itself for kind `constant`.
    pub fn final_lr(&self, lr: f64) -> f64 {
        match self.kind {
            ScheduleKind::Constant => lr,
            _ => self.min_lr.unwrap_or_else(|| lr * self.min_lr_ratio.unwrap_or(MIN_LR_RATIO)),
        }
    }

    /// Steps of warmup in a run of `steps`.
    pub fn warmup_steps(&self, steps: u64) -> u64 {
        self.warmup_steps.unwrap_or((steps / 10).min(WARMUP_STEPS))
    }

    /// Steps of the final decay in a run of `steps`: those of `wsd`, and none for the other kinds.
    pub fn decay_steps(&self, steps: u64) -> u64 {
        match self.kind {
            ScheduleKind::Wsd => self.decay_steps.unwrap_or_else(|| {
                let fraction = self.decay_fraction.unwrap_or(DECAY_FRACTION);
                ((steps as f64 * fraction).round() as u64).clamp(1, steps.max(1))
            }),
            _ => 0,
        }
    }

    /// Writes every default into its key. Defaults that depend on `steps` are written only if it is known.
    pub(crate) fn fill(&mut self, steps: Option<u64>) {
        if let Some(steps) = steps {
            self.warmup_steps = Some(self.warmup_steps(steps));
        }
        if self.kind != ScheduleKind::Constant && self.min_lr.is_none() {
            self.min_lr_ratio.get_or_insert(MIN_LR_RATIO);
        }
        if self.kind == ScheduleKind::Wsd {
            self.decay_shape = Some(self.decay_shape());
            if self.decay_steps.is_none() {
                self.decay_fraction.get_or_insert(DECAY_FRACTION);
            }
        }
    }

    /// Shape of the final decay; `sqrt` by default.
    pub fn decay_shape(&self) -> DecayShape {
        self.decay_shape.unwrap_or(DecayShape::Sqrt)
    }
}

/// Learning rate after the warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Stays at the peak.
    Constant,
    /// Falls in a straight line to the final learning rate.
    Linear,
    /// Falls along half a cosine to the final learning rate.
    Cosine,
    /// Warmup, stable, decay: stays at the peak, then falls during the last `decay_steps`.
    Wsd,
}

/// Shape of the decay of `wsd`; x runs from 0 to 1 over the decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DecayShape {
    /// 1 - x.
    Linear,
    /// 1 - sqrt(x).
    Sqrt,
    /// (1 + cos(pi x)) / 2.
    Cosine,
}
