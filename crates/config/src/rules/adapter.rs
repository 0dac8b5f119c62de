//! The rules between the keys of `[adapter]` and others.

use crate::Config;
use crate::error::Report;
use crate::print::toml_value;
use crate::section::{AdapterConfig, OptimizerKind};
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_model::{Adapter, Architecture, Targets};

/// Checks `[adapter]` against the rest of the file.
pub(super) fn check(config: &Config, report: &mut Report) {
    let keys = ["alpha", "dropout", "targets"].map(|key| format!("adapter.{key}"));
    if !config.adapter.is_given() {
        for key in keys {
            if !report.is_given(&key) {
                continue;
            }
            let name = key.trim_start_matches("adapter.");
            report.about(
                &[&key],
                format!("`{name}` needs `rank` beside it, for example `rank = 16`, or `init_from`"),
            );
        }
        return;
    }
    let (asks, given) = match config.adapter.rank {
        Some(rank) => ("adapter.rank", format!("`rank` = {rank}")),
        None => ("adapter.init_from", "`init_from`".to_owned()),
    };
    if config.model.init_from.is_none() {
        let message = format!(
            "{given} trains adapters of a trained model, and none is named; name its folder with `init_from` in [model], or \
             {} to train the model itself",
            report.leave_out(&[asks])
        );
        report.about(&[asks, "model.init_from"], message);
    }
    if config.optimizer.kind == OptimizerKind::Muon {
        let message = "`kind = \"muon\"` is not supported with adapters: it orthogonalises updates of whole matrices, not of A and B; use \
                       \"adamw\""
            .to_owned();
        report.about(&["optimizer.kind", asks], message);
    }
    if config.checkpoint.export_dtype.is_some_and(|dtype| dtype != ExportDtype::Fp32) {
        let message = format!(
            "`export_dtype` is that of a model's weights, and adapters are exported in fp32; {}",
            report.leave_out(&["checkpoint.export_dtype"])
        );
        report.about(&["checkpoint.export_dtype", asks], message);
    }
    let parallel = &config.parallel;
    let mut refuse = |key: &str, given: String, instead: &str| {
        let key = format!("parallel.{key}");
        report.about(
            &[&key, asks],
            format!(
                "{given} is not supported with adapters yet; {instead}, or {}",
                report.leave_out(&[&key])
            ),
        );
    };
    for (key, size) in
        [("tensor", parallel.tensor), ("pipeline", parallel.pipeline), ("expert", parallel.expert)]
    {
        if size > 1 {
            let instead = "share the base model with `shard = \"weights\"`";
            refuse(key, format!("`{key}` = {size}"), instead);
        }
    }
    if parallel.reduce.is_any_mesh() {
        refuse("reduce", "`reduce = \"any-mesh\"`".to_owned(), "use `reduce = \"any-world\"`");
    }
}

/// Takes the settings of the adapters that training begins with, which `found` has, if the file leaves them
/// open; reports those that differ.
pub(crate) fn fill_from_folder(
    config: &mut Config,
    found: Option<&AdapterConfig>,
    model: &Architecture,
    report: &mut Report,
) {
    let Some(folder) = config.adapter.init_from.clone() else { return };
    let given = &config.adapter;
    let found = match found {
        Some(found) => found,
        None if given.rank.is_some() && given.alpha.is_some() && given.targets.is_some() => return,
        None => {
            let message =
                format!("the adapters in {folder:?} have not been read, and the file does not describe them");
            return report.about(&["adapter.init_from"], message);
        }
    };
    let is_same = |one: &Option<Targets>, other: &Option<Targets>| match (one, other) {
        (Some(one), Some(other)) => model.target_modules(one) == model.target_modules(other),
        _ => one == other,
    };
    let differs = [
        ("rank", given.rank.is_some() && given.rank != found.rank),
        ("alpha", given.alpha.is_some() && given.alpha != found.alpha),
        ("targets", given.targets.is_some() && !is_same(&given.targets(), &found.targets())),
    ];
    let [of_file, of_folder] = [given, found].map(|adapter| serde_json::json!(adapter));
    for (name, _) in differs.iter().filter(|(_, differs)| *differs) {
        let key = format!("adapter.{name}");
        let [given, found] = [&of_file[name], &of_folder[name]].map(toml_value);
        let leave_out = report.leave_out(&[&key, "adapter.init_from"]);
        report.about(
            &[&key, "adapter.init_from"],
            format!("`{name}` is {given}, but {found} in {folder:?}; {leave_out} to use the folder's"),
        );
    }
    let adapter = &mut config.adapter;
    adapter.rank = adapter.rank.or(found.rank);
    adapter.alpha = adapter.alpha.or(found.alpha);
    if adapter.targets.is_none() {
        adapter.targets.clone_from(&found.targets);
    }
}

/// Checks the targets of adapters against the model.
pub(crate) fn fits(model: &Architecture, report: &mut Report) {
    let Some(Adapter { targets, rank, .. }) = &model.adapter else { return };
    let known = model.adapter_targets().join(", ");
    let unmatched = model.unmatched_targets();
    if let Some(first) = unmatched.first() {
        let message =
            format!("`targets` names {first:?}, which no linear layer of the model has; it has {known}");
        report.about(&["adapter.targets"], message);
    }
    let has_experts = model.linears().any(|(_, linear)| linear.experts.is_some());
    let names_experts = match targets {
        Targets::AllLinear => has_experts,
        Targets::Named(_) => model.targets_experts(),
    };
    if names_experts {
        let without: Vec<String> =
            model.targets_beside_experts().iter().map(|name| format!("{name:?}")).collect();
        report.about(
            &["adapter.targets", "adapter.rank"],
            format!(
                "adapters of experts are not supported yet; name other layers, for example `targets = [{}]`",
                without.join(", ")
            ),
        );
    }
    if let Some(width) = model.narrowest_adapted().filter(|width| width < rank) {
        report.about(
            &["adapter.rank"],
            format!(
                "`rank` = {rank} is more than the width of the narrowest layer with an adapter, {width}; the adapter would not be smaller \
                 than the layer"
            ),
        );
    }
}
