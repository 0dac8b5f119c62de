//! Files of families with experts: their names, and the keys that several have.

use crate::keys::{Keys, fail};
use crate::layer::ExpertModules;
use crate::{Description, Mixture, ModelError, Router, Score};
use serde_json::{Value, json};

/// Everything that sets the experts of a family apart.
pub(crate) struct ExpertRules {
    /// Their names in files.
    pub(crate) modules: ExpertModules,
    /// How tokens choose, if a run file does not say it.
    pub(crate) router: Router,
    /// True if every token passes through a shared expert besides.
    pub(crate) shares: bool,
    /// The reason for which no config.json of the family describes these experts, if so, and the key of
    /// `[experts]` that it is about.
    pub(crate) refused: fn(&Mixture) -> Option<ExpertsRefusal>,
}

/// The largest `experts.ffn_dim` of run files.
const MAX_WIDTH: usize = 1 << 24;

/// A key of `[experts]`, and the reason for which its value is refused.
pub(crate) type ExpertsRefusal = (&'static str, &'static str);

/// The names of Qwen3-MoE, and of the models that follow DeepSeek-V3.
pub(super) const QWEN_MODULES: ExpertModules = ExpertModules {
    router: "mlp.gate",
    experts: "mlp.experts",
    projections: ["gate_proj", "up_proj", "down_proj"],
    shared: "mlp.shared_experts",
};

/// The reason for which these are not experts chosen by softmax alone, as before DeepSeek-V3.
pub(super) fn other_than_softmax(mixture: &Mixture) -> Option<ExpertsRefusal> {
    let Router { score, scale, groups, biased, .. } = mixture.router;
    first_broken(&[
        (score == Score::Softmax, ("score", "scores must be \"softmax\"")),
        (scale == 1.0, ("scale", "scale must be 1")),
        (groups == 1, ("groups", "experts cannot be in groups")),
        (!biased, ("balance", "there can be no bias for balance")),
        (mixture.shared_ffn_dim == 0, ("shared_ffn_dim", "no expert can be shared")),
    ])
}

/// The refusal of the first rule that does not hold, if any.
pub(super) fn first_broken(rules: &[(bool, ExpertsRefusal)]) -> Option<ExpertsRefusal> {
    rules.iter().find(|(holds, _)| !holds).map(|(_, refusal)| *refusal)
}

/// Reads the number of experts, which transformers writes under another name from version 5 on.
pub(super) fn count(file: &Keys<'_>, names: [&str; 2], default: Option<usize>) -> Result<usize, ModelError> {
    let [first, second] = [file.size(names[0])?, file.size(names[1])?];
    if let (Some(a), Some(b)) = (first, second)
        && a != b
    {
        return Err(fail(format!("`{}` is {a}, but `{}` is {b}; make them equal", names[0], names[1])));
    }
    let name = if first.is_none() && second.is_some() { names[1] } else { names[0] };
    match first.or(second).or(default) {
        None => Err(fail(format!("`{name}` is missing"))),
        Some(0) => Err(fail(format!("`{name}` is 0; it must be at least 1"))),
        Some(count) => Ok(count),
    }
}

/// Reads the number of experts of a token, of `count`.
pub(super) fn per_token(file: &Keys<'_>, default: Option<usize>, count: usize) -> Result<usize, ModelError> {
    let key = "num_experts_per_tok";
    match (file.size(key)?, default) {
        (Some(0), _) => Err(fail(format!("`{key}` is 0; it must be at least 1"))),
        (Some(given), _) => Ok(given),
        (None, None) => Err(fail(format!("`{key}` is missing"))),
        (None, Some(default)) if default > count => Err(fail(format!(
            "`{key}` is missing, and its default is {default}, but there are only {count} experts; add the key"
        ))),
        (None, Some(default)) => Ok(default),
    }
}

/// Reads the width of an expert.
pub(super) fn width(file: &Keys<'_>, default: usize) -> Result<usize, ModelError> {
    let key = "moe_intermediate_size";
    match file.size(key)?.unwrap_or(default) {
        width @ 1..=MAX_WIDTH => Ok(width),
        width => Err(fail(format!("`{key}` is {width}; it must be from 1 to {MAX_WIDTH}"))),
    }
}

/// The number of experts under both of its names, and the experts of a token.
pub(super) fn written(model: &Description, names: [&str; 2]) -> Value {
    let mixture = model.mixture.as_ref();
    let (experts, top_k) = (mixture.map(|m| m.count), mixture.map(|m| m.router.top_k));
    json!({ names[0]: experts, names[1]: experts, "num_experts_per_tok": top_k })
}
