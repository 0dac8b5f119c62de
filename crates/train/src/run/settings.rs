//! The settings that rank 0 chooses for all ranks.

use crate::error::RunError;
use crate::process_group::ProcessGroup;
use serde_json::Value;
use xtrain_planner::estimate::Device;
use xtrain_planner::planned::Planned;
use xtrain_planner::tunable;

/// A plan whose settings are chosen, and lines that report the choice.
pub(super) struct Settings {
    pub(super) planned: Planned,
    pub(super) report_lines: Vec<String>,
}

/// The plan with the settings that `choose` chooses on rank 0, which alone knows its `device`.
pub(super) fn agree(
    planned: Planned,
    device: Option<&Device>,
    process_group: &ProcessGroup,
    choose: impl FnOnce(Planned, &Device) -> Result<Settings, RunError>,
) -> Result<Settings, RunError> {
    if let Some(device) = device {
        let settings = choose(planned, device)?;
        let Planned { resolved, lacks_memory, .. } = &settings.planned;
        let values: Vec<Value> = tunable::decided().map(|field| (field.get)(&resolved.config)).collect();
        process_group.decide(|| Ok((values, *lacks_memory)))?;
        return Ok(settings);
    }
    let no_choice = || Err(RunError::Refused("a rank other than 0 does not choose".into()));
    let (values, lacks_memory): (Vec<Value>, bool) = process_group.decide(no_choice)?;
    let mut decided = tunable::decided().zip(values);
    let mut planned =
        planned.try_changed(|config| decided.try_for_each(|(field, value)| field.set(config, value)))?;
    planned.lacks_memory = lacks_memory;
    Ok(Settings { planned, report_lines: Vec::new() })
}
