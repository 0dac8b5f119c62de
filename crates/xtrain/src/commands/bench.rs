//! `xtrain bench`.

use crate::cli::{BenchOpArgs, BenchStepArgs};
use crate::failure::Failure;
use crate::ranks::{self, Place};
use crate::terminal;
use std::path::Path;
use std::process::ExitCode;
use xtrain_config::Override;
use xtrain_lab::bench::{self, BenchOptions, OpSpeed, RankOf, RankSpeed, StepSpeed};
use xtrain_rank::Rank;
use xtrain_report::metrics::format;
use xtrain_step::engine::Target;
use xtrain_train::run_file;
use xtrain_train::spec::plan_for;

/// `xtrain bench step`.
pub(crate) fn step(args: &BenchStepArgs, place: &Place) -> Result<ExitCode, Failure> {
    let mut overrides: Vec<Override> = args.run.set.iter().map(|set| Override::Set(set.clone())).collect();
    overrides.extend(args.processes.device(&args.run.set)?);
    let parsed = run_file::load(&args.run.file, &overrides)?;
    if let Some(count) = place.launches(&args.processes)? {
        parsed.check_shared(count)?;
        if let Some(routing) = args.routing {
            // Here, because each rank would report it.
            routing.of_model(&plan_for(&parsed, Target::Cpu, Rank::first_of(count))?.spec)?;
        }
        return Ok(ranks::exit_code(ranks::launch(count)?));
    }
    terminal::use_share_of_threads(parsed.config.train.threads, place.local_world_size())?;
    let process_group = place.join(&parsed.config.parallel, Path::new(ranks::BENCH_FOLDER))?;
    let BenchStepArgs { rank_of, stretch, link, gpus_per_node, warmup, repeats, steps, routing, .. } = *args;
    let of = |ranks| RankOf { ranks, stretch, nic: link, ranks_per_node: gpus_per_node };
    let rank_of = rank_of.map(of);
    let options = BenchOptions { warmup, repeats, steps, rank_of, routing };
    let speed = bench::step(&parsed, &process_group, options)?;
    if place.is_first() {
        let _ = match args.json {
            true => terminal::print_json(&speed)?,
            false => terminal::print(&table(&speed))?,
        };
    }
    Ok(ExitCode::SUCCESS)
}

/// `xtrain bench op`.
pub(crate) fn op(args: &BenchOpArgs) -> Result<(), Failure> {
    let parsed = run_file::load(&args.run.file, &args.run.set)?;
    terminal::use_threads(parsed.config.train.threads)?;
    let rows = bench::ops(&parsed, args.repeats)?;
    let total: f64 = rows.iter().map(|row| row.rates.seconds).sum();
    if args.json {
        return rows.iter().try_for_each(|row| terminal::print_json(row).map(|_| ()));
    }
    let mut out = String::new();
    let op_wide = terminal::column("op", rows.iter().map(|row| row.op.as_str()));
    let site_wide = terminal::column("site", rows.iter().map(|row| row.site.as_str()));
    out.push_str(&format!(
        "{:<op_wide$}{:<site_wide$}{:<12}{:>6}{:>11}{:>7}{:>10}{:>8}{:>9}{:>8}\n",
        "op", "site", "role", "count", "ms", "%", "TFLOP/s", "% best", "GB/s", "% best"
    ));
    for OpSpeed { op, site, role, count, rates } in &rows {
        out.push_str(&format!(
            "{op:<op_wide$}{site:<site_wide$}{role:<12}{count:>6}{:>11.3}{:>7.1}{:>10}{:>8.1}{:>9}{:>8.1}\n",
            rates.seconds * 1e3,
            100.0 * rates.seconds / total,
            format::significant(rates.tflops),
            100.0 * rates.of_product,
            format::significant(rates.gigabytes_per_second),
            100.0 * rates.of_copy
        ));
    }
    let before_ms = op_wide + site_wide + 18;
    out.push_str(&format!("{:<before_ms$}{:>11.3}\n", "total", total * 1e3));
    if rows.iter().any(|row| row.rates.of_product > 1.0 || row.rates.of_copy > 1.0) {
        out.push_str(
            "above 100%: the operands fit into caches, which are faster than the memory that the best copy moves; or the sizes suit \
             the processor better than those of the best GEMM\n",
        );
    }
    terminal::print(&out).map(|_| ())
}

fn table(speed: &StepSpeed) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: String| out.push_str(&format!("{name:<28}{value}\n"));
    line(
        "device",
        match speed.ranks {
            1 => speed.device.clone(),
            ranks => format!("{ranks} ranks, each on {}", speed.device),
        },
    );
    line("precision", speed.precision.clone());
    line("tokens of", speed.data.to_owned());
    line("tokens a step", format::grouped(speed.tokens));
    line("step", format!("{:.3} ms", speed.seconds * 1e3));
    line("tokens a second", format::grouped(speed.tokens_per_second as u64));
    line("TFLOP/s", format::significant(speed.tflops));
    if let Some(share) = speed.of_product {
        line("of the best GEMM", format!("{:.1}%", 100.0 * share));
    }
    if let Some(mfu) = speed.mfu {
        line("MFU", format!("{:.1}%", 100.0 * mfu));
    }
    if let Some(RankSpeed { ranks, plan_seconds, plan_exposed_seconds, .. }) = speed.rank {
        let (step, exposed) = (1e3 * plan_seconds, 1e3 * plan_exposed_seconds);
        line("rank", format!("0 of {ranks}, with copies in place of collectives"));
        line("step by the plan", format!("{step:.3} ms, {exposed:.3} ms of it waiting for other ranks"));
    }
    line("planned memory", format::gib(speed.rank.map_or(speed.planned_bytes, |rank| rank.plan_bytes)));
    if let Some(RankSpeed { plan_sent_bytes, sent_bytes, .. }) = speed.rank {
        line("allocated memory", format::gib(speed.planned_bytes));
        line("sent a step by the plan", format::grouped(plan_sent_bytes));
        if let Some(bytes) = sent_bytes {
            line("sent a step", format::grouped(bytes));
        }
    }
    if let Some(bytes) = speed.card_bytes {
        line("GPU memory used", format::gib(bytes));
    }
    line("first step after", format!("{:.2} s", speed.first_step_seconds));
    line("loss", format!("{:.4}", speed.loss));
    out
}
