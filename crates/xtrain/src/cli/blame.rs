//! The options of `xtrain blame`.

use super::options::ProbeArgs;
use super::values::{bounded, whole};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain blame runs/fp8
  xtrain blame runs/bf16 --step 2000 --casts fp8-current --batches 4 --by-block 1
To return GEMMs to bf16, add the printed pattern to skip in [precision].")]
pub(crate) struct BlameArgs {
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
    /// Use the batches of the next N steps
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole::<u64>(1..=1_000_000))]
    pub(crate) batches: u64,
    /// Also split the N worst groups by block, and return one block after another to bf16
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = bounded(0..=1_000_000))]
    pub(crate) by_block: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
