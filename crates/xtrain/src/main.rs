//! The `xtrain` command line: parses, calls, and reports. Exit code 0; 2 for errors that the user can fix; 1
//! for our own failures.

mod allocator;
mod cli;
mod commands;
mod failure;
mod plan_table;
mod refused;
mod signals;
mod terminal;

use failure::{Failure, without_panic};
use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    allocator::return_large_blocks();
    signals::survive_file_size_limits();
    let done = without_panic(|| {
        let Some(cli) = cli::Cli::read()? else { return Ok(()) };
        terminal::log(matches!(&cli.command, cli::Command::Train(args) if args.quiet));
        run(cli.command)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // stderr may be closed; the exit code still reports the failure.
            let _ = writeln!(std::io::stderr(), "error: {failure}");
            failure.exit_code()
        }
    }
}

fn run(command: cli::Command) -> Result<(), Failure> {
    match command {
        cli::Command::Init(args) => commands::init::run(&args),
        cli::Command::Completions(args) => commands::completions::run(&args),
        cli::Command::Train(args) => commands::train::run(&args),
        cli::Command::Plan(args) => commands::plan::run(&args),
        cli::Command::Tokenize(args) => commands::tokenize::run(&args),
        cli::Command::Generate(args) => commands::generate::run(&args),
        cli::Command::Eval(args) => commands::eval::run(&args),
        cli::Command::Export(args) => commands::export::run(&args),
        cli::Command::Report(args) => commands::report::run(&args),
        cli::Command::Compare(args) => commands::compare::run(&args),
        cli::Command::Inspect(args) => commands::inspect::run(&args),
        cli::Command::Blame(args) => commands::blame::run(&args),
        cli::Command::Doctor(args) => commands::doctor::run(&args),
        cli::Command::Bench(cli::BenchCommand::Step(args)) => commands::bench::step(&args),
        cli::Command::Bench(cli::BenchCommand::Op(args)) => commands::bench::op(&args),
        cli::Command::Bench(cli::BenchCommand::Gemm(args)) => commands::bench_ops::gemm(&args),
        cli::Command::Bench(cli::BenchCommand::Fp8(args)) => commands::bench_fp8::fp8(&args),
        cli::Command::Bench(cli::BenchCommand::Attention(args)) => commands::bench_ops::attention(&args),
    }
}
