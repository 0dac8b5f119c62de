//! `[parallel]`: how the processes of a run share its work.
//!
//! The number of processes is not a key: the command line (`--gpus`, `--ranks`) or a launcher gives it, and a
//! run may be resumed with another number.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_program as program;
use xtrain_tensor::DType;

use crate::TimeLimit;

section! {
    /// The keys of `[parallel]`. The section is described at
    /// [`Config::parallel`](crate::Config).
    pub struct ParallelConfig {
        /// State that is divided among the ranks instead of replicated on each. With `reduce = "any-world"`
        /// it changes no bit of the result; else `"gradients"` and `"weights"` add gradients in another
        /// order.
        #[schemars(extend("x-aliases" = [
            "strategy", "mode", "sharding", "sharding_strategy", "zero_stage", "stage", "fsdp",
            "zero", "zero_level", "data_parallel_sharding_strategy"
        ]))]
        pub shard: Shard = Shard::None,
        /// Groups of equally many ranks, each of which holds all state, divided among its ranks as `shard`
        /// says (HSDP). The ranks of a group have consecutive numbers, so a group for each node keeps gathers
        /// within nodes. Must divide the number of ranks; with one process it has no effect.
        #[schemars(range(min = 1), extend("x-unit" = "groups"))]
        #[schemars(extend("x-aliases" = [
            "replicate", "num_replicas", "dp_replicate", "data_parallel_replicate_degree",
            "num_distributed_optimizer_instances", "replicate_degree", "dp_replicate_size",
            "dp_replicate_degree"
        ]))]
        pub replicas: usize = 1,
        /// Order in which the gradients of micro-batches are added.
        #[schemars(extend("x-aliases" = ["reduction", "gradient_reduction", "deterministic_reduce"]))]
        pub reduce: ReduceOrder = ReduceOrder::SameWorld,
        /// Type in which ranks send gradients to each other. They are always added in fp32. `"bf16"` sends
        /// half the bytes and rounds each rank's sum. It cannot be combined with `reduce = "any-world"` and
        /// `"fast"`.
        #[schemars(extend("x-aliases" = [
            "grad_reduce_dtype", "mixed_precision_reduce", "communication_dtype", "communication_data_type"
        ]))]
        pub reduce_dtype: ReduceDtype = ReduceDtype::Fp32,
        /// With `shard = "gradients"` and `"weights"`: blocks whose weights are gathered, and whose gradients
        /// are reduced, while another block computes. Each takes the memory of a block's weights and
        /// gradients. Changes no bit.
        #[schemars(range(max = 16), extend("x-unit" = "blocks"))]
        #[schemars(extend("x-aliases" = ["prefetch", "forward_prefetch", "backward_prefetch", "prefetch_count"]))]
        pub prefetch_blocks: usize = 1,
        /// Form in which ranks gather the weights that GEMMs read in FP8, if the optimizer's state is
        /// divided. Other weights are gathered in the type in which they are read.
        #[schemars(extend("x-aliases" = [
            "enable_fsdp_float8_all_gather", "fp8_param_gather", "fp8_param", "gather_dtype", "all_gather",
            "param_dtype", "fsdp_float8_all_gather"
        ]))]
        pub gather: Gather = Gather::Auto,
        /// Path of the data that GPUs exchange. Changes no bit.
        #[schemars(extend("x-aliases" = [
            "backend", "comm_backend", "dist_backend", "distributed_backend", "init_backend", "ddp_backend",
            "comm_backend_name", "communication_backend"
        ]))]
        pub transport: Transport = Transport::Auto,
        /// Time in which all ranks must have started.
        #[schemars(extend("x-aliases" = ["init_timeout", "init_timeout_seconds", "rdzv_timeout"]))]
        pub start_timeout: TimeLimit = TimeLimit::minutes(5),
        /// Time without progress after which a step counts as hung and ends the run. The limit of the first
        /// step of a process, which compiles kernels, is at least ten minutes.
        #[schemars(extend("x-aliases" = ["train_timeout_seconds", "nccl_timeout", "ddp_timeout", "distributed_timeout_minutes", "comm_timeout"]))]
        pub timeout: TimeLimit = TimeLimit::minutes(1),
        /// Error of a time-out that names the collective in which each rank waits, also after the
        /// first step. It adds two small copies to a step's graph for each launch of collectives. Changes no
        /// bit.
        #[schemars(extend("x-aliases" = ["flight_recorder", "trace_buf_size", "desync_debug"]))]
        pub name_collectives: bool = false,
    }
}

impl ParallelConfig {
    /// The settings in a program's terms: `rank` of `world_size` ranks, each with `micro_steps` micro-batches
    /// per step.
    pub fn parallel(&self, rank: usize, world_size: usize, micro_steps: usize) -> program::Parallel {
        program::Parallel {
            world_size,
            rank,
            // One process has no other to hold a replica.
            replicas: if world_size == 1 { 1 } else { self.replicas },
            shard: match self.shard {
                Shard::None => program::Shard::None,
                Shard::Optimizer => program::Shard::Optimizer,
                Shard::Gradients => program::Shard::Gradients,
                Shard::Weights => program::Shard::Weights,
            },
            reduce: match self.reduce {
                ReduceOrder::SameWorld => program::Reduce::SameWorld,
                ReduceOrder::AnyWorld => program::Reduce::AnyWorld { micro_steps },
                ReduceOrder::Fast => program::Reduce::Fast,
            },
            reduce_dtype: match self.reduce_dtype {
                ReduceDtype::Fp32 => DType::F32,
                ReduceDtype::Bf16 => DType::BF16,
            },
            prefetch_blocks: self.prefetch_blocks,
            gather: match self.gather {
                Gather::Auto => program::Gather::Auto,
                Gather::Fp32 => program::Gather::F32,
                Gather::Bf16 => program::Gather::Bf16,
            },
        }
    }
}

