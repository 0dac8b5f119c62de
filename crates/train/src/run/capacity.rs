//! Steps whose rows of experts do not fit: they are repeated with more room.

use super::Run;
use super::observer::Observer;
use super::steps::step_error;
use crate::error::RunError;
use xtrain_config::OrAuto;
use xtrain_model::Capacity;
use xtrain_planner::tunable::capacity_for_all;
use xtrain_report::metrics::Warning;
use xtrain_runtime::EngineError;
use xtrain_step::error::LearnError;
use xtrain_step::learner::Overflow;

impl Run {
    /// Makes room for the rows of `step`, which changed nothing and is to be repeated. All ranks call it
    /// after the same step, when no step is in flight.
    pub(super) fn make_room(
        &mut self,
        step: u64,
        overflow: Overflow,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let Overflow { block, needed, own, room, .. } = overflow;
        let needs_most = self.process_group.gather(&[u64::from(own == needed)])?;
        let rank = needs_most.iter().position(|of| of[0] == 1).unwrap_or(0);
        let needs =
            format!("rank {rank} needs {needed} rows for its experts in block {block} and has {room}");
        let capacity = self.learner.grow(overflow).map_err(|error| match error {
            LearnError::Engine(error @ EngineError::Memory { .. }) => RunError::Refused(format!(
                "step {step}: {needs}, and more room does not fit in memory: {error}; the last checkpoint is good: continue it with \
                 smaller micro-batches, train.recompute=block, or fewer ranks in parallel.expert"
            )),
            other => step_error(step, other),
        })?;
        self.together.repeated_steps += 1;
        let factor = capacity.map(Capacity::factor);
        // A run that is resumed from a later checkpoint begins with it.
        let recorded = capacity.or_else(|| capacity_for_all(self.learner.spec()));
        self.config.experts.capacity = recorded.map(|capacity| OrAuto::Is(capacity.factor()));
        let room = factor.map_or("room for every routing".into(), |of| format!("experts.capacity = {of}"));
        let text = format!("step is repeated with {room}: {needs}; {} so far", self.together.repeated_steps);
        self.record(Warning { step, text }, observer)
    }
}
