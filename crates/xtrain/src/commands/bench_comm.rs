//! `xtrain bench comm`.

use crate::cli::BenchCommArgs;
use crate::failure::Failure;
use crate::ranks::{self, Place};
use crate::terminal;
use std::path::Path;
use std::process::ExitCode;
use xtrain_config::{Device, ParallelConfig};
use xtrain_lab::bench::{self, CommOptions, CommSpeeds};
use xtrain_report::metrics::format;

/// Sizes if none are given.
const SIZES: [u64; 3] = [1 << 20, 16 << 20, 64 << 20];

pub(crate) fn run(args: &BenchCommArgs, place: &Place) -> Result<ExitCode, Failure> {
    if let Some(count) = place.launches(&args.processes)? {
        return Ok(ranks::exit_code(ranks::launch(count)?));
    }
    terminal::use_share_of_threads(args.cpu.threads, place.local_world_size())?;
    let process_group = place.join(&ParallelConfig::default(), Path::new(ranks::BENCH_FOLDER))?;
    let device = match (args.processes.gpus, args.processes.ranks) {
        (Some(_), _) => Device::Cuda,
        (_, Some(_)) => Device::Cpu,
        _ => args.device,
    };
    let sizes = match args.size.is_empty() {
        true => SIZES.to_vec(),
        false => args.size.iter().map(|size| size.0).collect(),
    };
    let BenchCommArgs { transport, gemm, repeats, runs, .. } = *args;
    let options = CommOptions { device, transport, sizes, gemm, repeats, runs };
    let speeds = bench::comm(&process_group, &options)?;
    if place.is_first() {
        let _ = match args.json {
            true => terminal::print_json(&speeds)?,
            false => terminal::print(&table(&speeds))?,
        };
    }
    Ok(ExitCode::SUCCESS)
}

fn table(speeds: &CommSpeeds) -> String {
    let CommSpeeds { device, transport, ranks, gemm, gemm_seconds, rows } = speeds;
    let ms = |seconds: f64| format!("{:.3}", 1e3 * seconds);
    let mut out = format!(
        "{ranks} ranks, each on {device}, path {transport}; a GEMM of {gemm}^3 takes {} ms alone\n{:<16}{:>12}{:>12}{:>12}{:>20}{:>20}\n",
        ms(*gemm_seconds),
        "collective",
        "size",
        "ms",
        "bus GB/s",
        "ms beside a GEMM",
        "ms of this GEMM"
    );
    for row in rows {
        out.push_str(&format!(
            "{:<16}{:>12}{:>12}{:>12}{:>20}{:>20}\n",
            row.collective,
            format::bytes(row.bytes),
            ms(row.seconds),
            format::significant(row.bus_gigabytes_per_second),
            ms(row.beside_gemm_seconds),
            ms(row.gemm_beside_seconds)
        ));
    }
    out
}
