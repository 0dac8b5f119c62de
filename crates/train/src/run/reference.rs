//! Reference segments: some steps of an FP8 run are first run in bf16, from the same state on the same
//! batches, to measure how much higher the losses in FP8 are.
//!
//! The state is copied to host memory before and restored afterwards, so the run continues with the same bits
//! as without the segment. The run's own steps follow; after the last of them the gap is reported.
//! Intermediate sums are part of the position, so a run that is resumed inside a segment reports the same
//! gap.

use super::observer::{Observer, Outcome};
use super::snapshot::{parts, places};
use super::steps::step_error;
use super::watch::Watch;
use super::{Run, is_due};
use crate::error::RunError;
use crate::position::{Segment, added};
use std::collections::VecDeque;
use std::ops::{ControlFlow, Range};
use std::time::Instant;
use xtrain_report::metrics::format;
use xtrain_runtime::StateEntry;
use xtrain_step::learner::{IN_FLIGHT, Learner};
use xtrain_step::spans::step_span;
use xtrain_tensor::host::AlignedBytes;

/// A copy of the state in host memory during a segment.
pub(super) struct StateCopy {
    entries: Vec<StateEntry>,
    places: Vec<Range<usize>>,
    memory: AlignedBytes,
}

impl StateCopy {
    /// Reserves memory for the state of `learner`; the system provides the pages when they are first written.
    pub(super) fn new(learner: &mut Learner) -> Result<Self, RunError> {
        let entries = learner.saved_state();
        let (places, bytes) = places(&entries);
        let is_room = xtrain_tensor::available_bytes().is_none_or(|available| bytes as u64 <= available);
        let memory = if is_room { AlignedBytes::try_zeroed(bytes) } else { None };
        let memory = memory.ok_or_else(|| {
            RunError::Refused(format!(
                "reference segments copy the state to host memory, {}, which is not available; disable them with --set \
                 precision.reference_every=0",
                format::bytes(bytes as u64)
            ))
        })?;
        Ok(StateCopy { entries, places, memory })
    }

    fn store(&mut self, learner: &mut Learner) -> Result<(), RunError> {
        Ok(learner.copy_state(&self.entries, &mut parts(self.memory.as_mut_slice(), &self.places))?)
    }

    fn restore(&self, learner: &mut Learner) -> Result<(), RunError> {
        for (entry, place) in self.entries.iter().zip(&self.places) {
            learner.write_state(entry.kind, &entry.name, &self.memory.as_slice()[place.clone()])?;
        }
        Ok(())
    }
}

impl Run {
    /// True if a segment begins after `step` steps.
    pub(super) fn is_reference_due(&self, step: u64) -> bool {
        self.state_copy.is_some()
            && step > 0
            && step < self.schedule.steps()
            && is_due(step, self.config.precision.reference_every)
    }

    /// Runs the steps of the segment that begins here, if any, in bf16, and restores the state. If the run is
    /// asked to stop meanwhile, its state is saved, and a resumed run begins the segment again.
    pub(super) fn reference(
        &mut self,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<Option<Outcome>, RunError> {
        let after = self.position.step;
        if !self.is_reference_due(after) {
            return Ok(None);
        }
        let Some(mut copy) = self.state_copy.take() else { return Ok(None) };
        let _segment = step_span("reference", after);
        if let Some(profiler) = &mut self.profiler {
            profiler.before_evaluation(&mut self.learner)?;
        }
        copy.store(&mut self.learner)?;
        self.learner.begin_reference()?;
        let made = self.in_bf16(after, watch, observer);
        copy.restore(&mut self.learner)?;
        self.learner.end_reference()?;
        self.state_copy = Some(copy);
        match made? {
            ControlFlow::Continue(segment) => {
                self.position.reference = Some(segment);
                Ok(None)
            }
            ControlFlow::Break(outcome) => {
                self.save(watch, observer)?;
                Ok(Some(outcome))
            }
        }
    }

    /// Runs the steps; returns the outcome if the run is asked to stop before they are done.
    fn in_bf16(
        &mut self,
        after: u64,
        watch: &mut Watch<'_>,
        observer: &mut dyn Observer,
    ) -> Result<ControlFlow<Outcome, Segment>, RunError> {
        let steps = self.config.precision.reference_steps.min(self.schedule.steps() - after);
        let mut segment = Segment { after, steps, bf16_sum: Some(0.0), sum: Some(0.0) };
        let (mut flying, mut ended) = (VecDeque::new(), None);
        let mut next = after;
        while !flying.is_empty() || (next < after + steps && ended.is_none()) {
            let begun = Instant::now();
            if next < after + steps && ended.is_none() {
                ended = self.request_stop(watch, watch.step + self.saving(watch));
            }
            let is_more = next < after + steps && ended.is_none();
            if is_more {
                flying.push_back((next + 1, self.launch(next, self.schedule.lr(next))?));
                next += 1;
            }
            if flying.len() > if is_more { IN_FLIGHT } else { 0 }
                && let Some((step, ticket)) = flying.pop_front()
            {
                let result = self.learner.collect(ticket).map_err(|e| step_error(step, e))?;
                if let Some(overflow) = result.overflow {
                    for (step, ticket) in flying.drain(..) {
                        self.learner.collect(ticket).map_err(|e| step_error(step, e))?;
                    }
                    self.make_room(step, overflow, observer)?;
                    next = step - 1;
                    continue;
                }
                segment.bf16_sum = added(segment.bf16_sum, result.loss);
                // Results are collected after the same launches on all ranks.
                ended = ended.or(result.stopping.then_some(Outcome::Stopped));
            }
            watch.step = watch.step.max(begun.elapsed());
        }
        match ended {
            Some(request) if self.process_group.is_alone() => Ok(ControlFlow::Break(request)),
            Some(_) => Ok(ControlFlow::Break(self.stop_request_of_any()?)),
            None => Ok(ControlFlow::Continue(segment)),
        }
    }
}
