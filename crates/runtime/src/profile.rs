//! Where the time of a run goes, by op and role.

use std::collections::HashMap;
use std::time::Duration;

/// Time spent by op and role.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    rows: HashMap<(&'static str, &'static str), (Duration, u64)>,
}

/// One op in one role.
#[derive(Clone, Copy, Debug)]
pub struct ProfileRow {
    /// The op's name.
    pub op: &'static str,
    /// fprop, dgrad, ...
    pub role: &'static str,
    /// Time in all its runs.
    pub time: Duration,
    /// How many times it ran.
    pub runs: u64,
}

impl Profile {
    pub(crate) fn add(&mut self, op: &'static str, role: &'static str, time: Duration) {
        let row = self.rows.entry((op, role)).or_default();
        row.0 += time;
        row.1 += 1;
    }

    /// The rows, the longest first.
    pub fn rows(&self) -> Vec<ProfileRow> {
        let mut rows: Vec<ProfileRow> = self
            .rows
            .iter()
            .map(|(&(op, role), &(time, runs))| ProfileRow { op, role, time, runs })
            .collect();
        rows.sort_by_key(|r| std::cmp::Reverse(r.time));
        rows
    }
}
