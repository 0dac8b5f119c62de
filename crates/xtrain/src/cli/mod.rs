//! The command line: verbs and their options, one file a verb, each with a counterpart of the same name in
//! `commands`.

mod bench;
mod blame;
mod compare;
mod doctor;
mod eval;
mod export;
mod generate;
mod inspect;
mod options;
mod plan;
mod report;
mod tokenize;
mod train;
mod unknown_option;
mod values;

pub(crate) use bench::{
    BenchAttentionArgs, BenchCommand, BenchFp8Args, BenchGemmArgs, BenchOpArgs, BenchStepArgs, OpBenchArgs,
};
pub(crate) use blame::BlameArgs;
pub(crate) use compare::CompareArgs;
pub(crate) use doctor::DoctorArgs;
pub(crate) use eval::EvalArgs;
pub(crate) use export::ExportArgs;
pub(crate) use generate::{GenerateArgs, PromptArgs};
pub(crate) use inspect::InspectArgs;
pub(crate) use options::ModelArgs;
pub(crate) use plan::PlanArgs;
pub(crate) use report::ReportArgs;
pub(crate) use tokenize::TokenizeArgs;
pub(crate) use train::TrainArgs;

use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::io::Write;

/// Train language models: pre-train, continue and fine-tune from one run file.
#[derive(Debug, Parser)]
#[command(name = "xtrain", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Examples:
  xtrain train examples/quickstart.toml
  xtrain train run.toml --set optimizer.lr=1e-3 --set train.steps=2000
  xtrain plan run.toml
  xtrain generate runs/quickstart --prompt 'pub fn ' --max-tokens 100")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Parses the command line of this process; exits after printing help or an error.
    pub(crate) fn read() -> Self {
        // A negative number is the value of an option, which may refuse it with its range, and never an
        // unknown option.
        let allow = |arg: Arg| match arg.get_action() {
            ArgAction::Set | ArgAction::Append => arg.allow_negative_numbers(true),
            _ => arg,
        };
        let command = Cli::command().mut_subcommands(|verb| verb.mut_args(allow));
        let read = command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
        read.unwrap_or_else(|error| {
            let verb = std::env::args_os().nth(1);
            let takes_a_run_file =
                verb.is_some_and(|verb| ["train", "plan", "bench"].iter().any(|takes| verb == *takes));
            match unknown_option::key_instead(&error).filter(|_| takes_a_run_file) {
                // stderr may be closed; the exit code still reports the failure.
                Some(message) => {
                    let _ = writeln!(std::io::stderr(), "error: {message}");
                    std::process::exit(2)
                }
                None => error.exit(),
            }
        })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model from a run file
    Train(TrainArgs),
    /// Show parameters, FLOPs and memory of a run without running it
    Plan(PlanArgs),
    /// Turn text into token shards
    Tokenize(TokenizeArgs),
    /// Continue a text with a model
    Generate(GenerateArgs),
    /// Measure the loss of a model on text
    Eval(EvalArgs),
    /// Write a model as a Hugging Face folder
    Export(ExportArgs),
    /// Write the report of a run, or one page for several
    Report(ReportArgs),
    /// Compare the losses of runs with those of a baseline: the gap, and the spread of seeds
    Compare(CompareArgs),
    /// Show the error of FP8 casts in a step: underflow, saturation, signal to noise
    Inspect(InspectArgs),
    /// Find the GEMMs that lose the most in FP8: return one after another to bf16, on a checkpoint
    Blame(BlameArgs),
    /// Show the devices and libraries of this machine, test them, and say what is missing
    Doctor(DoctorArgs),
    /// Measure speed and memory
    #[command(subcommand)]
    Bench(BenchCommand),
}
