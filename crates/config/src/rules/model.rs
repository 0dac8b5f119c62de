//! The rules between the keys of `[model]` and `[experts]`.

use super::{exclusive, missing, nearest_divisors};
use crate::error::Report;
use crate::print::toml_value;
use crate::{Balance, Config, RopeScaling};
use xtrain_model::{Description, Family};

/// Checks `[model]` against itself and the rest of the file.
pub(super) fn check(config: &Config, report: &mut Report) {
    if config.model.init_from.is_none() {
        described_model(config, report);
    }
    rope_scaling(config, report);
    positions(config, report);
}

/// Checks the longest position against the sequence length, also if a folder gives the longest position.
pub(crate) fn positions(config: &Config, report: &mut Report) {
    if let Some(positions) = config.model.max_position_embeddings
        && positions < config.data.seq_len
    {
        report.about(
            &["model.max_position_embeddings", "data.seq_len"],
            format!(
                "`max_position_embeddings` is {positions}, less than `data.seq_len` = {}; raise it \
                 (with `rope_scaling`, if the model was trained on less), or shorten `data.seq_len`",
                config.data.seq_len
            ),
        );
    }
}

/// Refuses sequences that a sliding window of the folder's model would change.
pub(crate) fn within_window(config: &Config, window: Option<usize>, report: &mut Report) {
    if let Some(window) = window.filter(|window| *window < config.data.seq_len) {
        report.about(
            &["data.seq_len", "model.init_from"],
            format!(
                "`seq_len` = {} exceeds the sliding window of the folder's model, and attention within windows is not \
                 supported; train on sequences of at most {window} tokens",
                config.data.seq_len
            ),
        );
    }
}

fn described_model(config: &Config, report: &mut Report) {
    let model = &config.model;
    missing(report, "model", "dim", model.dim.is_none(), ", or name a Hugging Face folder with `init_from`");
    missing(report, "model", "layers", model.layers.is_none(), "");
    missing(report, "model", "heads", model.heads.is_none(), "");
    let without = model.family().has_experts() && config.experts.count.is_none();
    missing(report, "experts", "count", without, "");

    if let (Some(heads), Some(kv_heads)) = (model.heads, model.kv_heads)
        && !heads.is_multiple_of(kv_heads)
    {
        report.about(
            &["model.kv_heads", "model.heads"],
            format!(
                "`kv_heads` = {kv_heads} does not divide `heads` = {heads}; {}",
                nearest_divisors("kv_heads", heads, kv_heads)
            ),
        );
    }
    if let (Some(dim), Some(heads), None) = (model.dim, model.heads, model.head_dim)
        && !dim.is_multiple_of(heads)
    {
        report.about(
            &["model.heads", "model.dim", "model.head_dim"],
            format!(
                "`heads` = {heads} does not divide `dim` = {dim}; change one of them, or give `head_dim`"
            ),
        );
    } else if let Some(head_dim) = model.head_dim()
        && !head_dim.is_multiple_of(2)
    {
        let computed = if model.head_dim.is_none() { ", which is `dim / heads`," } else { "" };
        report.about(
            &["model.head_dim", "model.heads", "model.dim"],
            format!("`head_dim` = {head_dim}{computed} must be even, because RoPE rotates pairs of features"),
        );
    }
    let family = model.family();
    let qkv_bias = model.qkv_bias.unwrap_or(family.qkv_bias());
    let qk_norm = model.qk_norm.unwrap_or(family.qk_norm());
    if config.checkpoint.export_hf && (qkv_bias, qk_norm) != (family.qkv_bias(), family.qk_norm()) {
        report.about(
            &["model.qkv_bias", "model.qk_norm", "model.family", "checkpoint.export_hf"],
            format!(
                "`qkv_bias` = {qkv_bias} with `qk_norm` = {qk_norm} is no {} model, so other programs could not \
                 load its export; leave both keys out, or set `checkpoint.export_hf = false`",
                toml_value(&serde_json::json!(family)),
            ),
        );
    }
}

