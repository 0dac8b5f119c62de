//! `[parallel]`: how the processes of a run share its work.
//!
//! The number of processes is not a key: the command line (`--gpus`, `--ranks`) or a launcher gives it, and a
//! run may be resumed with another number.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_program::{Gather, Parallel, Reduce, Shard};
use xtrain_rank::Rank;
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
        /// Consecutive ranks that share the experts of each block (expert parallelism): a rank holds and
        /// computes its own, and tokens travel to them. Must divide the ranks of a replica and the experts of
        /// a block; with one process it has no effect.
        #[schemars(range(min = 1, max = 64), extend("x-unit" = "ranks"))]
        pub expert: usize = 1,
        /// Consecutive ranks that train on the same micro-batches: each computes some heads of attention and
        /// some columns of the feed-forward, not of experts, and between these some of the tokens (tensor and
        /// sequence parallelism). `shard = "none"` is then `"optimizer"`. Must divide the ranks of a replica,
        /// the heads, the key/value heads, and `model.ffn_dim` or `experts.shared_ffn_dim`; with one process
        /// it has no effect.
        #[schemars(range(min = 1, max = 64), extend("x-unit" = "ranks"))]
        pub tensor: usize = 1,
        /// Stages of consecutive blocks, each computed by equally many consecutive ranks, to which
        /// micro-batches pass one after the other. Must divide the number of ranks; with one process it has
        /// no effect. A step should have many more micro-batches than stages, which wait for each other at
        /// its beginning and its end.
        #[schemars(range(min = 1, max = 64), extend("x-unit" = "stages"))]
        pub pipeline: usize = 1,
        /// Chunks of consecutive blocks of each stage, through which micro-batches pass in turns (interleaved
        /// stages): stages wait less for each other, and send more. The micro-batches of a rank must be a
        /// multiple of the stages.
        #[schemars(range(min = 1, max = 8), extend("x-unit" = "chunks"))]
        pub pipeline_chunks: usize = 1,
        /// Blocks of each stage, first stage first; with chunks, of the first chunk of each stage, then of
        /// the second, and so on. If empty, they take about the same time.
        #[schemars(extend("x-unit" = "blocks"))]
        pub pipeline_split: Vec<usize> = Vec::new(),
        /// Order in which the gradients of micro-batches are added.
        pub reduce: Reduce = Reduce::SameWorld,
        /// Type in which ranks send gradients to each other. They are always added in fp32. `"bf16"` sends
        /// half the bytes and rounds each rank's sum. It cannot be combined with `reduce = "any-world"`,
        /// `"any-mesh"` and `"fast"`.
        pub reduce_dtype: ReduceDtype = ReduceDtype::Fp32,
        /// With `shard = "gradients"` and `"weights"`: blocks whose weights are gathered, and whose gradients
        /// are reduced, while another block computes. Each takes the memory of a block's weights and
        /// gradients. Changes no bit.
        #[schemars(range(max = 16), extend("x-unit" = "blocks"))]
        pub prefetch_blocks: usize = 1,
        /// Form in which ranks gather the weights that GEMMs read in FP8, if the optimizer's state is
        /// divided, and tokens with `tensor`. Other weights are gathered in the type in which they are read.
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
    /// The stages among so many ranks: one process has no other to hold the rest of the model.
    pub fn stages(&self, world_size: usize) -> usize {
        if world_size <= 1 { 1 } else { self.pipeline }
    }

    /// The chunks of each stage, with so many ranks.
    pub fn chunks(&self, world_size: usize) -> usize {
        if self.stages(world_size) > 1 { self.pipeline_chunks } else { 1 }
    }

    /// The ranks, of so many, that train on different micro-batches.
    pub fn data_ranks(&self, world_size: usize) -> usize {
        let tensor = if world_size <= 1 { 1 } else { self.tensor };
        world_size / self.stages(world_size) / tensor
    }

    /// The settings in a program's terms, for a rank that has `micro_steps` micro-batches per step.
    pub fn parallel(&self, rank: Rank, micro_steps: usize) -> Parallel {
        let pipeline = self.stages(rank.world_size);
        // One process has no other to hold a replica, some of the experts or a part of a matrix.
        let [replicas, expert, tensor] =
            [self.replicas, self.expert, self.tensor].map(|n| if rank.is_alone() { 1 } else { n });
        // Ranks of a tensor group never have the same copies, so there is no reason to have the same state.
        let shard = if self.shard == Shard::None && tensor > 1 { Shard::Optimizer } else { self.shard };
        Parallel {
            rank,
            pipeline,
            chunks: self.chunks(rank.world_size),
            replicas,
            expert,
            tensor,
            shard,
            reduce: self.reduce,
            tree_micro_steps: if self.reduce.is_any_world() { micro_steps } else { 1 },
            reduce_dtype: match self.reduce_dtype {
                ReduceDtype::Fp32 => DType::F32,
                ReduceDtype::Bf16 => DType::BF16,
            },
            prefetch_blocks: self.prefetch_blocks,
            gather: self.gather,
        }
    }
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
