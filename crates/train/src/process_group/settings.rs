//! The settings that a run file leaves open, chosen by rank 0 for all ranks.

use super::ProcessGroup;
use crate::error::RunError;
use serde_json::Value;
use xtrain_planner::planned::Planned;
use xtrain_planner::{fit, tunable};
use xtrain_step::engine::Processor;

impl ProcessGroup {
    /// `planned` with the settings that `choose` decides on rank 0, and what else it returns there.
    ///
    /// # Errors
    /// `choose` failed, the run has ended, or the step does not fit into the memory of this rank.
    pub fn settings<T>(
        &self,
        planned: Planned,
        processor: &Processor,
        choose: impl FnOnce(Planned) -> Result<(Planned, T), RunError>,
    ) -> Result<(Planned, Option<T>), RunError> {
        if self.is_first() {
            let (planned, more) = choose(planned)?;
            let values: Vec<Value> =
                tunable::decided().map(|field| (field.get)(&planned.resolved.config)).collect();
            self.decide(|| Ok((values, planned.lacks_memory)))?;
            return Ok((planned, Some(more)));
        }
        let no_choice = || Err(RunError::Refused("a rank other than 0 does not choose".into()));
        let (values, lacks_memory): (Vec<Value>, bool) = self.decide(no_choice)?;
        let mut decided = tunable::decided().zip(values);
        let mut planned =
            planned.try_changed(|config| decided.try_for_each(|(field, value)| field.set(config, value)))?;
        planned.lacks_memory = lacks_memory;
        fit::check(&planned, processor, self.processes_here())?;
        Ok((planned, None))
    }
}