/// State that is divided among the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// None; every rank holds all state. Known as DDP.
    #[schemars(extend("x-aliases" = ["ddp", "dp", "data_parallel", "replicate", "no_shard", "zero0", "0", "off", "false"]))]
    None,
    /// Master weights and the optimizer's state. Known as ZeRO-1.
    #[schemars(extend("x-aliases" = [
        "zero", "zero1", "1", "stage1", "distributed_optimizer", "optim", "optimizer_state"
    ]))]
    Optimizer,
    /// Gradients too. Known as ZeRO-2.
    #[schemars(extend("x-aliases" = ["zero2", "2", "stage2", "shard_grad_op", "optim_grads", "grad", "gradient"]))]
    Gradients,
    /// Weights too: each block's are gathered before it reads them. Known as ZeRO-3 and FSDP.
    #[schemars(extend("x-aliases" = [
        "zero3", "3", "stage3", "fsdp", "fsdp1", "fsdp2", "full_shard", "full", "weight", "parameters",
        "optim_grads_params", "true"
    ]))]
    Weights,
}

/// Order in which the gradients of a step are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReduceOrder {
    /// By rank: each adds the gradients of its micro-batches, and then the sums of the ranks are added; with
    /// `shard = "gradients"` and `"weights"` the other way round. Runs with the same number of ranks, and of
    /// replicas, have equal bits.
    #[schemars(extend("x-aliases" = ["default", "rank", "ranks", "sum"]))]
    SameWorld,
    /// One binary tree adds the gradients of all micro-batches. Runs with 1, 2, 4, 8, ... ranks and the same
    /// `train.micro_batch_size` have equal bits, and take more memory and time (docs/parallel.md).
    #[schemars(extend("x-aliases" = ["deterministic", "reproducible", "exact", "tree", "any"]))]
    AnyWorld,
    /// As `"same-world"`, but NCCL adds while it sends, in an order of its own: less memory, and no kernels
    /// for sums. Bits repeat only if NCCL chooses the same algorithm again. Without NCCL the bits are those
    /// of `"same-world"`.
    #[schemars(extend("x-aliases" = ["nccl", "reduce-scatter", "reduce_scatter", "nondeterministic"]))]
    Fast,
}

/// Path of the data that GPUs exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Copies between GPUs if NVLink connects those of all ranks on one host; else NCCL if every rank has it;
    /// else host memory, with a warning that says why.
    #[schemars(extend("x-aliases" = ["default", "cpu:gloo,cuda:nccl"]))]
    Auto,
    /// Each GPU's copy engines copy to the memory of the others, on one host with NVLink. They take no
    /// multiprocessor from kernels, and are parts of CUDA graphs.
    #[schemars(extend("x-aliases" = ["p2p", "peer", "nvlink", "symm_mem", "symmetric_memory", "copy_engine"]))]
    Copy,
    /// NCCL 2.27 or newer. GPUs exchange data directly, and collectives are parts of CUDA graphs.
    #[schemars(extend("x-aliases" = ["NCCL", "gpu", "cuda"]))]
    Nccl,
    /// Host memory, and TCP between ranks: slow, for tests and comparisons.
    #[schemars(extend("x-aliases" = ["gloo", "tcp", "cpu", "mpi"]))]
    Host,
}

impl Transport {
    /// All paths.
    pub const ALL: [Transport; 4] = [Transport::Auto, Transport::Copy, Transport::Nccl, Transport::Host];

    /// The name in run files.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Copy => "copy",
            Transport::Nccl => "nccl",
            Transport::Host => "host",
        }
    }
}

/// Type of gradients between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ReduceDtype {
    /// 32 bits.
    #[schemars(extend("x-aliases" = ["f32", "float32", "float"]))]
    Fp32,
    /// 16 bits, rounded.
    #[schemars(extend("x-aliases" = ["bfloat16", "half"]))]
    Bf16,
}

/// Form in which ranks gather the weights that GEMMs read in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Gather {
    /// FP8 numbers and their scales: each rank casts its rows, with the scales of the whole weight.
    #[schemars(extend("x-aliases" = ["fp8", "float8", "8bit", "true"]))]
    Auto,
    /// The fp32 masters, from which each rank casts the whole weight. The bits are those of `"auto"`, for
    /// four times its bytes.
    #[schemars(extend("x-aliases" = ["f32", "float32", "master"]))]
    Fp32,
    /// Copies in bf16, from which each rank casts the whole weight: twice the bytes of `"auto"`, and weights
    /// are rounded twice. For comparisons with trainers that do so.
    #[schemars(extend("x-aliases" = ["bfloat16", "false"]))]
    Bf16,
}
