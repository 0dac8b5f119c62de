//! The options of `xtrain inspect`.

use super::options::{PageArgs, ProbeArgs};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain inspect runs/fp8
  xtrain inspect runs/bf16 --step 2000 --casts fp8-current --all
To return a GEMM to bf16, add its printed name to skip in [precision].")]
#[command(mut_arg("out", |out| out.help("The page to write; by default inspect.html in the run's folder")))]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
    /// Print every cast instead of one line for each layer over all blocks
    #[arg(long)]
    pub(crate) all: bool,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
