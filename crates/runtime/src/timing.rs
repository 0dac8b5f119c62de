//! Times of an engine's work, for traces and benchmarks.

use crate::part::{Part, ProgramId};
use std::time::Instant;

/// The work that an engine times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// Nothing.
    #[default]
    Off,
    /// Each run as a whole, and its copies. Nothing waits.
    Runs,
    /// Each op too, in each lane one after the other. Each run is waited for.
    Ops {
        /// Runs of each op before the next op. More than one makes short ops measurable, and the results
        /// useless.
        repeats: usize,
    },
}

/// A timed piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedWork {
    /// The copy of a run's inputs to the GPU.
    Inputs,
    /// A run of a part.
    Part(Part),
    /// All repeats of an op, by its index among the program's instances. Of collectives that run together,
    /// the first has the time of all, and the others take no time at its end.
    Instance(usize),
    /// The copy of outputs to the host.
    Outputs,
}

/// A piece of work and its times by the host's clock.
#[derive(Clone, Copy, Debug)]
pub struct Timed {
    /// The program.
    pub program: ProgramId,
    /// The work.
    pub work: TimedWork,
    /// The beginning.
    pub begin: Instant,
    /// The end, no later than the next beginning in its lane.
    pub end: Instant,
}

impl Timed {
    /// The duration in seconds.
    pub fn seconds(&self) -> f64 {
        (self.end - self.begin).as_secs_f64()
    }
}
