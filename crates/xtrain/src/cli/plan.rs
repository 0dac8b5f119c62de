//! The options of `xtrain plan`.

use super::options::{Processes, RunFile};
use super::values::{bandwidth, bounded, named};
use clap::Args;
use clap::builder::PossibleValuesParser;
use std::path::PathBuf;
use xtrain_config::Size;
use xtrain_lab::bench::Routing;
use xtrain_planner::estimate::RANKS_PER_NODE;
use xtrain_step::passes::PIPELINE;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain plan examples/llama3_8b.toml
  xtrain plan run.toml --device-model h200
  xtrain plan models/Llama-3-8B --device-model h100
  xtrain plan run.toml --set train.device=cuda --memory 80GiB
  xtrain plan run.toml --gpus 8 --device-model h100 --set parallel.shard=optimizer
  xtrain plan run.toml --gpus 8 --device-model h100 --set parallel.expert=4 --routing zipf
  xtrain plan examples/llama3_70b.toml --gpus 64 --link 25GB/s --device-model h100 --svg lanes.svg
  xtrain plan run.toml --set train.recompute=block --dump")]
#[command(mut_arg("file", |file| file.help("A run file (TOML; docs/configuration.md lists its keys), a Hugging Face folder or a config.json")))]
#[command(mut_arg("gpus", |gpus| gpus.help("Plan a rank of a run on this many GPUs, which need not be present (docs/parallel.md)")))]
#[command(mut_arg("ranks", |ranks| ranks.help("Plan a rank of a run in this many processes on the CPU")))]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Memory that a step must fit into, in bytes or with a unit (500MB, 24GiB, 1.5GiB). By default, the
    /// memory of the run's device, if the machine has it
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Plan for this GPU model, which need not be present: h200, h100, a100, l40s, 4090 or 5090
    #[arg(long, value_name = "NAME")]
    pub(crate) device_model: Option<String>,
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Bandwidth of the NIC (network card) of each GPU, which limits all-to-alls between nodes; by default
    /// that of usual servers: 48GB/s, 400 Gbit/s, for an H100 or H200
    #[arg(long, value_name = "BANDWIDTH", requires = "gpus", conflicts_with = "ranks", value_parser = bandwidth)]
    pub(crate) link: Option<f64>,
    /// Bandwidth of all-gathers and reduce-scatters between nodes, as nccl-tests measures it (bus bandwidth
    /// of all_gather_perf); by default that of all NICs of a node together, at most that within a node. Given
    /// without --link, a ring slower than a node's own connections also lowers the bandwidth of a NIC, to the
    /// ring's divided by the GPUs of a node
    #[arg(long, value_name = "BANDWIDTH", requires = "gpus", conflicts_with = "ranks", value_parser = bandwidth)]
    pub(crate) ring: Option<f64>,
    /// GPUs of a node
    #[arg(long, value_name = "N", requires = "gpus", conflicts_with = "ranks", default_value_t = RANKS_PER_NODE,
        value_parser = bounded(1..=1024))]
    pub(crate) gpus_per_node: usize,
    /// Also show what imbalance of ranks that share experts costs, by a fixed routing of tokens to experts:
    /// as many to each, or by Zipf's law (shares of 1, 1/2, 1/3, .., at most all tokens)
    #[arg(long, conflicts_with_all = ["dump", "dump_after"], value_parser = named(&Routing::ALL, Routing::name))]
    pub(crate) routing: Option<Routing>,
    /// Also draw when kernels and collectives of a step run, and the schedule of stages, to this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["dump", "dump_after"])]
    pub(crate) svg: Option<PathBuf>,
    /// Also print workspaces that do not add to the peak of memory
    #[arg(long)]
    pub(crate) all: bool,
    /// Print one line of JSON
    #[arg(long, conflicts_with_all = ["dump", "dump_after"])]
    pub(crate) json: bool,
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
