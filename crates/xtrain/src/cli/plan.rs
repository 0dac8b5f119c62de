//! The options of `xtrain plan`.

use super::options::RunFile;
use crate::quantity::Size;
use clap::Args;
use clap::builder::PossibleValuesParser;
use xtrain_train::passes::PIPELINE;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain plan examples/llama3_8b.toml
  xtrain plan run.toml --set train.device=cuda --memory 80GiB
  xtrain plan run.toml --set train.recompute=block --dump")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Check that a step fits into this much memory, and list settings with which it would: a number with a
    /// unit (500MB, 24GiB), or of bytes; by default the memory available on the device of the run, if it is
    /// present
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Print the step program, one line for each op
    #[arg(long)]
    pub(crate) dump: bool,
    /// Print the step program after this pass, one line for each op; ARCHITECTURE.md describes the passes
    #[arg(long, value_name = "PASS", conflicts_with = "dump", value_parser = pass_names())]
    pub(crate) dump_after: Option<String>,
}

/// The names that `--dump-after` accepts.
fn pass_names() -> PossibleValuesParser {
    PIPELINE.iter().map(|pass| pass.name).collect::<Vec<_>>().into()
}
