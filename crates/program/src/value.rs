//! Values: the tensors of a program, and where each one lives.

use std::fmt;
use std::sync::Arc;
use xtrain_tensor::{HostTensor, TensorType};

/// The index of a value in [`Program::values`](crate::Program::values).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ValueId(pub u32);

impl fmt::Debug for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// A tensor of a program.
#[derive(Clone)]
pub struct Value {
    /// Shape and element type.
    pub ty: TensorType,
    /// Its lifetime, and how the host finds it.
    pub storage: Storage,
    /// True for a boundary of recomputation: the value is saved even if its block is recomputed.
    pub boundary: bool,
    /// For a value that the backward recomputes: the forward value with equal bits.
    pub repeats: Option<ValueId>,
}

/// The lifetime of a value, and how the host finds it.
#[derive(Clone)]
pub enum Storage {
    /// Lives across steps and is shared by programs, which find it by kind and name.
    State {
        /// Its purpose.
        kind: StateKind,
        /// Unique within the kind. Masters, gradients, moments and compute copies have the parameter's name.
        name: Arc<str>,
    },
    /// Fixed when the program is traced, for example a table of rotation angles. Programs share it if name
    /// and type agree.
    Constant {
        /// Unique among the constants of a model.
        name: Arc<str>,
        /// Computes the contents. An engine calls it once; planning does not call it.
        make: Arc<dyn Fn() -> HostTensor + Send + Sync>,
    },
    /// Written by the host before each run.
    Input {
        /// The host finds it by this name.
        name: Arc<str>,
    },
    /// Read by the host after a run.
    Output {
        /// The host finds it by this name.
        name: Arc<str>,
    },
    /// Lives within one phase of one run, in the planned arena.
    Transient,
}

/// The purpose of a state value. The memory table has a row for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StateKind {
    /// A parameter's master copy.
    Master,
    /// A parameter that is not trained, in the type in which it is read.
    Frozen,
    /// A parameter's copy in the type that GEMMs read.
    Compute,
    /// A parameter's gradient, accumulated over micro-steps.
    Gradient,
    /// This rank's rows of a parameter's gradient, summed over ranks.
    ReducedGradient,
    /// Partial sums of a parameter's gradient over the micro-steps of a step.
    PartialSums,
    /// A whole master, gathered from the ranks that have its rows.
    Gathered,
    /// The losses of the micro-steps of a step.
    Losses,
    /// The first moment of AdamW.
    Moment1,
    /// The second moment of AdamW.
    Moment2,
    /// The number of updates that the optimizer applied.
    Counter,
    /// Not 0 from a step on whose rows of experts do not fit, until it is repeated.
    Halted,
    /// The keys and values of earlier tokens, in generation.
    Cache,
    /// The amax of one tensor, or of several, that the step casts to FP8.
    Amax,
    /// The delayed scale of a cast to FP8.
    Scale,
    /// The amaxes of earlier steps, latest first.
    AmaxHistory,
}

impl StateKind {
    /// The name in dumps, checkpoints and tables.
    pub const fn name(self) -> &'static str {
        match self {
            StateKind::Master => "master",
            StateKind::Frozen => "frozen",
            StateKind::Compute => "compute",
            StateKind::Gradient => "gradient",
            StateKind::ReducedGradient => "reduced_gradient",
            StateKind::PartialSums => "partial_sums",
            StateKind::Gathered => "gathered",
            StateKind::Losses => "losses",
            StateKind::Moment1 => "moment1",
            StateKind::Moment2 => "moment2",
            StateKind::Counter => "counter",
            StateKind::Halted => "halted",
            StateKind::Cache => "cache",
            StateKind::Amax => "amax",
            StateKind::Scale => "scale",
            StateKind::AmaxHistory => "amax_history",
        }
    }

    /// The beginning of the names of its values in checkpoints: `moment1/`.
    pub fn prefix(self) -> String {
        format!("{}/", self.name())
    }

    /// True if checkpoints contain it. Other state is computed from this state, or not needed after the step.
    pub const fn is_saved(self) -> bool {
        use StateKind::{AmaxHistory, Counter, Master, Moment1, Moment2, Scale};
        matches!(self, Master | Moment1 | Moment2 | Counter | Scale | AmaxHistory)
    }
}
