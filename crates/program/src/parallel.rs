//! The ranks of a run, and how they share its work.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_rank::{Groups, Rank};
use xtrain_tensor::DType;

/// The ranks of a run, and how they share its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// This rank among all.
    pub rank: Rank,
    /// Stages of the pipeline, each with equally many consecutive ranks (GPipe; Huang et al., arXiv
    /// 1811.06965). It divides the number of ranks. Everything else here is about the ranks of a stage.
    pub pipeline: usize,
    /// Chunks of blocks of each stage, which micro-batches pass in turns with those of the other stages
    /// (interleaved stages; Narayanan et al., arXiv 2104.04473, section 2.2). 1 without a pipeline.
    pub chunks: usize,
    /// Groups of ranks that each hold all state together (hybrid sharding; Zhao et al., arXiv 2304.11277,
    /// section 3.2.2). It divides the number of ranks. Rank r is of the replica r / n, for n ranks of each.
    pub replicas: usize,
    /// Neighbouring ranks that share the experts of each block: each computes with its part of them. It
    /// divides the ranks of a replica, and the experts. 1 if every rank computes with all experts.
    pub expert: usize,
    /// Neighbouring ranks that train on the same micro-batches: each computes with a part of each block's
    /// matrices, and between these with a part of the tokens (tensor and sequence parallelism; Korthikanti et
    /// al., arXiv 2205.05198). It divides the ranks of a replica. State is cut at least among them.
    pub tensor: usize,
    /// The state that is cut among the ranks of a replica.
    pub shard: Shard,
    /// The order in which gradients are added.
    pub reduce: Reduce,
    /// Micro-batches of each rank in a step, with [`Reduce::AnyWorld`]: their gradients are leaves of its
    /// tree. Else 1.
    pub tree_micro_steps: usize,
    /// The type in which ranks send gradients to each other: F32, or BF16. They are added in f32.
    pub reduce_dtype: DType,
    /// With [`Shard::Gradients`] and [`Shard::Weights`]: the number of blocks whose weights are gathered, and
    /// whose gradients are reduced, while another block computes.
    pub prefetch_blocks: usize,
    /// The form in which ranks gather what GEMMs read in FP8.
    pub gather: Gather,
}

/// The form in which ranks gather the weights that GEMMs read in FP8, and tokens with `parallel.tensor`.
/// Other weights are gathered as they are read. PyTorch's FSDP2 gathers copies in bf16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Gather {
    /// FP8 numbers and their scales: each rank casts its rows, with the scales of the whole.
    #[default]
    Auto,
    /// The fp32 masters, from which each rank casts the whole weight, and tokens in bf16. The bits are those
    /// of `"auto"`, for more bytes.
    Fp32,
    /// Copies and tokens in bf16, from which each rank casts the whole: twice the bytes of `"auto"`, and
    /// weights are rounded twice. For comparisons with trainers that do so.
    Bf16,
}

/// The state that is cut among the ranks of a replica (ZeRO; Rajbhandari et al., arXiv 1910.02054, section
/// 5). With gradients, each micro-step adds its gradients to the sums of a rank's rows; with weights, a
/// block's weights are gathered before it reads them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Shard {
    /// None; every rank holds all state. Known as DDP.
    #[default]
    None,
    /// Master weights and the optimizer's state. Known as ZeRO-1.
    Optimizer,
    /// Gradients too. Known as ZeRO-2.
    Gradients,
    /// Weights too: each block's are gathered before it reads them. Known as ZeRO-3 and FSDP.
    Weights,
}

/// The order in which the gradients of micro-batches are added. With [`Reduce::Fast`], the communicator adds
/// ([`crate::Collective::ReduceScatter`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reduce {
    /// By rank: each adds the gradients of its micro-batches, and then the sums of the ranks are added; with
    /// `shard = "gradients"` and `"weights"` the other way round. Runs with the same number of ranks, and of
    /// replicas, have equal bits.
    #[default]
    SameWorld,
    /// One binary tree adds the gradients of all micro-batches. Runs with 1, 2, 4, 8, ... ranks and the same
    /// `train.micro_batch_size` have equal bits, and take more memory and time (docs/parallel.md).
    AnyWorld,
    /// As `"any-world"`, and each block is computed in up to 8 parts, whatever `tensor` is: 1, 2, 4 or 8 as
    /// they divide the key/value heads and the columns of the feed-forward. Runs with any `tensor` that
    /// divides the parts have equal bits, too. It is for proving that ranks compute the same, not for
    /// training: small GEMMs, and sums in fp32, take much more time.
    AnyMesh,
    /// As `"same-world"`, but NCCL adds while it sends, in an order of its own: less memory, and no kernels
    /// for sums. Bits repeat only if NCCL chooses the same algorithm again. Without NCCL the bits are those
    /// of `"same-world"`.
    Fast,
}

