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
    /// The room for rows, if it may be too small for some routings; otherwise every routing fits.
    pub capacity: Option<Capacity>,
}

/// Room for the rows of a rank's experts, as a multiple of the rows that it would have if all experts had
/// equally many tokens. In thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Capacity(u32);

impl Capacity {
    /// The capacity of this factor, at least 1, to the nearest thousandth; None if there is none.
    pub fn from_factor(factor: f64) -> Option<Capacity> {
        (1.0..=1e6).contains(&factor).then(|| Capacity((factor * 1000.0).round() as u32))
    }

    /// The factor.
    pub fn factor(self) -> f64 {
        f64::from(self.0) / 1000.0
    }

    /// Rows for so many copies of tokens.
    pub(crate) fn rows(self, copies: usize) -> usize {
        (copies * self.0 as usize).div_ceil(1000)
    }

    /// The smallest capacity with room for so many copies of tokens, where equal loads have `mean`.
    pub(crate) fn of_copies(copies: usize, mean: usize) -> Capacity {
        Capacity((copies * 1000).div_ceil(mean.max(1)).clamp(1000, u32::MAX as usize) as u32)
    }
}

impl ExpertRanks {
    /// One rank that has all experts.
    pub const ALONE: ExpertRanks = ExpertRanks { count: 1, any_world: false, capacity: None };

    /// Those of a run, with room for every routing.
    pub const fn of_run(parallel: &Parallel) -> ExpertRanks {
        let any_world = parallel.reduce.is_any_world();
        ExpertRanks { count: parallel.expert, any_world, capacity: None }
    }
}
