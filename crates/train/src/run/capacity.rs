//! Steps whose rows of experts do not fit: they are repeated with more room.

use super::Run;
use super::observer::Observer;
use crate::error::RunError;
use xtrain_config::OrAuto;
use xtrain_model::Capacity;
use xtrain_report::metrics::{Warning, format};
use xtrain_step::error::LearnError;
use xtrain_step::learner::Overflow;

impl Run {
    /// Makes room for the rows of `step`, which changed nothing and is to be repeated. All ranks call it
    /// after the same step, when no step is in flight.
    ///
    /// # Errors
    /// More room does not fit in memory. The last checkpoint is good.
    pub(super) fn make_room(
        &mut self,
        step: u64,
        overflow: Overflow,
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        let needs = self.needs(overflow)?;
        let capacity = self.learner.grow(overflow).map_err(|error| {
            let advice = "use smaller micro-batches, train.recompute = \"block\", or a larger parallel.expert; \
                          the last checkpoint is good";
            match error {
                LearnError::Engine(error) => RunError::Refused(format!(
                    "step {step}: {needs}, and a program with more room does not fit in memory: {error}; {advice}"
                )),
                other => other.into(),
            }
        })?;
        self.together.repeated_steps += 1;
        // A run that is resumed from a later checkpoint begins with it.
        if let Some(capacity) = capacity {
            self.config.experts.capacity = Some(OrAuto::Is(capacity.factor()));
        }
        let room = match capacity.map(Capacity::factor) {
            None => "room for every routing".to_owned(),
            Some(factor) => format!("experts.capacity = {factor}"),
        };
        let text = format!("step is repeated with {room}: {needs}; {} so far", self.together.repeated_steps);
        self.record(Warning { step, text }, observer)
    }

    /// The rows that did not fit in words, and the rank that needs most.
    fn needs(&self, overflow: Overflow) -> Result<String, RunError> {
        let Overflow { block, needed, own, room, .. } = overflow;
        let own = u64::from(own == needed);
        let rank = self.process_group.gather(&[own])?.iter().position(|of| of[0] == 1).unwrap_or(0);
        Ok(format!(
            "rank {rank} needs {} rows for its experts in block {block} and has {}",
            format::grouped(needed as u64),
            format::grouped(room as u64)
        ))
    }
}
