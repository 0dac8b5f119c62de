//! The meshes of a run beside each other, and the stages of a pipeline.

use super::Advised;
use std::fmt::Write;
use xtrain_planner::estimate::stages::StageCost;
use xtrain_planner::meshes::{LeftOut, MeshRow};
use xtrain_report::metrics::format;

/// Figures of a line.
const OF_LINE: usize = 16;

/// The difference of two times, as a share, that the estimate does not tell.
const NEAR: f64 = 0.02;

/// Reasons of a mesh that are named.
const MOST_LIMITS: usize = 4;

/// The meshes: the fastest that fits, the next ones, and what limits each. Without others than that of the
/// run, the reasons why none was planned.
pub(super) fn text(advised: &Advised<'_>) -> String {
    let advice = &advised.advice;
    let rows = &advice.meshes;
    let ranks = advice.shown().planned.rank.world_size;
    if rows.is_empty() {
        return others(&advice.left_out, ranks);
    }
    let name = |row: &MeshRow| {
        let MeshRow { tensor, pipeline, data, expert, replicas, shard, micro_batch_size, .. } = row;
        let others = [("expert", *expert), ("replicas", *replicas), ("micro_batch_size", *micro_batch_size)];
        let others = others.into_iter().filter(|(_, n)| *n > 1).map(|(key, n)| format!(", {key}={n}"));
        format!("{tensor} x {pipeline} x {data}, {shard}{}", others.collect::<String>())
    };
    let head = "tensor x pipeline x data";
    let width = rows.iter().map(|row| name(row).len()).max().unwrap_or(0).max(head.len()) + 2;
    let mut out = format!("\n{head:<width$}{:>12}{:>12}{:>8}\n", "memory", "step", "MFU");
    for row in rows {
        let mfu = row.mfu.map_or(String::new(), |mfu| format::percent(mfu, 1));
        let notes = [
            (row.is_given, "as configured"),
            (row.is_proposed, "proposed"),
            (row.fits == Some(false), "does not fit"),
        ];
        let notes = notes.into_iter().filter(|(holds, _)| *holds).map(|(_, note)| note.to_owned());
        let notes: Vec<String> = notes.chain(row.chosen.clone()).collect();
        let [memory, seconds] = [format::gib(row.needed_bytes), format::seconds(row.seconds)];
        let _ = writeln!(out, "{:<width$}{memory:>12}{seconds:>12}{mfu:>8}  {}", name(row), notes.join("; "));
        let limits: Vec<String> = row.limits.iter().take(MOST_LIMITS).map(ToString::to_string).collect();
        let limits = if limits.is_empty() {
            "kernels; all else takes less than 3% each".to_owned()
        } else {
            limits.join("; ")
        };
        let _ = writeln!(out, "    limited by  {limits}");
        let sets: Vec<String> = row.set.iter().map(|setting| format!("--set {setting}")).collect();
        if !sets.is_empty() {
            let _ = writeln!(out, "    settings    {}", sets.join(" "));
        }
        stages(&mut out, "GiB", &row.stages, |of| of.bytes as f64 / (1u64 << 30) as f64);
        let is_long = row.stages.iter().any(|of| of.busy_seconds >= 1.0);
        let (name, unit) = if is_long { ("seconds", 1.0) } else { ("ms", 1e3) };
        stages(&mut out, name, &row.stages, |of| unit * of.busy_seconds);
    }
    if let Some(line) = data_ranks_alone(rows) {
        out.push_str(&line);
    }
    out.push_str(&others(&advice.left_out, ranks));
    out
}

/// A figure of each stage; of equal neighbours once, with their number.
fn stages(out: &mut String, name: &str, stages: &[StageCost], figure: impl Fn(&StageCost) -> f64) {
    let figures: Vec<String> = stages.iter().map(|of| format::significant(figure(of))).collect();
    let equal = figures.chunk_by(|a, b| a == b).map(|alike| match alike.len() {
        1 => alike[0].clone(),
        count => format!("{} (x {count})", alike[0]),
    });
    for (n, line) in equal.collect::<Vec<_>>().chunks(OF_LINE).enumerate() {
        let head = if n == 0 { format!("{name} of stages") } else { String::new() };
        let _ = writeln!(out, "    {head:<19} {}", line.join(" "));
    }
}

/// The comparison of data ranks alone with the fastest other mesh, if both fit.
fn data_ranks_alone(rows: &[MeshRow]) -> Option<String> {
    let fitting = || rows.iter().filter(|row| row.fits != Some(false));
    let is_alone = |row: &&MeshRow| row.tensor * row.pipeline == 1;
    let (alone, other) = (fitting().find(is_alone)?, fitting().find(|row| !is_alone(row))?);
    if alone.seconds > other.seconds * (1.0 + NEAR) {
        return None;
    }
    let than = match other.seconds / alone.seconds {
        ratio if ratio < 1.0 + NEAR => "as fast as any other mesh".to_owned(),
        ratio => format!("{ratio:.2} times as fast as the best other mesh"),
    };
    Some(format!(
        "data ranks alone (parallel.shard = \"{}\") fit and are {than}, by the estimate: tensor ranks and stages are for few sequences on \
         many GPUs, and for slow links\n",
        alone.shard
    ))
}

/// The line of the meshes that were not planned.
fn others(of: &LeftOut, ranks: usize) -> String {
    left_out(of, ranks).map_or(String::new(), |text| format!("not planned, {text}\n"))
}

/// The number of meshes that were not planned, by reason; `None` if there are none.
pub(crate) fn left_out(of: &LeftOut, ranks: usize) -> Option<String> {
    let reasons = [
        (of.batch, "for a batch that they cannot share evenly"),
        (of.micro_batches, "for fewer micro-batches than stages"),
        (of.uneven, "for uneven stages"),
        (of.memory, "for the memory of their state alone"),
        (of.refused, "that this run refuses"),
        (of.slower, "as likely slower"),
    ];
    let named =
        reasons.into_iter().filter(|(count, _)| *count > 0).map(|(count, why)| format!("{count} {why}"));
    let named: Vec<String> = named.collect();
    (!named.is_empty()).then(|| format!("of other meshes of {ranks} ranks: {}", named.join(", ")))
}
