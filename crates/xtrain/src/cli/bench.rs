//! The options of `xtrain bench`.

use super::options::{Processes, RunFile, Threads};
use super::values::{bandwidth, bounded, device, named, tokens};
use clap::{Args, Subcommand};
use std::path::PathBuf;
use xtrain_config::{Device, Size, Transport, parse_count};
use xtrain_lab::bench::{LinearShape, Routing};
use xtrain_model::Recipe;
use xtrain_planner::estimate::RANKS_PER_NODE;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Time a run file's training step, on its token shards if it names any, else on random tokens
    Step(BenchStepArgs),
    /// Time every op of a run file's training step
    Op(BenchOpArgs),
    /// Time GEMMs: of a run file's linear layers, of one given size, or of common sizes
    Gemm(BenchGemmArgs),
    /// Time linear layers in FP8 and in bf16, casts included: of a run file, of given sizes, or of common
    /// sizes
    Fp8(BenchFp8Args),
    /// Time attention, forward and backward: of a run file, of given sizes, or of a common model
    Attention(BenchAttentionArgs),
    /// Time collectives between the ranks of a run by size, alone and beside a GEMM
    Comm(BenchCommArgs),
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench op run.toml
  xtrain bench op run.toml --set train.micro_batch_size=4 --json")]
pub(crate) struct BenchOpArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Steps to time op by op; the median time of each op is reported
    #[arg(long, default_value_t = 10, value_parser = bounded(1..=10_000))]
    pub(crate) repeats: usize,
    /// Print one line of JSON per row
    #[arg(long)]
    pub(crate) json: bool,
}

/// Sizes, device and repetitions of a benchmark of single ops.
#[derive(Debug, Args)]
pub(crate) struct OpBenchArgs {
    /// Run file (TOML) that gives sizes, precision and device
    pub(crate) file: Option<PathBuf>,
    /// Override a key of the run file, e.g. --set train.micro_batch_size=4. May be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "file")]
    pub(crate) set: Vec<String>,
    /// Device to compute on: auto (a GPU if there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", conflicts_with = "file",
        value_parser = device())]
    pub(crate) device: Device,
    /// Compute in this precision; by default bf16 on a GPU and fp32 on the CPU
    #[arg(long, conflicts_with = "file", value_parser = named(&Recipe::ALL, Recipe::name))]
    pub(crate) precision: Option<Recipe>,
    #[command(flatten)]
    pub(crate) cpu: Threads,
    /// Number of measurements; the median is reported
    #[arg(long, default_value_t = 5, value_parser = bounded(1..=10_000))]
    pub(crate) repeats: usize,
    /// Runs per measurement, back to back
    #[arg(long, default_value_t = 10, value_parser = bounded(1..=10_000))]
    pub(crate) runs: usize,
    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench gemm
  xtrain bench gemm run.toml --json
  xtrain bench gemm --m 8192 --n 4096 --k 4096 --precision bf16
  xtrain bench gemm --experts 128 --m 262144 --n 1536 --k 2048")]