/// Checks `[experts]` against the model, whose family a folder may give. False if the keys describe no
/// experts of the model, which is then reported.
pub(crate) fn experts(config: &Config, model: &Description, report: &mut Report) -> bool {
    let (experts, family) = (&config.experts, model.family);
    if !family.has_experts() {
        let keys = serde_json::json!(experts);
        let keys = keys.as_object().into_iter().flat_map(|keys| keys.keys());
        let keys = keys.map(|key| format!("experts.{key}")).filter(|key| report.is_given(key));
        let keys: Vec<String> = keys.collect();
        let (Some(first), name) = (keys.first(), family.name()) else { return true };
        if report.is_given("model.init_from") {
            let folder = "the model of `init_from`";
            let message = format!("{folder} is a {name} model, which has no experts; leave [experts] out");
            report.about(&[first, "model.init_from"], message);
            return true;
        }
        let given: Vec<&str> = keys.iter().map(String::as_str).collect();
        let leave_out = report.leave_all_out(&given, &["model.family"]);
        let families = Family::listing(Family::has_experts, "`");
        let message = format!("a {name} model has no experts ({families} have); {leave_out}");
        report.about(&[first, "model.family"], message);
        return true;
    }
    let describes_experts = mixture(config, model, report);
    let biased = family.router().is_some_and(|router| router.biased);
    let balance = experts.balance.unwrap_or(Balance::usual(biased));
    let (loss, rate) = (experts.balance_loss.is_some(), experts.bias_rate.is_some());
    for (key, is_given, of) in [("balance_loss", loss, Balance::Loss), ("bias_rate", rate, Balance::Bias)] {
        if !is_given || balance == of {
            continue;
        }
        let [of, now] = [of, balance].map(|balance| toml_value(&serde_json::json!(balance)));
        let path = format!("experts.{key}");
        if report.is_given("experts.balance") {
            let why = format!("`{key}` is for `balance = {of}`, not {now}");
            exclusive(report, &path, "experts.balance", &why);
        } else {
            let leave_out = report.leave_out(&[&path, "model.family"]);
            let family = family.name();
            report.about(
                &[&path, "model.family"],
                format!("`{key}` is for `balance = {of}`, and a {family} model has `balance = {now}` by default; {leave_out}"),
            );
        }
    }
    if balance == Balance::Bias && !biased {
        report.about(
            &["experts.balance", "model.family"],
            format!("a {} model has no bias on its scores; use `balance = \"loss\"`", family.name()),
        );
    }
    describes_experts
}

/// Checks that the keys describe experts of the model; false if not, which is then reported.
fn mixture(config: &Config, model: &Description, report: &mut Report) -> bool {
    let Some(mixture) = &model.mixture else { return true };
    let (layers, router) = (model.layers, mixture.router);
    // A folder's list was compared with the keys.
    let dense_blocks = config.experts.dense_blocks.as_ref().filter(|_| config.model.init_from.is_none());
    if let Some(block) = dense_blocks.into_iter().flatten().find(|block| **block >= layers) {
        let last = layers.saturating_sub(1);
        let message = format!("`dense_blocks` has {block}, but the blocks of the model are 0 to {last}");
        report.about(&["experts.dense_blocks", "model.layers"], message);
        return false;
    }
    if let Err(error) = router.check(mixture.count) {
        let keys = match (1..=mixture.count).contains(&router.top_k) {
            true => ["experts.groups", "experts.top_groups", "experts.count"],
            false => ["experts.per_token", "experts.count", "model.init_from"],
        };
        report.about(&keys, error.to_string());
        return false;
    }
    if let Err((key, error)) = mixture.check(model.family, layers) {
        report.about(&[&format!("experts.{key}"), "model.family", "model.init_from"], error.to_string());
        return false;
    }
    true
}

fn rope_scaling(config: &Config, report: &mut Report) {
    if let Some(RopeScaling::Llama3 { low_freq_factor: low, high_freq_factor: high, .. }) =
        config.model.rope_scaling
        && high <= low
    {
        report.about(
            &["model.rope_scaling"],
            format!(
                "`rope_scaling.high_freq_factor` = {high} must be greater than `low_freq_factor` = {low}"
            ),
        );
    }
}
