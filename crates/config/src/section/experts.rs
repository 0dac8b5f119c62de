//! `[experts]`: mixtures of experts in place of the feed-forward, and how their loads are balanced.

use crate::OrAuto;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use xtrain_model::{BlockSet, Family, Mixture, Router, Score};

/// Weight of the balance loss of Mixtral and Qwen3-MoE.
const BALANCE_LOSS: f64 = 0.001;

/// Rate of the bias of DeepSeek-V3 (arXiv 2412.19437, section 4.2).
const BIAS_RATE: f64 = 0.001;

section! {
    /// The keys of `[experts]`. The section is described at [`Config::experts`](crate::Config).
    pub struct ExpertsConfig {
        /// Experts of a block.
        #[schemars(range(min = 1, max = 1024))]
        #[schemars(extend("x-unit" = "experts", "x-example" = 8))]
        #[schemars(extend("x-default" = "required for a family with experts, without `init_from`"))]
        pub count: Option<usize> = None,
        /// Experts that a token passes through. At most `count`.
        #[schemars(range(min = 1, max = 1024))]
        #[schemars(extend("x-unit" = "experts", "x-default" = "2"))]
        pub per_token: Option<usize> = None,
        /// Width inside an expert's SwiGLU.
        #[schemars(range(min = 1, max = 16_777_216))]
        #[schemars(extend("x-unit" = "features", "x-default" = "`model.ffn_dim`"))]
        pub ffn_dim: Option<usize> = None,
        /// Width inside the shared SwiGLU, which every token passes through. 0 for none.
        #[schemars(range(max = 16_777_216))]
        #[schemars(extend("x-unit" = "features", "x-default" = "`ffn_dim` for `dots1`, else 0"))]
        pub shared_ffn_dim: Option<usize> = None,
        /// Score function of the router.
        #[schemars(extend("x-default" = "`\"sigmoid\"` for `dots1`, else `\"softmax\"`"))]
        pub score: Option<ExpertScore> = None,
        /// Divides the gates of a token by their sum.
        #[schemars(extend("x-default" = "`true`"))]
        pub normalise: Option<bool> = None,
        /// Factor of all gates.
        #[schemars(extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-default" = "`1.0`", "x-example" = 2.5))]
        pub scale: Option<f64> = None,
        /// Groups of consecutive experts. Must divide `count`.
        #[schemars(range(min = 1, max = 32))]
        #[schemars(extend("x-unit" = "groups", "x-default" = "1"))]
        pub groups: Option<usize> = None,
        /// Groups from which a token chooses: those whose two best experts have the largest sums of scores.
        #[schemars(range(min = 1, max = 32))]
        #[schemars(extend("x-unit" = "groups", "x-default" = "`groups`"))]
        pub top_groups: Option<usize> = None,
        /// Blocks that have the dense feed-forward of width `model.ffn_dim`, from 0.
        #[schemars(extend("x-unit" = "blocks", "x-default" = "`[]`", "x-example" = [0]))]
        pub dense_blocks: Option<Vec<usize>> = None,
        /// Room for the rows of a rank's experts, with `parallel.expert`: a multiple of the rows that it has
        /// if all experts have equally many tokens. A step whose rows do not fit is repeated with more room.
        /// Less room takes less memory and changes no bit. A resumed run keeps the room that it grew to,
        /// unless another value is named than the one with which it began.
        #[schemars(schema_with = "capacity", extend("x-default" = "`\"auto\"`", "x-example" = 1.25))]
        pub capacity: Option<OrAuto<f64>> = None,
        /// Load balancing of experts. Without it, most tokens choose the same few.
        #[schemars(extend("x-default" = "`\"bias\"` for `dots1`, else `\"loss\"`"))]
        pub balance: Option<Balance> = None,
        /// Weight of the balance loss, with `balance = "loss"`.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = format!("the folder's, else {BALANCE_LOSS}")))]
        pub balance_loss: Option<f64> = None,
        /// How much a step changes the bias of an expert, with `balance = "bias"`.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = format!("{BIAS_RATE}")))]
        pub bias_rate: Option<f64> = None,
        /// Weight of the router's z-loss, the mean squared log-sum-exp of a block's logits (ST-MoE, arXiv
        /// 2202.08906, section 3.3). 0 leaves it out.
        #[schemars(range(max = 100.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = "`0.0`"))]
        pub z_loss: Option<f64> = None,
        /// Format of tokens, and of gradients of outputs, on their way to the ranks of their experts
        /// (`parallel.expert`). One process that names it rounds alike. A resumed run keeps its own unless
        /// `--set` names another.
        #[schemars(extend("x-default" = "`\"auto\"`"))]
        pub wire: Option<Wire> = None,
    }
}