impl Reduce {
    /// The value in run files.
    pub const fn name(self) -> &'static str {
        match self {
            Reduce::SameWorld => "same-world",
            Reduce::AnyWorld => "any-world",
            Reduce::AnyMesh => "any-mesh",
            Reduce::Fast => "fast",
        }
    }

    /// True if gradients are added in one tree, whatever the number of ranks.
    pub const fn is_any_world(self) -> bool {
        matches!(self, Reduce::AnyWorld | Reduce::AnyMesh)
    }

    /// True if blocks are computed in the same parts, whatever the number of tensor ranks.
    pub const fn is_any_mesh(self) -> bool {
        matches!(self, Reduce::AnyMesh)
    }
}

impl Parallel {
    /// One process.
    pub const ALONE: Parallel = Parallel {
        rank: Rank::ALONE,
        pipeline: 1,
        chunks: 1,
        replicas: 1,
        expert: 1,
        tensor: 1,
        shard: Shard::None,
        reduce: Reduce::SameWorld,
        tree_micro_steps: 1,
        reduce_dtype: DType::F32,
        prefetch_blocks: 1,
        gather: Gather::Auto,
    };

    /// All ranks.
    pub const fn world(&self) -> Groups {
        Groups::world(self.rank.world_size)
    }

    /// The ranks of a stage, which train one part of the model.
    pub const fn stage_groups(&self) -> Groups {
        Groups { size: self.rank.world_size / self.pipeline, stride: 1 }
    }

    /// The ranks of a pipeline: one of each stage, in their order, which train on the same data.
    pub const fn pipeline_groups(&self) -> Groups {
        Groups { size: self.pipeline, stride: self.stage_groups().size }
    }

    /// The stage of this rank.
    pub const fn stage(&self) -> usize {
        self.pipeline_groups().place(self.rank.index)
    }

    /// The ranks of a stage that train on different data.
    pub const fn data_groups(&self) -> Groups {
        Groups { size: self.stage_groups().size / self.tensor, stride: self.tensor }
    }

    /// This rank among those that train on different data: rank r of n trains on micro-batches r, r + n, ...
    pub const fn data_rank(&self) -> Rank {
        self.data_groups().rank_within(self.rank.index)
    }

    /// The ranks that train on the same micro-batches in parts.
    pub const fn tensor_groups(&self) -> Groups {
        Groups { size: self.tensor, stride: 1 }
    }

    /// The number of ranks of a replica, among which state is cut.
    pub const fn shards(&self) -> usize {
        self.stage_groups().size / self.replicas
    }

    /// The ranks of a replica.
    pub const fn shard_groups(&self) -> Groups {
        Groups { size: self.shards(), stride: 1 }
    }

    /// The ranks that share the experts of each block.
    pub const fn expert_groups(&self) -> Groups {
        Groups { size: self.expert, stride: 1 }
    }

    /// The ranks of a replica that compute with the same experts.
    pub const fn expert_shard_groups(&self) -> Groups {
        Groups { size: self.shards() / self.expert, stride: self.expert }
    }

    /// The ranks that have equal rows, one of each replica.
    pub const fn replica_groups(&self) -> Groups {
        Groups { size: self.replicas, stride: self.shards() }
    }

    /// True if a rank has its rows of masters and of the optimizer's state alone.
    pub const fn cuts_state(&self) -> bool {
        !matches!(self.shard, Shard::None) && self.shards() > 1
    }

    /// True if a rank has its rows of gradients alone, so that every micro-step reduces them.
    pub const fn cuts_gradients(&self) -> bool {
        matches!(self.shard, Shard::Gradients | Shard::Weights) && self.shards() > 1
    }

    /// True if a rank has its rows of what GEMMs read alone.
    pub const fn cuts_weights(&self) -> bool {
        matches!(self.shard, Shard::Weights) && self.shards() > 1
    }
}

impl Default for Parallel {
    fn default() -> Self {
        Parallel::ALONE
    }
}
