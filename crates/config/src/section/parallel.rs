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
        pub shard: Shard = Shard::None,
        /// Groups of equally many ranks, each of which holds all state, divided among its ranks as `shard`
        /// says (HSDP). The ranks of a group have consecutive numbers, so a group for each node keeps gathers
        /// within nodes. Must divide the number of ranks; with one process it has no effect.
        #[schemars(range(min = 1), extend("x-unit" = "groups"))]
        pub replicas: usize = 1,
        /// Order in which the gradients of micro-batches are added.
        pub reduce: ReduceOrder = ReduceOrder::SameWorld,
        /// Type in which ranks send gradients to each other. They are always added in fp32. `"bf16"` sends
        /// half the bytes and rounds each rank's sum. It cannot be combined with `reduce = "any-world"` and
        /// `"fast"`.
        pub reduce_dtype: ReduceDtype = ReduceDtype::Fp32,
        /// With `shard = "gradients"` and `"weights"`: blocks whose weights are gathered, and whose gradients
        /// are reduced, while another block computes. Each takes the memory of a block's weights and
        /// gradients. Changes no bit.
        #[schemars(range(max = 16), extend("x-unit" = "blocks"))]
        pub prefetch_blocks: usize = 1,
        /// Form in which ranks gather the weights that GEMMs read in FP8, if the optimizer's state is
        /// divided. Other weights are gathered in the type in which they are read.
        pub gather: Gather = Gather::Auto,
        /// Path of the data that GPUs exchange. Changes no bit.
        pub transport: Transport = Transport::Auto,
        /// Time in which all ranks must have started.
        pub start_timeout: TimeLimit = TimeLimit::minutes(5),
        /// Time without progress after which a step counts as hung and ends the run. The limit of the first
        /// step of a process, which compiles kernels, is at least ten minutes.
        pub timeout: TimeLimit = TimeLimit::minutes(1),
        /// Error of a time-out that names the collective in which each rank waits, also after the
        /// first step. It adds two small copies to a step's graph for each launch of collectives. Changes no
        /// bit.
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
    None,
    /// Master weights and the optimizer's state. Known as ZeRO-1.
    Optimizer,
    /// Gradients too. Known as ZeRO-2.
    Gradients,
    /// Weights too: each block's are gathered before it reads them. Known as ZeRO-3 and FSDP.
    Weights,
}

/// Order in which the gradients of a step are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReduceOrder {
    /// By rank: each adds the gradients of its micro-batches, and then the sums of the ranks are added; with
    /// `shard = "gradients"` and `"weights"` the other way round. Runs with the same number of ranks, and of
    /// replicas, have equal bits.
    SameWorld,
    /// One binary tree adds the gradients of all micro-batches. Runs with 1, 2, 4, 8, ... ranks and the same
    /// `train.micro_batch_size` have equal bits, and take more memory and time (docs/parallel.md).
    AnyWorld,
    /// As `"same-world"`, but NCCL adds while it sends, in an order of its own: less memory, and no kernels
    /// for sums. Bits repeat only if NCCL chooses the same algorithm again. Without NCCL the bits are those
    /// of `"same-world"`.
    Fast,
}

/// Path of the data that GPUs exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// Copies between GPUs if NVLink connects those of all ranks on one host; else NCCL if every rank has it;
    /// else host memory, with a warning that says why.
    Auto,
    /// Each GPU's copy engines copy to the memory of the others, on one host with NVLink. They take no
    /// multiprocessor from kernels, and are parts of CUDA graphs.
    Copy,
    /// NCCL 2.27 or newer. GPUs exchange data directly, and collectives are parts of CUDA graphs.
    Nccl,
    /// Host memory, and TCP between ranks: slow, for tests and comparisons.
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
    Fp32,
    /// 16 bits, rounded.
    Bf16,
}

/// Form in which ranks gather the weights that GEMMs read in FP8.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Gather {
    /// FP8 numbers and their scales: each rank casts its rows, with the scales of the whole weight.
    Auto,
    /// The fp32 masters, from which each rank casts the whole weight. The bits are those of `"auto"`, for
    /// four times its bytes.
    Fp32,
    /// Copies in bf16, from which each rank casts the whole weight: twice the bytes of `"auto"`, and weights
    /// are rounded twice. For comparisons with trainers that do so.
    Bf16,
}