/// The schema of `capacity`.
fn capacity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "anyOf": [
            { "type": "number", "minimum": 1.0, "maximum": 1000.0, "x-unit": "times the mean" },
            { "oneOf": [{
                "const": "auto",
                "description": "Room for every routing if it fits in memory, else 1.5 times the mean.",
            }] },
        ]
    })
}

/// The numbers by which a token chooses its experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ExpertScore {
    /// The softmax of the logits over all experts.
    Softmax,
    /// The sigmoid of each logit.
    Sigmoid,
}

/// The means by which the loads of experts are balanced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Balance {
    /// A loss that is smallest where all experts get equally many tokens (Switch Transformer, arXiv
    /// 2101.03961, section 2.2).
    Loss,
    /// A bias on each expert's score, for the choice alone, that every step moves towards equal loads
    /// (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    Bias,
    /// Nothing.
    None,
}

/// Format of tokens between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Wire {
    /// FP8 with `parallel.expert` above 1 under `fp8-block` and `fp8-delayed`; bf16 otherwise, and with
    /// `reduce = "any-world"`.
    Auto,
    /// FP8, as GEMMs read it: half the bytes. For `fp8-block` and `fp8-delayed`.
    Fp8,
    /// The type of activations.
    Bf16,
}

impl Balance {
    /// The default for routers with a bias on their scores (`biased`), and for those without.
    pub(crate) fn usual(biased: bool) -> Balance {
        if biased { Balance::Bias } else { Balance::Loss }
    }
}

impl ExpertsConfig {
    /// The experts that the keys describe for a model of `family` whose feed-forward is `ffn_dim` wide;
    /// `None` if the family has none, or while `count` is not known.
    pub(crate) fn describe(&self, family: Family, ffn_dim: usize) -> Option<Mixture> {
        let router = family.router()?;
        let ffn_dim = self.ffn_dim.unwrap_or(ffn_dim);
        let groups = self.groups.unwrap_or(router.groups);
        Some(Mixture {
            count: self.count?,
            ffn_dim,
            router: Router {
                top_k: self.per_token.unwrap_or(router.top_k),
                score: self.score.map_or(router.score, Into::into),
                normalise: self.normalise.unwrap_or(router.normalise),
                scale: self.scale.map_or(router.scale, |scale| scale as f32),
                groups,
                top_groups: self.top_groups.unwrap_or(groups),
                biased: router.biased,
            },
            shared_ffn_dim: self.shared_ffn_dim.unwrap_or(if family.shares_an_expert() {
                ffn_dim
            } else {
                0
            }),
            dense: BlockSet::from_iter(self.dense_blocks.iter().flatten().copied()),
        })
    }

    /// True if the keys describe the experts without a folder.
    pub(crate) fn is_complete(&self) -> bool {
        self.count.is_some() && self.per_token.is_some() && self.ffn_dim.is_some()
    }

    /// Writes every number of `mixture` into the keys, as the resolved configuration shows them.
    pub(crate) fn fill_from(&mut self, mixture: &Mixture, balance_loss: Option<f64>) {
        let Router { top_k, score, biased, normalise, scale, groups, top_groups } = mixture.router;
        self.count = Some(mixture.count);
        self.per_token = Some(top_k);
        self.ffn_dim = Some(mixture.ffn_dim);
        self.shared_ffn_dim = Some(mixture.shared_ffn_dim);
        self.score = Some(score.into());
        self.normalise = Some(normalise);
        // A float of one type, so that 2.1 stays 2.1.
        self.scale = Some(format!("{scale:?}").parse().unwrap_or(f64::from(scale)));
        self.groups = Some(groups);
        self.top_groups = Some(top_groups);
        self.dense_blocks = Some(mixture.dense.iter().collect());
        match *self.balance.get_or_insert(Balance::usual(biased)) {
            Balance::Loss => {
                self.balance_loss.get_or_insert(balance_loss.unwrap_or(BALANCE_LOSS));
            }
            Balance::Bias => {
                self.bias_rate.get_or_insert(BIAS_RATE);
            }
            Balance::None => {}
        }
        self.z_loss.get_or_insert(0.0);
        self.wire.get_or_insert(Wire::Auto);
    }
}

impl From<ExpertScore> for Score {
    fn from(score: ExpertScore) -> Self {
        match score {
            ExpertScore::Softmax => Score::Softmax,
            ExpertScore::Sigmoid => Score::Sigmoid,
        }
    }
}

impl From<Score> for ExpertScore {
    fn from(score: Score) -> Self {
        match score {
            Score::Softmax => ExpertScore::Softmax,
            Score::Sigmoid => ExpertScore::Sigmoid,
        }
    }
}
