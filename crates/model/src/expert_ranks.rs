//! The ranks that share the experts of a model.

use xtrain_program::Parallel;

/// The ranks that share the experts of each block, and the order of the sums over a token's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExpertRanks {
    /// Neighbouring ranks that share the experts; 1 if a rank has all.
    pub count: usize,
    /// True if a token's experts are added as a tree, with equal bits for any `count`
    /// ([`xtrain_program::Reduce::AnyWorld`]).
    pub any_world: bool,
}

impl ExpertRanks {
    /// One rank that has all experts.
    pub const ALONE: ExpertRanks = ExpertRanks { count: 1, any_world: false };

    /// Those of a run.
    pub const fn of_run(parallel: &Parallel) -> ExpertRanks {
        ExpertRanks { count: parallel.expert, any_world: parallel.reduce.is_any_world() }
    }
}
