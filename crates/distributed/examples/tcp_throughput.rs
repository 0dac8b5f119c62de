//! Throughput of the collectives between processes of this machine:
//! `cargo run --release -p xtrain-distributed --example tcp_throughput -- RANKS`.
//!
//! A line has the time of one collective and the bytes that a rank sends to the others in a second.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use xtrain_distributed::{
    CommError, Communicator, Control, Environment, RankLauncher, SECRET_VARIABLE, Secret, StartOptions,
    TcpCommunicator, Variables, World, die_with_launcher,
};

const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    match run() {
        Ok(code) => ExitCode::from(code as u8),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<i32, CommError> {
    let variables = Variables::of_process();
    die_with_launcher(&variables)?;
    let refused = |e: xtrain_distributed::WorldError| CommError::Start(e.to_string());
    match Environment::detect(&variables).map_err(refused)? {
        Some(environment) => measure(&environment.world, &variables).map(|()| 0),
        None => {
            let ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok()).unwrap_or(2);
            RankLauncher::copies(ranks, vec![])?.run()
        }
    }
}

fn measure(world: &World, variables: &Variables) -> Result<(), CommError> {
    let secret = Secret::value(variables.get(SECRET_VARIABLE).unwrap_or_default())?;
    let control = Arc::new(Control::start(world, &secret, StartOptions::default())?);
    let communicator = TcpCommunicator::connect(&control, TIMEOUT)?;
    let n = world.rank.world_size;
    for mib in [1, 4, 16, 64] {
        let bytes = (mib << 20) / n * n;
        let (input, mut output) = (vec![1; bytes], vec![0; bytes]);
        let mut best = Duration::MAX;
        for _ in 0..10 {
            control.barrier()?;
            let since = Instant::now();
            communicator.all_to_all(communicator.world(), 0, &input, &mut output)?;
            control.barrier()?;
            best = best.min(since.elapsed());
        }
        if world.rank.index == 0 {
            let sent = (bytes / n * (n - 1)) as f64;
            let (ms, gb) = (best.as_secs_f64() * 1e3, sent / best.as_secs_f64() / 1e9);
            println!("all_to_all, {n} ranks, {mib} MiB a rank: {ms:.2} ms, {gb:.2} GB/s sent by each rank");
        }
    }
    control.finish()
}
