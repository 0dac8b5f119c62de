//! The rules between keys: required keys, exclusions, divisibility.
//!
//! A rule uses only the file. Rules that need the tokenizer, the data or a folder are in `resolve`.

pub(super) mod adapter;
pub(super) mod model;
pub(super) mod ranks;

use super::error::Report;
use super::print::toml_value;
use super::schema::sections;
use super::section::{
    DataSource, DataSources, MomentFormat, OptimizerConfig, OptimizerKind, TokenizerChoice,
};
use super::{Config, OrAuto, Recompute, ScheduleKind};

/// A setting that a key needs beside it, or excludes.
#[derive(Clone, Copy)]
pub(super) enum Beside {
    /// It needs this one, `section.key = value`.
    Needs(&'static str),
    /// It takes the place of these keys, of which run files have one.
    Replaces(&'static [&'static str]),
}

/// The setting that the key `path` needs beside it in a run file that has none of the topic.
pub(super) fn beside(path: &str) -> Option<Beside> {
    Some(match path {
        "schedule.decay_steps" | "schedule.decay_fraction" | "schedule.decay_shape" => {
            Beside::Needs("schedule.kind = \"wsd\"")
        }
        "optimizer.momentum" => Beside::Needs("optimizer.kind = \"muon\""),
        "train.recompute_blocks" => Beside::Needs("train.recompute = \"block\""),
        "precision.margin" | "precision.amax_history_len" | "precision.amax_compute" => {
            Beside::Needs("precision.recipe = \"fp8-delayed\"")
        }
        "train.tokens" => Beside::Replaces(&["train.steps", "train.epochs"]),
        "train.epochs" => Beside::Replaces(&["train.steps", "train.tokens"]),
        _ => return None,
    })
}

/// Reports every rule that `config` breaks.
pub(super) fn check(config: &Config, report: &mut Report) {
    model::check(config, report);
    data(config, report);
    run_length(config, report);
    if let Some(steps) = config.train.total_steps(config.data.seq_len, None) {
        schedule_fits(config, steps, report);
    }
    schedule(config, report);
    optimizer(config, report);
    within_f32(config, report);
    saving_and_evaluation(config, report);
    ranks::check(config, report);
    adapter::check(config, report);
}

/// Keys that belong to one optimizer.
fn optimizer(config: &Config, report: &mut Report) {
    let OptimizerConfig { kind, momentum, moments, .. } = config.optimizer;
    if kind == OptimizerKind::AdamW && momentum.is_some() {
        let message = format!(
            "`momentum` is that of `kind = \"muon\"`; AdamW has `betas`; {}, or set `kind`",
            report.leave_out(&["optimizer.momentum"])
        );
        report.about(&["optimizer.momentum", "optimizer.kind"], message);
    }
    if kind == OptimizerKind::Muon && moments == MomentFormat::Bf16 {
        let message = "`moments = \"bf16\"` is not supported with `kind = \"muon\"`, which has one moment of a matrix in fp32; use \"fp32\", or \
                       `kind = \"adamw\"`";
        report.about(&["optimizer.moments", "optimizer.kind"], message.to_owned());
    }
}

/// Checks the schedule against a run of `steps`.
pub(super) fn schedule_fits(config: &Config, steps: u64, report: &mut Report) {
    let schedule = &config.schedule;
    let warmup = schedule.warmup_steps(steps);
    let decay = schedule.decay_steps(steps);
    if warmup > steps {
        report.about(
            &["schedule.warmup_steps", "train.steps", "train.tokens", "train.epochs"],
            format!(
                "`warmup_steps` is {warmup}, but the run has only {steps} steps; give fewer, or train longer"
            ),
        );
    } else if warmup.saturating_add(decay) > steps {
        report.about(
            &[
                "schedule.decay_steps",
                "schedule.decay_fraction",
                "schedule.warmup_steps",
                "train.steps",
                "train.tokens",
            ],
            format!(
                "{warmup} steps of warmup and {decay} of decay do not fit into a run of {steps} steps; \
                 shorten one of them"
            ),
        );
    }
}

