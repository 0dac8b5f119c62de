//! The stop signal and the time limit, either of which may end a run early.

use super::Outcome;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Decides when a run ends early: soon enough to save within its time.
pub(super) struct Watch<'a> {
    stop: &'a AtomicBool,
    begun: Instant,
    limit: Option<Duration>,
    /// The longest step so far.
    pub(super) step: Duration,
    /// The longest batch of an evaluation so far.
    pub(super) batch: Duration,
    /// The longest save so far.
    pub(super) save: Duration,
}

impl<'a> Watch<'a> {
    pub(super) fn new(stop: &'a AtomicBool, begun: Instant, limit: Option<Duration>) -> Self {
        Watch { stop, begun, limit, step: Duration::ZERO, batch: Duration::ZERO, save: Duration::ZERO }
    }

    /// From now on only a signal ends the run. For a run that has made all its steps and saved its state.
    pub(super) fn lift_limit(&mut self) {
        self.limit = None;
    }

    /// Returns the outcome if the run must end now; `None` if it may start work that takes `next`.
    pub(super) fn ended(&self, next: Duration) -> Option<Outcome> {
        if self.stop.load(Ordering::Relaxed) {
            return Some(Outcome::Stopped);
        }
        let is_over = self.limit.is_some_and(|limit| self.begun.elapsed() + next >= limit);
        is_over.then_some(Outcome::TimeLimit)
    }

    /// Before a batch of an evaluation: measures the one before, which began at `begun`, and breaks once
    /// there is a request to stop.
    pub(super) fn check_batch(
        &mut self,
        begun: &mut Option<Instant>,
        request: &mut Option<Outcome>,
        saving: Duration,
    ) -> ControlFlow<()> {
        if let Some(begun) = begun.replace(Instant::now()) {
            self.batch = self.batch.max(begun.elapsed());
        }
        *request = request.or_else(|| self.ended(self.batch + saving));
        if request.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
