//! The ranks of a run, and how they share its work.

use crate::Group;
use xtrain_tensor::DType;

/// The ranks of a run, and how they share its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parallel {
    /// The number of ranks.
    pub world_size: usize,
    /// This rank, from 0.
    pub rank: usize,
    /// Groups of ranks that each hold all state together (hybrid sharding; Zhao et al., arXiv 2304.11277,
    /// section 3.2.2). It divides the number of ranks. Rank r is of the replica r / n, for n ranks of each.
    pub replicas: usize,
    /// The state that is cut among the ranks of a replica.
    pub shard: Shard,
    /// The order in which gradients are added.
    pub reduce: Reduce,
    /// The type in which ranks send gradients to each other: F32, or BF16. They are added in f32.
    pub reduce_dtype: DType,
    /// With [`Shard::Gradients`] and [`Shard::Weights`]: the number of blocks whose weights are gathered, and
    /// whose gradients are reduced, while another block computes.
    pub prefetch_blocks: usize,
    /// The form in which ranks gather what GEMMs read in FP8.
    pub gather: Gather,
}

/// The form in which ranks gather the weights that GEMMs read in FP8. Other weights are gathered as they are
/// read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Gather {
    /// FP8 numbers and their scales: each rank casts its rows, with the scales of the whole.
    #[default]
    Auto,
    /// The masters in f32, of which each rank casts the whole. The bits are those of [`Gather::Auto`].
    F32,
    /// Copies in bf16, of which each rank casts the whole, as PyTorch's FSDP2 does. Weights are rounded
    /// twice.
    Bf16,
}

/// The state that is cut among the ranks of a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shard {
    /// None: every rank holds all state (DDP).
    #[default]
    None,
    /// Masters and the optimizer's state (ZeRO-1; Rajbhandari et al., arXiv 1910.02054, section 5.1).
    Optimizer,
    /// Gradients too (ZeRO-2, section 5.2 there): each micro-step adds its gradients to the sums of a rank's
    /// rows.
    Gradients,
    /// Weights too (ZeRO-3, section 5.3 there): a block's weights are gathered before it reads them.
    Weights,
}

/// The order in which the gradients of micro-batches are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Each rank accumulates the gradients of its micro-batches, and the sums of the ranks are added. Runs of
    /// one number of ranks have equal bits.
    #[default]
    SameWorld,
    /// The gradients of all micro-batches of a step are the leaves of one binary tree. Runs of any number of
    /// ranks that is a power of two have equal bits.
    AnyWorld {
        /// Micro-batches of each rank in a step.
        micro_steps: usize,
    },
    /// As [`Reduce::SameWorld`], but the communicator adds while it sends
    /// ([`crate::Collective::ReduceScatter`]). NCCL chooses the order in which the gradients of the ranks are
    /// added.
    Fast,
}

impl Reduce {
    /// True if gradients are added in one tree, whatever the number of ranks.
    pub const fn is_any_world(self) -> bool {
        matches!(self, Reduce::AnyWorld { .. })
    }
}

impl Parallel {
    /// One process.
    pub const ALONE: Parallel = Parallel {
        world_size: 1,
        rank: 0,
        replicas: 1,
        shard: Shard::None,
        reduce: Reduce::SameWorld,
        reduce_dtype: DType::F32,
        prefetch_blocks: 1,
        gather: Gather::Auto,
    };

    /// All ranks.
    pub const fn world(&self) -> Group {
        Group::World { size: self.world_size }
    }

    /// The number of ranks of a replica, among which state is cut.
    pub const fn shards(&self) -> usize {
        self.world_size / self.replicas
    }

    /// The ranks of a replica.
    pub const fn shard_group(&self) -> Group {
        match self.replicas {
            1 => self.world(),
            _ => Group::Shard { size: self.shards() },
        }
    }

    /// The ranks that have equal rows, one of each replica.
    pub const fn replica_group(&self) -> Group {
        Group::Replicas { size: self.replicas }
    }

    /// The replica of this rank.
    pub const fn replica(&self) -> usize {
        self.rank / self.shards()
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