fn data(config: &Config, report: &mut Report) {
    let data = &config.data;
    missing(report, "data", "train", data.train.0.is_empty(), "");
    weights(report, "data.train", &data.train);
    if let Some(valid) = &data.valid {
        weights(report, "data.valid", valid);
        if data.held_out.is_some() {
            exclusive(report, "data.held_out", "data.valid", "validation data come from one of them");
        }
    }
    let trained_here = !matches!(data.tokenizer, None | Some(TokenizerChoice::Path(_)));
    if let (true, Some(tokenizer), Some(_)) = (trained_here, &data.tokenizer, &config.model.init_from) {
        let keys = ["data.tokenizer", "model.init_from"];
        let message = format!(
            "`tokenizer` = \"{tokenizer}\" creates a vocabulary that does not fit the weights of `model.init_from`; {} \
             to use the folder's own. docs/data-format.md says what changing a vocabulary needs",
            report.leave_out(&keys)
        );
        report.about(&keys, message);
    }
    let learns_bpe = match &data.tokenizer {
        None => config.model.init_from.is_none(),
        Some(tokenizer) => *tokenizer == TokenizerChoice::Bpe,
    };
    if let (Some(size), false) = (data.bpe_vocab_size, learns_bpe) {
        let keys = ["data.bpe_vocab_size", "data.tokenizer", "model.init_from"];
        let message =
            format!("`bpe_vocab_size` = {size} needs `tokenizer = \"bpe\"`; {}", report.leave_out(&keys));
        report.about(&keys, message);
    }
}

fn weights(report: &mut Report, key: &str, sources: &DataSources) {
    let weighted = |source: &&DataSource| source.weight.is_some();
    let count = sources.0.iter().filter(weighted).count();
    if count != 0 && count != sources.0.len() {
        let without =
            sources.0.iter().find(|source| source.weight.is_none()).map_or("", |source| source.path.as_str());
        let name = key.trim_start_matches("data.");
        report.about(
            &[key],
            format!("`{name}` gives some sources a `weight` but not {without:?}; give one to all or to none"),
        );
    }
}

fn run_length(config: &Config, report: &mut Report) {
    let train = &config.train;
    let keys = [
        ("steps", train.steps.is_some()),
        ("tokens", train.tokens.is_some()),
        ("epochs", train.epochs.is_some()),
    ];
    let given: Vec<&str> = keys.iter().filter(|(_, given)| *given).map(|(name, _)| *name).collect();
    match given.as_slice() {
        [] => report.about(
            &["train.steps", "train.tokens", "train.epochs"],
            "the length of the run is missing: give `steps`, `tokens` or `epochs`; for example `steps = 1000`"
                .to_owned(),
        ),
        [_] => {}
        [first, .., last] => {
            let [last, first] = [last, first].map(|name| format!("train.{name}"));
            exclusive(report, &last, &first, "one of them says how long to train");
        }
    }
    if let Some(OrAuto::Is(micro)) = train.micro_batch_size
        && !train.batch_size.is_multiple_of(micro)
    {
        report.about(
            &["train.micro_batch_size", "train.batch_size"],
            format!(
                "`micro_batch_size` = {micro} does not divide `batch_size` = {}; {}",
                train.batch_size,
                nearest_divisors("micro_batch_size", train.batch_size, micro)
            ),
        );
    }
    if let (Recompute::Auto, Some(OrAuto::Is(blocks))) = (train.recompute, train.recompute_blocks) {
        report.about(
            &["train.recompute_blocks", "train.recompute"],
            format!(
                "`recompute_blocks` = {blocks} needs `recompute` = \"norms\" or \"block\"; with \"auto\", its default, both are chosen"
            ),
        );
    }
}

