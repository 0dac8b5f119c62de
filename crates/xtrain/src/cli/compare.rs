//! The options of `xtrain compare`.

use super::options::PageArgs;
use super::values::whole;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain compare runs/bf16 runs/fp8-block
  xtrain compare runs/fp8-* --baseline runs/bf16-*
Runs that differ only in their seed become one row, so list all of them.")]
#[command(mut_arg("out", |out| out.help("The page to write; by default compare.html in the folder of the first compared run")))]
pub(crate) struct CompareArgs {
    /// Run folders. Without --baseline, the first is the baseline, together with those that differ from it
    /// only in their seed
    #[arg(required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The runs to compare with: one, or several that differ only in their seed, whose spread is then
    /// reported
    #[arg(long, value_name = "RUN", num_args = 1..)]
    pub(crate) baseline: Vec<PathBuf>,
    /// Average training losses over the last N steps that both sides have run
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = whole::<u64>(1..=1_000_000_000))]
    pub(crate) last: u64,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
