//! How rank 0 chooses the settings that a run file leaves open.

use super::setup::Setup;
use crate::error::RunError;
use crate::position;
use xtrain_planner::choose::{self, Choice};
use xtrain_planner::describe::{
    warn_of_distant_ranks, warn_of_few_micro_batches, warn_of_no_fp8, warn_of_open_micro_batch,
    warn_of_parts_in_bf16,
};
use xtrain_planner::estimate::{Device, RunTime};
use xtrain_planner::planned::Planned;
use xtrain_planner::{fit, fp8_skip};
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::programs;

/// A plan whose settings are chosen, and lines that report the choice.
pub(super) struct Settings {
    pub(super) planned: Planned,
    pub(super) report_lines: Vec<String>,
}

impl Setup<'_> {
    /// The plan with the settings that rank 0, which alone knows its `device`, chooses for all ranks.
    ///
    /// # Errors
    /// The run does not fit into the memory of a rank.
    pub(super) fn settings(
        &self,
        planned: Planned,
        device: Option<&Device>,
        processor: &Processor,
    ) -> Result<Settings, RunError> {
        let no_device = || RunError::Refused("rank 0 has no device to choose for".into());
        let choose = |planned| self.choose(planned, device.ok_or_else(no_device)?, processor);
        let (planned, report_lines) = self.process_group.settings(planned, processor, choose)?;
        Ok(Settings { planned, report_lines: report_lines.unwrap_or_default() })
    }

    /// Chooses on rank 0, and warns of a recipe that leaves everything in bf16. A resumed run keeps what it
    /// began with, unless it is asked for something else.
    fn choose(
        &self,
        planned: Planned,
        device: &Device,
        processor: &Processor,
    ) -> Result<(Planned, Vec<String>), RunError> {
        let (planned, choice) = match &self.before {
            None => choose::decide(planned, device)?,
            Some(before) => {
                choose::decide_for_resumed(planned, before, |key| self.parsed.is_argument(key), device)?
            }
        };
        let is_kept = self.before.is_some() && choice.is_none() && !planned.chosen.is_empty();
        let planned = match &self.before {
            None => fp8_skip::decide(planned, processor)?,
            Some(before) => fp8_skip::decide_for_resumed(planned, &before.precision, processor)?,
        };
        warn_of_no_fp8(&planned.spec);
        warn_of_parts_in_bf16(&planned.spec);
        warn_of_distant_ranks(&planned.spec, &device.network);
        warn_of_few_micro_batches(&planned);
        warn_of_open_micro_batch(&self.parsed.config, &planned);
        let fits = fit::check(&planned, processor, self.process_group.processes_here());
        fits.map_err(RunError::from).map_err(|error| if is_kept { choosing_again(error) } else { error })?;
        let position = self.resumed().map(position::position).transpose()?.flatten();
        let report_lines = report_lines(&planned, choice, device, position.map_or(0, |at| at.step))?;
        Ok((planned, report_lines))
    }
}

/// The remaining time of the run `planned` after `done` steps.
pub(super) fn run_time(planned: &Planned, device: &Device, done: u64) -> Result<RunTime, RunError> {
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    Ok(RunTime::estimate(planned, &program, device, done)?)
}

/// Lines that report the choice and the remaining time after `done` steps.
fn report_lines(
    planned: &Planned,
    choice: Option<Choice>,
    device: &Device,
    done: u64,
) -> Result<Vec<String>, RunError> {
    let choice = choice.filter(|choice| !choice.is_usual());
    let mut lines: Vec<String> = choice.iter().map(|choice| format!("chosen: {choice}")).collect();
    if planned.resolved.steps.is_none_or(|steps| steps > done) {
        lines.push(format!("the run takes {}", run_time(planned, device, done)?));
    }
    Ok(lines)
}

/// Advice for a run that does not fit with the settings chosen when it began.
fn choosing_again(error: RunError) -> RunError {
    match error {
        RunError::Refused(why) => RunError::Refused(format!(
            "{why}; the run keeps the settings that were chosen when it began: --set train.recompute=auto chooses again"
        )),
        other => other,
    }
}
