//! The options of `xtrain train`.

use super::options::{Processes, RunFile};
use super::values::{bounded, whole};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain train examples/quickstart.toml
  xtrain train run.toml --resume --max-time 3h50m
  xtrain train run.toml --gpus 8
  xtrain train run.toml --profile --set train.steps=20")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Continue from the latest complete checkpoint of the run folder, or begin if there is none
    #[arg(long)]
    pub(crate) resume: bool,
    /// Save and stop after this wall-clock time (e.g. 45m, 3h50m); the same as --set train.max_time=...
    #[arg(long, value_name = "TIME")]
    pub(crate) max_time: Option<String>,
    /// The run folder; the same as --set train.out=...
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<String>,
    /// CPU threads, 0 uses all cores; the same as --set train.threads=...
    #[arg(long, value_parser = bounded(0..=1024))]
    pub(crate) threads: Option<usize>,
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Print warnings and errors only
    #[arg(long, short, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print the whole configuration, not only the keys that differ from their defaults, and the keys of a
    /// model's config.json that nothing reads
    #[arg(long, short)]
    pub(crate) verbose: bool,
    /// Write a trace of a few steps to trace.json in the run folder, for ui.perfetto.dev. It shows when the
    /// device ran each op, and what the host did
    #[arg(long)]
    pub(crate) profile: bool,
    /// Number of steps timed op by op, after six steps timed as a whole
    #[arg(long, value_name = "STEPS", default_value_t = 3, value_parser = whole::<u64>(1..=1000), requires = "profile")]
    pub(crate) profile_steps: u64,
    /// First traced step; by default the fourth of this process
    #[arg(long, value_name = "STEP", value_parser = whole::<u64>(1..=u64::MAX), requires = "profile")]
    pub(crate) profile_from: Option<u64>,
}
