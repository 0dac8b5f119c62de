//! The `xtrain` command line: parses, calls, and reports. Exit code 0; 2 for errors that the user can fix; 1
//! for our own failures; 130 after a signal if there is no result.

mod allocator;
mod cli;
mod commands;
mod failure;
mod plan_table;
mod ranks;
mod refused;
mod signals;
mod terminal;

use failure::{Failure, without_panic};
use ranks::Place;
use std::process::ExitCode;
use std::sync::OnceLock;
use terminal::Detail;
use xtrain_distributed::{Variables, die_with_launcher, raise_open_files, supervise};

fn main() -> ExitCode {
    if let Some(code) = supervise(std::env::args_os().skip(1)) {
        return ranks::exit_code(code);
    }
    let variables = Variables::of_process();
    let launched = die_with_launcher(&variables);
    raise_open_files(&variables);
    allocator::return_large_blocks();
    refused::reserve_stack();
    signals::survive_file_size_limits();
    let place: OnceLock<Place> = OnceLock::new();
    let done = without_panic(|| {
        if let Some(error) = launched.err() {
            return Err(Failure::user(error.to_string()));
        }
        let Some(cli) = cli::Cli::read()? else { return Ok(ExitCode::SUCCESS) };
        let found = Place::detect(&cli.command, variables)?;
        let place = place.get_or_init(|| found);
        let detail = match &cli.command {
            _ if !place.is_first() => Detail::Quiet,
            cli::Command::Train(args) => commands::train::detail(args),
            _ => Detail::Given,
        };
        terminal::log(detail, place.prefix());
        run(cli.command, place)
    });
    match (done, place.get()) {
        (Ok(code), _) => code,
        (Err(failure), Some(place)) => {
            place.report(&failure);
            failure.exit_code().into()
        }
        (Err(failure), None) => {
            ranks::report(&failure, "");
            failure.exit_code().into()
        }
    }
}

fn run(command: cli::Command, place: &Place) -> Result<ExitCode, Failure> {
    match &command {
        cli::Command::Train(args) => return commands::train::run(args, place),
        cli::Command::Bench(cli::BenchCommand::Comm(args)) => return commands::bench_comm::run(args, place),
        cli::Command::Bench(cli::BenchCommand::Step(args)) => return commands::bench::step(args, place),
        cli::Command::Eval(args) => return commands::eval::run(args, place),
        cli::Command::Tokenize(args) => return commands::tokenize::run(args),
        cli::Command::Inspect(args) => return commands::inspect::run(args),
        cli::Command::Blame(args) => return commands::blame::run(args),
        _ => {}
    }
    match command {
        cli::Command::Init(args) => commands::init::run(&args),
        cli::Command::Completions(args) => commands::completions::run(&args),
        cli::Command::Train(_)
        | cli::Command::Eval(_)
        | cli::Command::Tokenize(_)
        | cli::Command::Inspect(_)
        | cli::Command::Blame(_)
        | cli::Command::Bench(cli::BenchCommand::Comm(_) | cli::BenchCommand::Step(_)) => {
            unreachable!("it has run")
        }
        cli::Command::Plan(args) => commands::plan::run(&args),
        cli::Command::Generate(args) => commands::generate::run(&args),
        cli::Command::Chat(args) => commands::chat::run(&args),
        cli::Command::Export(args) => commands::export::run(&args),
        cli::Command::Merge(args) => commands::merge::run(&args),
        cli::Command::Report(args) => commands::report::run(&args),
        cli::Command::Compare(args) => commands::compare::run(&args),
        cli::Command::Doctor(args) => commands::doctor::run(&args),
        cli::Command::Bench(cli::BenchCommand::Op(args)) => commands::bench::op(&args),
        cli::Command::Bench(cli::BenchCommand::Gemm(args)) => commands::bench_ops::gemm(&args),
        cli::Command::Bench(cli::BenchCommand::Fp8(args)) => commands::bench_fp8::fp8(&args),
        cli::Command::Bench(cli::BenchCommand::Attention(args)) => commands::bench_ops::attention(&args),
    }
    .map(|()| ExitCode::SUCCESS)
}
