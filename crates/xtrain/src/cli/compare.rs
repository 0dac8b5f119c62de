//! The options of `xtrain compare`.

use super::options::PageArgs;
use super::values::{bounded, points, whole};
use clap::Args;
use std::path::PathBuf;
use xtrain_report::scores::MARGIN_POINTS;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain compare runs/bf16 runs/fp8-block
  xtrain compare runs/fp8-* --baseline runs/bf16-*
  xtrain compare runs/bf16 runs/fp8-block --last-checkpoints 3 --margin 0.5
Runs that differ only in their seed become one row, so list all of them. Tasks that both sides
have scores of (xtrain eval RUN --task FILE) are compared too.")]
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
    /// Average the score of each row of a task over the last K scored checkpoints of a run
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = bounded(1..=1_000_000))]
    pub(crate) last_checkpoints: usize,
    /// The largest difference of a task's score that does not matter, in points (hundredths)
    #[arg(long, value_name = "POINTS", default_value_t = MARGIN_POINTS, value_parser = points)]
    pub(crate) margin: f64,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