pub(crate) struct BenchGemmArgs {
    #[command(flatten)]
    pub(crate) bench: OpBenchArgs,
    /// Tokens (rows of input and output)
    #[arg(long, conflicts_with = "file", requires_all = ["n", "k"], value_parser = tokens(1..=1 << 22))]
    pub(crate) m: Option<usize>,
    /// Columns of the output
    #[arg(long, conflicts_with = "file", requires_all = ["m", "k"], value_parser = bounded(1..=1 << 22))]
    pub(crate) n: Option<usize>,
    /// Columns of the input
    #[arg(long, conflicts_with = "file", requires_all = ["m", "n"], value_parser = bounded(1..=1 << 22))]
    pub(crate) k: Option<usize>,
    /// Also time layers of this many experts, each with a weight of its own, that share the tokens equally or
    /// by Zipf's law
    #[arg(long, conflicts_with = "file", requires_all = ["m", "n", "k"], value_parser = bounded(1..=1 << 12))]
    pub(crate) experts: Option<usize>,
    /// Experts of a token, at most --experts; none has more than all tokens. Of the --m rows, each token has
    /// so many. By default a quarter of the experts, at most 8
    #[arg(long, value_name = "K", conflicts_with = "file", requires = "experts", value_parser = bounded(1..=1 << 12))]
    pub(crate) per_token: Option<usize>,
    /// Rows of the experts' input and output tensors; those that no expert has are empty. Rounded up to a
    /// multiple of 128; never fewer than any routing needs, which is the default
    #[arg(long, value_name = "ROWS", conflicts_with = "file", requires = "experts", value_parser = tokens(1..=1 << 22))]
    pub(crate) capacity: Option<usize>,
    /// Let wgrad overwrite the gradient, as in the first micro-step, instead of adding to it
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench attention
  xtrain bench attention run.toml --document-tokens 512 --json
  xtrain bench attention --batch 2 --seq-len 8192 --heads 32 --kv-heads 8 --head-dim 128")]
pub(crate) struct BenchAttentionArgs {
    #[command(flatten)]
    pub(crate) bench: OpBenchArgs,
    /// Sequences; sizes that are not given are those of a common model
    #[arg(long, conflicts_with = "file", value_parser = bounded(1..=1 << 20))]
    pub(crate) batch: Option<usize>,
    /// Tokens per sequence
    #[arg(long, conflicts_with = "file", value_parser = tokens(1..=1 << 22))]
    pub(crate) seq_len: Option<usize>,
    /// Query heads
    #[arg(long, conflicts_with = "file", value_parser = bounded(1..=1 << 12))]
    pub(crate) heads: Option<usize>,
    /// Key and value heads; by default as many as --heads, if that is given
    #[arg(long, conflicts_with = "file", value_parser = bounded(1..=1 << 12))]
    pub(crate) kv_heads: Option<usize>,
    /// Width of a head
    #[arg(long, conflicts_with = "file", value_parser = bounded(1..=1 << 12))]
    pub(crate) head_dim: Option<usize>,
    /// Mean tokens per document, for attention that stays within documents
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = tokens(1..=1 << 22))]
    pub(crate) document_tokens: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench step run.toml
  xtrain bench step run.toml --set train.recompute=norms --repeats 5 --json
  xtrain bench step run.toml --routing zipf
  xtrain bench step run.toml --gpus 2 --set parallel.shard=weights
  xtrain bench step run.toml --rank-of 8 --set parallel.shard=weights")]
pub(crate) struct BenchStepArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Steps to run before measuring
    #[arg(long, default_value_t = 5, value_parser = bounded(0..=1_000_000))]
    pub(crate) warmup: usize,
    /// Number of measurements; the median is reported
    #[arg(long, default_value_t = 5, value_parser = bounded(1..=10_000))]
    pub(crate) repeats: usize,
    /// Steps per measurement
    #[arg(long, default_value_t = 10, value_parser = bounded(1..=1_000_000))]
    pub(crate) steps: usize,
    /// Send tokens to experts by a fixed routing in place of the routers' choices: as many to each, or by
    /// Zipf's law (shares of 1, 1/2, 1/3, .., at most all tokens). Routers run, but nothing reads their
    /// choices
    #[arg(long, value_parser = named(&Routing::ALL, Routing::name))]
    pub(crate) routing: Option<Routing>,
    /// Measure rank 0 of this many on one device, with its part of the state. Copies within the device
    /// replace collectives
    #[arg(long, value_name = "N", conflicts_with_all = ["gpus", "ranks"], value_parser = bounded(2..=1024))]
    pub(crate) rank_of: Option<usize>,
    /// Let each collective take at least the time that `xtrain plan` assumes
    #[arg(long, requires = "rank_of")]
    pub(crate) stretch: bool,
    /// Bandwidth of the NIC of each GPU, as in `xtrain plan`
    #[arg(long, value_name = "BANDWIDTH", requires = "rank_of", value_parser = bandwidth)]
    pub(crate) link: Option<f64>,
    /// Ranks of a node
    #[arg(long, value_name = "N", requires = "rank_of", default_value_t = RANKS_PER_NODE, value_parser = bounded(1..=1024))]
    pub(crate) gpus_per_node: usize,
    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench comm --ranks 2
  xtrain bench comm --gpus 8 --size 64MiB --size 1GiB
  srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 xtrain bench comm --json")]
