//! A running sum of what a source has given.

use std::sync::{Mutex, PoisonError};

use super::bins::TokenCounts;

/// The sum over the first samples of a source. It continues from the last one that was asked for, so asking
/// once a step costs the samples of that step.
#[derive(Debug, Default)]
pub(super) struct Taken(Mutex<(u64, TokenCounts)>);

impl Taken {
    /// The sum over samples `0..count`, whose counts `counts_of` knows.
    pub(super) fn sum(&self, count: u64, counts_of: impl Fn(u64) -> TokenCounts) -> TokenCounts {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 > count {
            *known = (0, TokenCounts::default());
        }
        for sample in known.0..count {
            known.1 = known.1.plus(counts_of(sample));
        }
        known.0 = count;
        known.1
    }
}
