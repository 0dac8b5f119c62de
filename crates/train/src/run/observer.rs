//! Start and end of a run, and its observer.

use crate::corpus::Notice;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_config::Config;
use xtrain_report::metrics::Event;

/// Start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// In a folder that is empty or not there.
    New,
    /// From the latest complete checkpoint, else from the start.
    Resume,
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// An earlier process had done all steps and written the export, samples and report. Nothing was changed.
    FinishedBefore {
        /// Steps that the run has made.
        done: u64,
        /// Steps that it was asked for now, no more than those.
        steps: u64,
    },
    /// It was asked to stop; the state is saved.
    Stopped,
    /// Its time was up; the state is saved.
    TimeLimit,
    /// It was asked to stop, or its time was up, before its first step. Tokens that were prepared until then
    /// stay in the cache.
    StoppedEarly,
}

/// Watches a run: the terminal does, and `()` ignores everything.
pub trait Observer {
    /// Called for work before the first step; [`ControlFlow::Break`] stops it.
    fn notice(&mut self, notice: Notice) -> ControlFlow<()>;
    /// Called before the first step of this process; if no step is left, before the rest of the run's end is
    /// written.
    fn started(&mut self, config: &Config, model: &str, device: &str, first_step: u64, steps: u64);
    /// Called when a step is done, with the number of steps done and the number of all.
    fn stepped(&mut self, done: u64, steps: u64);
    /// Called for each event that is also written to the metrics files.
    fn event(&mut self, event: &Event, steps: u64);
    /// Called for each file or folder that is written at the end.
    fn wrote(&mut self, what: &str, path: &Path);
}

/// Ignores everything.
impl Observer for () {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, _: u64, _: u64) {}
    fn event(&mut self, _: &Event, _: u64) {}
    fn wrote(&mut self, _: &str, _: &Path) {}
}
