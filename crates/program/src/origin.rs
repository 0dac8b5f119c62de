//! The place of an instance in the model and in the step: block, site, role, stage, phase, lane, micro-steps.

use std::fmt;
use std::sync::Arc;

/// The place of an instance in the model and in the step. Dumps, traces and recipes form its name from this,
/// and passes select instances by it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The transformer block; `None` outside of the blocks.
    pub block: Option<u32>,
    /// The place within the block or the model, for example `attn.qkv_proj`.
    pub site: Arc<str>,
    /// The part of the instance at its site, for names. Passes use the stage instead.
    pub role: Role,
    /// The stage of the step.
    pub stage: Stage,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(block) = self.block {
            write!(f, "blocks.{block}.")?;
        }
        write!(f, "{}", self.site)
    }
}

/// A stage of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stage {
    /// Before any gradient of an activation is computed. Outputs may be saved for the backward, or recomputed
    /// in it.
    Forward,
    /// From the loss back to the parameters.
    Backward,
    /// Once after the last micro-step.
    Update,
}

impl Stage {
    /// The phase that contains the stage.
    pub const fn phase(self) -> Phase {
        match self {
            Stage::Forward | Stage::Backward => Phase::Micro,
            Stage::Update => Phase::Update,
        }
    }
}

/// The part of an instance at its site. It does not determine the stage: a cast may run in any stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The forward; of a linear layer, the fprop GEMM.
    Forward,
    /// The forward together with the gradients of its inputs: a loss.
    ForwardGrad,
    /// The gradients of activations.
    Dgrad,
    /// The gradients of parameters alone.
    Wgrad,
    /// A forward op that the backward recomputes.
    Recompute,
    /// A cast that a pass inserted.
    Precision,
    /// The sum of gradients over ranks.
    Reduce,
    /// Copies of parameters that are gathered from all ranks.
    Gather,
    /// The gradient norm, clipping, and the optimizer.
    Update,
}

impl Role {
    /// The name in dumps and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Forward => "fprop",
            Role::ForwardGrad => "fprop+grad",
            Role::Dgrad => "dgrad",
            Role::Wgrad => "wgrad",
            Role::Recompute => "recompute",
            Role::Precision => "precision",
            Role::Reduce => "reduce",
            Role::Gather => "gather",
            Role::Update => "update",
        }
    }
}

/// A queue of instances that run in list order. Lanes wait for each other only at data dependencies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Collectives.
    Communication,
    /// Copies between host and device.
    Copy,
}

impl Lane {
    /// The number of lanes.
    pub const COUNT: usize = 3;

    /// All lanes; a lane's index is its number as a `usize`.
    pub const ALL: [Lane; Lane::COUNT] = [Lane::Compute, Lane::Communication, Lane::Copy];

    /// The name in dumps and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::Communication => "communication",
            Lane::Copy => "copy",
        }
    }
}

/// The micro-steps of an optimizer step in which an instance runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum When {
    /// Every micro-step; the update, for an instance of that phase.
    #[default]
    Always,
    /// The last micro-step alone: reductions of gradients that are complete only then.
    Last,
    /// Every micro-step but the last: partial sums that the last one completes.
    BeforeLast,
}

/// A part of an optimizer step that an engine runs as a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// The forward and backward of one micro-batch. Evaluation and generation have no other phase.
    Micro,
    /// Once after the last micro-step.
    Update,
}
