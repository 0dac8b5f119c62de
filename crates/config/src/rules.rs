//! The rules between keys: required keys, exclusions, divisibility.
//!
//! A rule uses only the file. Rules that need the tokenizer, the data or a folder are in `resolve`.

use super::error::Report;
use super::print::toml_value;
use super::schema::sections;
use super::section::{DataSource, DataSources, ParallelConfig, ReduceDtype, TokenizerChoice, Transport};
use super::{Balance, Config, OrAuto, Recompute, RopeScaling, ScheduleKind};
use std::time::Duration;
use xtrain_model::{Description, Family};
use xtrain_program::Reduce;

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
    if config.model.init_from.is_none() {
        described_model(config, report);
    }
    rope_scaling(config, report);
    positions(config, report);
    data(config, report);
    run_length(config, report);
    if let Some(steps) = config.train.total_steps(config.data.seq_len, None) {
        schedule_fits(config, steps, report);
    }
    schedule(config, report);
    within_f32(config, report);
    saving_and_evaluation(config, report);
    gradients_between_ranks(config, report);
    times_between_ranks(config, report);
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

/// Checks that so many ranks can be divided into replicas and add gradients in the given order, and that each
/// gets as many micro-batches of a step as the others.
pub(super) fn shared_by(config: &Config, ranks: usize, report: &mut Report) {
    let ParallelConfig { pipeline, replicas, tensor, reduce, .. } = config.parallel;
    if ranks > 1 && !ranks.is_multiple_of(pipeline) {
        report.about(
            &["parallel.pipeline"],
            format!(
                "{ranks} ranks cannot be divided into `pipeline` = {pipeline} stages of equal size; {}, or another number of ranks",
                nearest_divisors("pipeline", ranks, pipeline)
            ),
        );
        return;
    }
    let (is_alone, data_ranks) = (ranks <= 1, config.parallel.data_ranks(ranks));
    // Those of a stage, which share batch and state.
    let ranks = ranks / config.parallel.stages(ranks);
    if ranks > 1 && !ranks.is_multiple_of(replicas) {
        report.about(
            &["parallel.replicas"],
            format!(
                "{ranks} ranks cannot be divided into `replicas` = {replicas} groups of equal size; {}, or another number of \
                 ranks",
                nearest_divisors("replicas", ranks, replicas)
            ),
        );
    }
    if !is_alone && !ranks.is_multiple_of(tensor) {
        report.about(
            &["parallel.tensor"],
            format!(
                "{ranks} ranks of a stage cannot be divided into groups of `tensor` = {tensor}; {}, or another number of ranks",
                nearest_divisors("tensor", ranks, tensor)
            ),
        );
        return;
    }
    if reduce.is_any_world() && !ranks.is_power_of_two() {
        report.about(
            &["parallel.reduce"],
            format!(
                "`reduce = \"{}\"` adds gradients as a binary tree over ranks, whose number must be a power of two, not {ranks}; use \
                 another number of ranks, or {}",
                reduce.name(),
                report.leave_out(&["parallel.reduce"])
            ),
        );
    }
    shared_batch(config, data_ranks, report);
}

/// Checks that so many ranks with different data get as many micro-batches each.
fn shared_batch(config: &Config, ranks: usize, report: &mut Report) {
    let (batch, micro) = (config.train.batch_size, config.train.micro_batch_size);
    let sharers = if config.parallel.tensor > 1 { "groups of tensor ranks" } else { "ranks" };
    if !batch.is_multiple_of(ranks) {
        let unit = match micro {
            Some(OrAuto::Is(micro)) if report.is_given("train.micro_batch_size") => ranks * micro,
            _ => ranks,
        };
        let near = [batch / unit * unit, batch.next_multiple_of(unit)];
        let tries: Vec<String> =
            near.iter().filter(|size| **size > 0).map(|size| format!("`batch_size = {size}`")).collect();
        report.about(
            &["train.batch_size"],
            format!(
                "`batch_size` = {batch} cannot be shared evenly by {ranks} {sharers}; try {}{}",
                tries.join(" or "),
                match batch < ranks {
                    true => ", or a larger `parallel.tensor`, whose ranks share sequences",
                    false => "",
                }
            ),
        );
    } else if let Some(OrAuto::Is(micro)) = micro
        && !(batch / micro).is_multiple_of(ranks)
    {
        report.about(
            &["train.micro_batch_size", "train.batch_size"],
            format!(
                "`micro_batch_size` = {micro} makes {} micro-batches of `batch_size` = {batch}, which {ranks} ranks cannot share \
                 evenly; {}",
                batch / micro,
                nearest_divisors("micro_batch_size", batch / ranks, micro)
            ),
        );
    }
}

/// Checks the longest position against the sequence length, also if a folder gives the longest position.
pub(super) fn positions(config: &Config, report: &mut Report) {
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
pub(super) fn within_window(config: &Config, window: Option<usize>, report: &mut Report) {
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
pub(super) fn experts(config: &Config, model: &Description, report: &mut Report) -> bool {
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

/// Refuses times within which no rank can answer.
fn times_between_ranks(config: &Config, report: &mut Report) {
    let ParallelConfig { start_timeout, timeout, .. } = config.parallel;
    for (key, time) in [("start_timeout", start_timeout), ("timeout", timeout)] {
        if time.duration() < Duration::from_secs(1) {
            report.about(&[&format!("parallel.{key}")], format!("`{key}` is {time}; give at least 1s"));
        }
    }
}

fn gradients_between_ranks(config: &Config, report: &mut Report) {
    let ParallelConfig { reduce, reduce_dtype, transport, .. } = config.parallel;
    let rounds = match reduce {
        Reduce::SameWorld => None,
        Reduce::AnyWorld | Reduce::AnyMesh => {
            Some("sums for any world have the bits of one process, which rounds no gradients")
        }
        Reduce::Fast => {
            Some("NCCL adds gradients in the type in which ranks send them, and sums in bf16 lose gradients")
        }
    };
    if let (Some(why), ReduceDtype::Bf16) = (rounds, reduce_dtype) {
        exclusive(report, "parallel.reduce", "parallel.reduce_dtype", why);
    }
    if (reduce, transport) == (Reduce::Fast, Transport::Copy) {
        let why = "only NCCL adds while it sends, and copies add nothing";
        exclusive(report, "parallel.reduce", "parallel.transport", why);
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
    let divides = |divisor: &usize| whole.is_multiple_of(*divisor);
    let below = (1..part.min(whole + 1)).rev().find(divides);
    let above = (part..=whole).find(divides);
    let tries: Vec<String> =
        below.into_iter().chain(above).map(|divisor| format!("`{key} = {divisor}`")).collect();
    format!("try {}", tries.join(" or "))
}
