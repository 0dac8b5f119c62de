//! Start and end of a run, and its observer.

use crate::corpus::Notice;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_config::Config;
use xtrain_report::metrics::Event;

/// Start of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// In a folder that is empty or does not exist.
    New,
    /// From the latest complete checkpoint, else from the start.
    Resume,
}

/// End of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are done.
    Finished,
    /// An earlier process had done all steps and written export, samples and report. Nothing was changed.
    FinishedBefore {
        /// Steps that the run has made.
        done: u64,
        /// Steps requested now, at most `done`.
        steps: u64,
    },
    /// The run was asked to stop; the state is saved.
    Stopped,
    /// The time limit was reached; the state is saved.
    TimeLimit,
    /// The run was asked to stop, or reached its time limit, before its first step. Tokens prepared until
    /// then stay in the cache.
    StoppedEarly,
}

/// Watches a run: the terminal does, and `()` ignores everything, as every method does by default.
pub trait Observer {
    /// Called for work before the first step; [`ControlFlow::Break`] stops it.
    fn notice(&mut self, _notice: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    /// Called before the first step of this process, or, if no step is left, before the rest of the run's end
    /// is written.
    fn started(&mut self, _config: &Config, _model: &str, _device: &str, _first_step: u64, _steps: u64) {}
    /// Called after each step, with the number of steps done and the total.
    fn stepped(&mut self, _done: u64, _steps: u64) {}
    /// Called for each event that is also written to the metrics files.
    fn event(&mut self, _event: &Event, _steps: u64) {}
    /// Called for each file or folder that is written at the end.
    fn wrote(&mut self, _what: &str, _path: &Path) {}
}

/// Ignores all calls.
impl Observer for () {}