fn schedule(config: &Config, report: &mut Report) {
    let schedule = &config.schedule;
    let lr = config.optimizer.lr;
    let kind = toml_value(&serde_json::json!(schedule.kind));
    if schedule.min_lr.is_some() && schedule.min_lr_ratio.is_some() {
        let why = "both give the final learning rate";
        exclusive(report, "schedule.min_lr", "schedule.min_lr_ratio", why);
    }
    if let Some(min_lr) = schedule.min_lr
        && min_lr > lr
    {
        report.about(
            &["schedule.min_lr", "optimizer.lr"],
            format!(
                "`min_lr` = {} is greater than `optimizer.lr` = {}; lower one or raise the other",
                toml_value(&min_lr.into()),
                toml_value(&lr.into())
            ),
        );
    }
    if schedule.decay_steps.is_some() && schedule.decay_fraction.is_some() {
        let why = "both give the length of the final decay";
        exclusive(report, "schedule.decay_fraction", "schedule.decay_steps", why);
    }
    let wsd_only = [
        ("decay_steps", schedule.decay_steps.is_some()),
        ("decay_fraction", schedule.decay_fraction.is_some()),
        ("decay_shape", schedule.decay_shape.is_some()),
    ];
    let falling_only =
        [("min_lr", schedule.min_lr.is_some()), ("min_lr_ratio", schedule.min_lr_ratio.is_some())];
    let mut unused = |keys: &[(&str, bool)], needed: &str| {
        for (key, _) in keys.iter().filter(|(_, given)| *given) {
            let name = format!("schedule.{key}");
            let leave_out = report.leave_out(&[&name, "schedule.kind"]);
            report.about(
                &[&name, "schedule.kind"],
                format!("`{key}` has no meaning for `kind = {kind}`; {leave_out}, or choose {needed}"),
            );
        }
    };
    if schedule.kind != ScheduleKind::Wsd {
        unused(&wsd_only, "\"wsd\"");
    }
    if schedule.kind == ScheduleKind::Constant {
        unused(&falling_only, "\"linear\", \"cosine\" or \"wsd\"");
    }
}

/// The update, random weights, gates and the losses of routers are computed in f32, where a number out of
/// range becomes 0 or infinity. Either one destroys the weights or disables the setting.
fn within_f32(config: &Config, report: &mut Report) {
    let (model, experts, optimizer) = (&config.model, &config.experts, &config.optimizer);
    for (section, name, value) in [
        ("model", "init_std", Some(model.init_std)),
        ("experts", "scale", experts.scale),
        ("experts", "balance_loss", experts.balance_loss),
        ("experts", "bias_rate", experts.bias_rate),
        ("experts", "z_loss", experts.z_loss),
        ("adapter", "alpha", config.adapter.alpha),
        ("optimizer", "lr", Some(optimizer.lr)),
        ("optimizer", "eps", Some(optimizer.eps)),
        ("optimizer", "weight_decay", Some(optimizer.weight_decay)),
        ("optimizer", "grad_clip", Some(optimizer.grad_clip)),
    ] {
        let Some(value) = value else { continue };
        let held = value as f32;
        if !held.is_finite() || (held == 0.0) != (value == 0.0) {
            let message = format!(
                "`{name}` = {} is out of the range of f32, in which it is used; give a number from 1e-45 to 3e38",
                toml_value(&value.into())
            );
            report.about(&[&format!("{section}.{name}")], message);
        }
    }
    if let Some(beta) = optimizer.betas.iter().find(|beta| **beta as f32 >= 1.0) {
        report.about(
            &["optimizer.betas"],
            format!(
                "`betas` has {}, which is 1 in f32, so that a moment would never move; give at most 0.9999999",
                toml_value(&(*beta).into())
            ),
        );
    }
    if let Some(momentum) = optimizer.momentum.filter(|momentum| *momentum as f32 >= 1.0) {
        let message = format!(
            "`momentum` = {} is 1 in f32, so that the moment would never move; give at most 0.9999999",
            toml_value(&momentum.into())
        );
        report.about(&["optimizer.momentum"], message);
    }
}

