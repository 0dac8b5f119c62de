//! The options of `xtrain plan`.

use super::options::RunFile;
use crate::quantity::Size;
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain plan examples/llama3_8b.toml
  xtrain plan run.toml --set train.device=cuda --memory 80GiB
  xtrain plan run.toml --set train.recompute=block --dump")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Say whether a step fits into this much memory, and what would: a number with a unit (500MB, 24GiB), or of
    /// bytes; by default what is available on the device of the run, where it is there
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Print the step program, one line an instance
    #[arg(long)]
    pub(crate) dump: bool,
}
