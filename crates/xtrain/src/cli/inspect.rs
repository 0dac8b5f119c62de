//! The options of `xtrain inspect`.

use super::options::{PageArgs, ProbeArgs};
use super::values::whole;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain inspect runs/fp8
  xtrain inspect runs/bf16 --step 2000 --casts fp8-current --all
  xtrain inspect runs/bf16 --write-scales scales.toml --batches 16
To return a GEMM to bf16, add its printed name to skip in [precision].")]
#[command(mut_arg("out", |out| out.help("The page to write; by default inspect.html in the run's folder")))]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
    /// Print every cast instead of one line for each layer over all blocks
    #[arg(long)]
    pub(crate) all: bool,
    /// Also write static scales to this file, for precision.static_scales: those of an fp8-delayed run, or,
    /// for other runs and with --batches, from the amaxes of the next steps
    #[arg(long, value_name = "FILE")]
    pub(crate) write_scales: Option<PathBuf>,
    /// Measure the amaxes for --write-scales in the batches of the next N steps [default: 4]
    #[arg(long, value_name = "N", requires = "write_scales", value_parser = whole::<u64>(1..=1_000_000))]
    pub(crate) batches: Option<u64>,
    /// Headroom of --write-scales: halve scales N times [default: 1 for measured amaxes, else 0]
    #[arg(long, value_name = "N", requires = "write_scales", value_parser = whole::<u32>(0..=16))]
    pub(crate) margin: Option<u32>,
    #[command(flatten)]
    pub(crate) page: PageArgs,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