fn saving_and_evaluation(config: &Config, report: &mut Report) {
    let checkpoint = &config.checkpoint;
    if checkpoint.keep_every != 0
        && (checkpoint.every == 0 || !checkpoint.keep_every.is_multiple_of(checkpoint.every))
    {
        report.about(
            &["checkpoint.keep_every", "checkpoint.every"],
            format!(
                "`keep_every` = {} is not a multiple of `every` = {}, so no such step is saved; make it one",
                checkpoint.keep_every, checkpoint.every
            ),
        );
    }
    let every = config.eval.every.unwrap_or(0);
    if every != 0 && !config.data.has_validation_data() {
        report.about(
            &["eval.every", "data.held_out"],
            format!(
                "`every` = {every} needs validation data, but `data.held_out` is 0; give `data.valid`, or set \
                 `every = 0`"
            ),
        );
    }
    best_checkpoint(config, report);
}

/// Refuses a best checkpoint that no evaluation finds, and settings of tasks without tasks.
fn best_checkpoint(config: &Config, report: &mut Report) {
    let (checkpoint, eval) = (&config.checkpoint, &config.eval);
    let is_of_task = checkpoint.is_best_of_task();
    if !is_of_task && checkpoint.best != "loss" {
        report.about(
            &["checkpoint.best"],
            format!(
                "`best` is {:?}, which is neither \"loss\" nor \"task NAME\" with a task of `eval.tasks`",
                checkpoint.best
            ),
        );
    }
    if eval.tasks.is_empty() {
        if is_of_task {
            report.about(
                &["checkpoint.best", "eval.tasks"],
                format!("`best` is {:?}, but `eval.tasks` names no task", checkpoint.best),
            );
        }
        if eval.tasks_every > 0 || eval.tasks_limit.is_some() {
            let keys = ["eval.tasks", "eval.tasks_every", "eval.tasks_limit"];
            report.about(&keys, "`tasks_every` and `tasks_limit` have no effect without `tasks`".to_owned());
        }
    }
    if !is_of_task && checkpoint.keep_best == Some(true) && eval.every(config.data.has_validation_data()) == 0
    {
        report.about(
            &["checkpoint.keep_best", "eval.every", "data.held_out"],
            "`keep_best` needs evaluations during the run; set `eval.every`, or `keep_best = false`"
                .to_owned(),
        );
    }
}

fn missing(report: &mut Report, section: &str, key: &str, missing: bool, alternative: &str) {
    if missing {
        let keys = sections().iter().filter(|found| found.name == section).flat_map(|found| &found.keys);
        let example =
            keys.filter(|found| found.name == key).map(|found| found.for_example()).collect::<String>();
        report.about(&[&format!("{section}.{key}")], format!("`{key}` is missing{example}{alternative}"));
    }
}

/// Reports that two keys of a section exclude each other.
fn exclusive(report: &mut Report, one: &str, other: &str, why: &str) {
    let name = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let leave_out = report.leave_one_out(one, other);
    report.about(
        &[one, other],
        format!("`{}` and `{}` are both given, but {why}; {leave_out}", name(one), name(other)),
    );
}

/// `try kv_heads = 2 or kv_heads = 3`: the divisors of `whole` next to `part`.
fn nearest_divisors(key: &str, whole: usize, part: usize) -> String {
    nearest_divisors_to(usize::MAX, key, whole, part)
}

/// As [`nearest_divisors`], of those up to `most`.
fn nearest_divisors_to(most: usize, key: &str, whole: usize, part: usize) -> String {
    let divides = |divisor: &usize| whole.is_multiple_of(*divisor);
    let below = (1..part.min(whole + 1)).rev().find(divides);
    let above = (part..=whole.min(most)).find(divides);
    let tries: Vec<String> =
        below.into_iter().chain(above).map(|divisor| format!("`{key} = {divisor}`")).collect();
    format!("try {}", tries.join(" or "))
}
