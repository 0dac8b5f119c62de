//! The rules between the keys of `[parallel]`, the number of ranks and others.

use super::{exclusive, nearest_divisors, nearest_divisors_to};
use crate::error::Report;
use crate::section::{ParallelConfig, ReduceDtype, Transport};
use crate::{Config, OrAuto};
use std::time::Duration;
use xtrain_program::Reduce;

/// The most stages, and the most ranks of a tensor group.
const MOST_RANKS: usize = 64;

/// Checks `[parallel]` against itself and the rest of the file, whatever the number of ranks.
pub(super) fn check(config: &Config, report: &mut Report) {
    gradients_between_ranks(config, report);
    times_between_ranks(config, report);
}

/// Checks that so many ranks can be divided into replicas and add gradients in the given order, and that each
/// gets as many micro-batches of a step as the others.
pub(crate) fn shared_by(config: &Config, ranks: usize, report: &mut Report) {
    let ParallelConfig { pipeline, replicas, tensor, reduce, .. } = config.parallel;
    if ranks > 1 && !ranks.is_multiple_of(pipeline) {
        report.about(
            &["parallel.pipeline"],
            format!(
                "{ranks} ranks cannot be divided into `pipeline` = {pipeline} stages of equal size; {}, or another number of ranks",
                nearest_divisors_to(MOST_RANKS, "pipeline", ranks, pipeline)
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
                "{} of a stage cannot be divided into groups of `tensor` = {tensor}; {}, or another number of ranks",
                if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") },
                nearest_divisors_to(MOST_RANKS, "tensor", ranks, tensor)
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
    if !is_alone {
        shared_by_chunks(config, data_ranks, report);
    }
}

/// Checks that the chunks of stages get as many micro-batches of each rank as stages, or a multiple.
fn shared_by_chunks(config: &Config, data_ranks: usize, report: &mut Report) {
    let ParallelConfig { pipeline, pipeline_chunks, .. } = config.parallel;
    if pipeline_chunks == 1 || pipeline == 1 {
        return;
    }
    let of_rank = config.train.batch_size / data_ranks.max(1);
    let keys = ["parallel.pipeline_chunks", "train.micro_batch_size"];
    if !of_rank.is_multiple_of(pipeline) {
        let message = format!(
            "`pipeline_chunks` = {pipeline_chunks} needs a multiple of `pipeline` = {pipeline} micro-batches for each rank, and a rank has \
             {of_rank} sequences of a step; use another `batch_size`, or {}",
            report.leave_out(&["parallel.pipeline_chunks"])
        );
        report.about(&["parallel.pipeline_chunks", "train.batch_size"], message);
        return;
    }
    match config.train.micro_batch_size.and_then(OrAuto::number) {
        None => report.about(
            &keys,
            format!(
                "`pipeline_chunks` = {pipeline_chunks} needs a multiple of `pipeline` = {pipeline} micro-batches for each rank, so \
                 `micro_batch_size` must be set; set `micro_batch_size = 1`, or another divisor of {}",
                of_rank / pipeline
            ),
        ),
        Some(micro) if !(of_rank / micro).is_multiple_of(pipeline) => report.about(
            &keys,
            format!(
                "`micro_batch_size` = {micro} makes {} for each rank, which is no multiple of `pipeline` = {pipeline}, and \
                 `pipeline_chunks` = {pipeline_chunks} needs one; {}",
                micro_batches(of_rank / micro),
                nearest_divisors("micro_batch_size", of_rank / pipeline, micro)
            ),
        ),
        Some(_) => {}
    }
}

/// `1 micro-batch`, `2 micro-batches`.
fn micro_batches(count: usize) -> String {
    format!("{count} micro-batch{}", if count == 1 { "" } else { "es" })
}

/// True if the rest of the file allows tensor ranks.
fn can_have_tensor_ranks(config: &Config) -> bool {
    !config.adapter.is_given()
        && config.parallel.reduce != Reduce::AnyWorld
        && config.model.kv_heads().is_none_or(|heads| heads > 1)
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
                match batch < ranks && can_have_tensor_ranks(config) {
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
                "`micro_batch_size` = {micro} makes {} of `batch_size` = {batch}, which {ranks} ranks cannot share \
                 evenly; {}",
                micro_batches(batch / micro),
                nearest_divisors("micro_batch_size", batch / ranks, micro)
            ),
        );
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
    if reduce.is_any_mesh() && config.train.micro_batch_size.and_then(OrAuto::number).is_none() {
        report.about(
            &["parallel.reduce", "train.micro_batch_size"],
            "`reduce = \"any-mesh\"` has equal bits on meshes with the same `micro_batch_size`, which is not set and would depend on \
             ranks and memory; set `micro_batch_size = 1`, or another number that all meshes can share"
                .to_owned(),
        );
    }
    if (reduce, transport) == (Reduce::Fast, Transport::Copy) {
        let why = "only NCCL adds while it sends, and copies add nothing";
        exclusive(report, "parallel.reduce", "parallel.transport", why);
    }
}
