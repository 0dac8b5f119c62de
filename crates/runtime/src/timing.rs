//! When what an engine ran was run: what traces and benchmarks are made of.

use crate::part::{Part, ProgramId};
use std::time::Instant;

/// What an engine takes the time of, in the runs that follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// Nothing.
    #[default]
    Off,
    /// Each run as a whole, and what is copied for it. Nothing waits for it.
    Runs,
    /// Each op too, one after the other; each run is waited for.
    Ops {
        /// How often an op runs before the next one: more than once makes short ones measurable, and what they leave in memory useless.
        repeats: usize,
    },
}

/// What was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedWork {
    /// The copy of a run's inputs to a card.
    Inputs,
    /// A run.
    Part(Part),
    /// All repeats of an op: its index among the program's instances.
    Instance(usize),
    /// The copy of outputs to the host.
    Outputs,
}

/// Something that was run, and when by the host's clock.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// Of which program.
    pub program: ProgramId,
    /// What.
    pub work: TimedWork,
    /// When it began.
    pub begin: Instant,
    /// When it ended: no later than what runs after it begins.
    pub end: Instant,
}

impl Timed {
    /// How long it took.
    pub fn seconds(&self) -> f64 {
        (self.end - self.begin).as_secs_f64()
    }
}
