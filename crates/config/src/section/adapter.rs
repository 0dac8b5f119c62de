//! `[adapter]`: small matrices that are trained in place of the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_model::{Adapter, Targets};

section! {
    /// The keys of `[adapter]`. The section is described at [`Config::adapter`](crate::Config).
    pub struct AdapterConfig {
        /// Rank: rows of A, columns of B. With it adapters are trained, and the model of `init_from` in
        /// `[model]` stays as it is.
        #[schemars(range(min = 1, max = 65_536))]
        #[schemars(extend("x-default" = "that of the folder of `init_from`; without one, none: the model is trained", "x-example" = 16))]
        pub rank: Option<usize> = None,
        /// The product of A and B is multiplied by `alpha / rank`.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-default" = "that of the folder of `init_from`, or twice `rank`", "x-example" = 32.0))]
        pub alpha: Option<f64> = None,
        /// Share of the inputs of A that training sets to zero.
        #[schemars(range(max = 0.99), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = "`0.0`", "x-example" = 0.05))]
        pub dropout: Option<f64> = None,
        /// Matrices with an adapter: `"all-linear"` for all linear layers of the blocks, or a list of names
        /// as in the model's folder, or ends of names: `["q_proj", "layers.0.mlp.down_proj"]`.
        #[schemars(extend("x-default" = "those of the folder of `init_from`, or `\"all-linear\"`", "x-example" = ["q_proj", "v_proj"]))]
        pub targets: Option<AdapterTargets> = None,
        /// Folder of adapters to begin with: one of PEFT's, or the `hf/` of a run with adapters. Rank, alpha
        /// and targets are those of the folder, and need not be given.
        #[schemars(length(min = 1), extend("x-default" = "new adapters", "x-example" = "runs/lora/hf"))]
        pub init_from: Option<String> = None,
    }
}

/// Matrices with an adapter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum AdapterTargets {
    /// A word.
    Word(TargetsWord),
    /// Names of matrices, or ends of names.
    Named(#[schemars(length(min = 1))] Vec<String>),
}

/// The word for matrices with an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum TargetsWord {
    /// All linear layers of the blocks.
    AllLinear,
}

impl From<Targets> for AdapterTargets {
    fn from(targets: Targets) -> AdapterTargets {
        match targets {
            Targets::AllLinear => AdapterTargets::Word(TargetsWord::AllLinear),
            Targets::Named(names) => AdapterTargets::Named(names),
        }
    }
}

impl AdapterConfig {
    /// True if the file asks for adapters.
    pub fn is_given(&self) -> bool {
        self.rank.is_some() || self.init_from.is_some()
    }

    /// The targets, if they are given.
    pub(crate) fn targets(&self) -> Option<Targets> {
        self.targets.as_ref().map(|targets| match targets {
            AdapterTargets::Word(TargetsWord::AllLinear) => Targets::AllLinear,
            AdapterTargets::Named(names) => Targets::Named(names.clone()),
        })
    }

    /// The adapters, if there are some.
    pub(crate) fn adapter(&self) -> Option<Adapter> {
        let rank = self.rank?;
        Some(Adapter {
            rank,
            alpha: self.alpha.unwrap_or(2.0 * rank as f64) as f32,
            dropout: self.dropout.unwrap_or(0.0) as f32,
            targets: self.targets().unwrap_or(Targets::AllLinear),
        })
    }

    /// Fills in the defaults of a run with adapters.
    pub(crate) fn fill(&mut self) {
        if let Some(rank) = self.rank {
            self.alpha.get_or_insert(2.0 * rank as f64);
            self.dropout.get_or_insert(0.0);
            self.targets.get_or_insert(AdapterTargets::Word(TargetsWord::AllLinear));
        }
    }
}
