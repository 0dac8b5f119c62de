//! The command line: verbs and their options, one file a verb, each with a counterpart of the same name in
//! `commands`.

mod bench;
mod blame;
mod chat;
mod compare;
mod completions;
mod doctor;
mod eval;
mod export;
mod generate;
mod init;
mod inspect;
mod merge;
mod mistakes;
mod options;
mod plan;
mod report;
mod tokenize;
mod train;
mod values;

pub(crate) use bench::{
    BenchAttentionArgs, BenchCommArgs, BenchCommand, BenchFp8Args, BenchGemmArgs, BenchOpArgs, BenchStepArgs,
    OpBenchArgs,
};
pub(crate) use blame::BlameArgs;
pub(crate) use chat::ChatArgs;
pub(crate) use compare::CompareArgs;
pub(crate) use completions::CompletionsArgs;
pub(crate) use doctor::DoctorArgs;
pub(crate) use eval::EvalArgs;
pub(crate) use export::ExportArgs;
pub(crate) use generate::{GenerateArgs, PromptArgs};
pub(crate) use init::InitArgs;
pub(crate) use inspect::InspectArgs;
pub(crate) use merge::MergeArgs;
pub(crate) use options::{CheckpointArgs, ModelArgs, Processes};
pub(crate) use plan::PlanArgs;
pub(crate) use report::ReportArgs;
pub(crate) use tokenize::{RowArgs, TokenizeArgs};
pub(crate) use train::TrainArgs;

use crate::failure::Failure;
use crate::terminal;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;

/// The version, and the name of the sources of this build.
pub(crate) const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (sources ", env!("XTRAIN_SOURCES"), ")");

/// Train language models: pre-train, continue and fine-tune from one run file.
#[derive(Debug, Parser)]
#[command(name = "xtrain", version = VERSION, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Examples:
  xtrain train examples/quickstart.toml
  xtrain init books.txt
  xtrain train run.toml --set optimizer.lr=1e-3 --set train.steps=2000
  xtrain plan run.toml
  xtrain generate runs/quickstart --prompt 'pub fn ' --max-tokens 100
  xtrain chat models/Qwen3-0.6B")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// The command line of this process; `None` if it asks for help, which is then printed.
    pub(crate) fn read() -> Result<Option<Self>, Failure> {
        let args: Vec<OsString> = std::env::args_os().collect();
        let mut command = Cli::whole();
        let read = command.try_get_matches_from_mut(&args);
        match read.and_then(|matches| Cli::from_arg_matches(&matches)) {
            Ok(cli) => Ok(Some(cli)),
            Err(error) if !error.use_stderr() => terminal::print_help(&error).map(|()| None),
            Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => error.exit(),
            Err(error) => {
                Err(Failure::user(mistakes::line(&error, &command, args.get(1..).unwrap_or_default())))
            }
        }
    }

    /// All commands and options.
    pub(crate) fn whole() -> clap::Command {
        // A negative number is a value that an option may refuse with its range, never an unknown option.
        let allow = |arg: Arg| match arg.get_action() {
            ArgAction::Set | ArgAction::Append => arg.allow_negative_numbers(true),
            _ => arg,
        };
        Cli::command().mut_subcommands(|verb| verb.mut_args(allow))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Write a commented run file for a text, for token shards or for a model
    Init(InitArgs),
    /// Train the model that a run file describes
    Train(TrainArgs),
    /// Show whether a run fits, how long it takes and how it uses memory, without running it
    Plan(PlanArgs),
    /// Tokenize text into token shards, or verify the checksums of shards
    Tokenize(TokenizeArgs),
    /// Continue a text with a model, or answer the conversations of a file; prints only what is generated
    Generate(GenerateArgs),
    /// Chat with a model in the terminal
    Chat(ChatArgs),
    /// Measure the loss of a model on text, or score it on tasks
    Eval(EvalArgs),
    /// Write a model as a Hugging Face folder
    Export(ExportArgs),
    /// Merge adapters into their model, and write that as a Hugging Face folder
    Merge(MergeArgs),
    /// Write the report of a run, or one page that compares several
    Report(ReportArgs),
    /// Compare the losses and scores of runs with a baseline: the gap, and the spread between seeds
    Compare(CompareArgs),
    /// Show the error of each FP8 cast in a step: underflow, saturation, signal to noise
    Inspect(InspectArgs),
    /// Find the GEMMs that cause a checkpoint's FP8 error, by returning one after another to bf16
    Blame(BlameArgs),
    /// Test this machine's devices and libraries, and say how to get what is missing
    Doctor(DoctorArgs),
    /// Measure the speed of training steps, ops, GEMMs, attention and collectives
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Print the script that completes commands and options in a shell
    Completions(CompletionsArgs),
}

impl Command {
    /// The option for the number of processes, of a command that several can share.
    pub(crate) fn processes(&self) -> Option<&Processes> {
        match self {
            Command::Train(args) => Some(&args.processes),
            Command::Bench(BenchCommand::Comm(args)) => Some(&args.processes),
            Command::Bench(BenchCommand::Step(args)) => Some(&args.processes),
            Command::Eval(args) if !args.task.is_empty() => Some(&args.processes),
            _ => None,
        }
    }
}