pub(crate) struct BenchCommArgs {
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Bytes of the tensor of all ranks; by default 1, 16 and 64 MiB. May be repeated
    #[arg(long, value_name = "SIZE")]
    pub(crate) size: Vec<Size>,
    /// Rows and columns of the matrices of the GEMM beside; by default 512 on the CPU and 8192 on a GPU
    #[arg(long, value_name = "N", value_parser = bounded(16..=1 << 16))]
    pub(crate) gemm: Option<usize>,
    /// Device of a rank: auto (a GPU if there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", conflicts_with_all = ["gpus", "ranks"],
        value_parser = device())]
    pub(crate) device: Device,
    /// Path between GPUs, as parallel.transport: auto, copy, nccl or host
    #[arg(long, value_name = "PATH", default_value = "auto", value_parser = named(&Transport::ALL, Transport::name))]
    pub(crate) transport: Transport,
    #[command(flatten)]
    pub(crate) cpu: Threads,
    /// Number of measurements; the median is reported
    #[arg(long, default_value_t = 5, value_parser = bounded(1..=10_000))]
    pub(crate) repeats: usize,
    /// Runs per measurement, back to back
    #[arg(long, default_value_t = 3, value_parser = bounded(1..=10_000))]
    pub(crate) runs: usize,
    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain bench fp8
  xtrain bench fp8 run.toml --json
  xtrain bench fp8 --shape 8192,4096,4096 --shape 8192,4096,14336 --recipe fp8-delayed --recipe fp8-block")]
pub(crate) struct BenchFp8Args {
    /// Run file (TOML) whose linear layers are timed inside the model's blocks. On a GPU the result is
    /// cached; runs then leave in bf16 the layers that FP8 would make slower
    pub(crate) file: Option<PathBuf>,
    /// Override a key of the run file, e.g. --set train.micro_batch_size=4. May be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE", requires = "file")]
    pub(crate) set: Vec<String>,
    /// Size of a linear layer to time by itself: tokens, input columns, output columns, all multiples of 16.
    /// May be repeated
    #[arg(long, value_name = "M,K,N", conflicts_with = "file", value_parser = shape)]
    pub(crate) shape: Vec<LinearShape>,
    /// FP8 recipe to time; by default the run file's, else all recipes that the device supports. May be
    /// repeated
    #[arg(long, value_parser = named(&Recipe::FP8, Recipe::name))]
    pub(crate) recipe: Vec<Recipe>,
    /// Device to compute on: auto (a GPU if there is one), cpu (which emulates FP8) or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", conflicts_with = "file",
        value_parser = device())]
    pub(crate) device: Device,
    #[command(flatten)]
    pub(crate) cpu: Threads,
    /// Number of measurements; the median is reported
    #[arg(long, default_value_t = 5, conflicts_with = "file", value_parser = bounded(1..=10_000))]
    pub(crate) repeats: usize,
    /// Runs per measurement, back to back
    #[arg(long, default_value_t = 10, conflicts_with = "file", value_parser = bounded(1..=10_000))]
    pub(crate) runs: usize,
    /// Print one line of JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// A linear layer as `M,K,N`.
fn shape(text: &str) -> Result<LinearShape, String> {
    let size = |size: &str| usize::try_from(parse_count(size.trim())?).ok();
    let sizes: Option<Vec<usize>> = text.split(',').map(size).collect();
    let is_size = |size: &usize| (16..=1 << 22).contains(size) && size.is_multiple_of(16);
    match sizes.as_deref() {
        Some(&[m, k, n]) if [m, k, n].iter().all(is_size) => Ok(LinearShape { m, k, n }),
        _ => Err("write three multiples of 16, up to 4194304: tokens, input columns, output columns".into()),
    }
}
