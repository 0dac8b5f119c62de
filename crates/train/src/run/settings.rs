//! The settings that rank 0 chooses for all ranks.

use crate::error::RunError;
use crate::process_group::ProcessGroup;
use serde::{Deserialize, Serialize};
use xtrain_config::{OrAuto, Recompute, Slower};
use xtrain_planner::estimate::Device;
use xtrain_planner::planned::Planned;

/// A plan whose settings are chosen, and lines that report the choice.
pub(super) struct Settings {
    pub(super) planned: Planned,
    pub(super) report_lines: Vec<String>,
}

/// The values that were chosen.
#[derive(Serialize, Deserialize)]
struct Chosen {
    recompute: Recompute,
    recompute_blocks: Option<OrAuto>,
    loss_chunk: OrAuto,
    micro_batch_size: Option<OrAuto>,
    skip_slower: Option<Vec<Slower>>,
    lacks_memory: bool,
}

/// The plan with the settings that `choose` chooses on rank 0, which alone knows its `device`.
pub(super) fn agree(
    planned: Planned,
    device: Option<&Device>,
    crew: &ProcessGroup,
    choose: impl FnOnce(Planned, &Device) -> Result<Settings, RunError>,
) -> Result<Settings, RunError> {
    if let Some(device) = device {
        let settings = choose(planned, device)?;
        crew.decide(|| Ok(Chosen::of(&settings.planned)))?;
        return Ok(settings);
    }
    let no_choice = || Err(RunError::Refused("a rank other than 0 does not choose".into()));
    let Chosen { recompute, recompute_blocks, loss_chunk, micro_batch_size, skip_slower, lacks_memory } =
        crew.decide(no_choice)?;
    let mut planned = planned.changed(|config| {
        let train = &mut config.train;
        (train.recompute, train.recompute_blocks) = (recompute, recompute_blocks);
        (train.loss_chunk, train.micro_batch_size) = (loss_chunk, micro_batch_size);
        config.precision.skip_slower = skip_slower;
    })?;
    planned.lacks_memory = lacks_memory;
    Ok(Settings { planned, report_lines: Vec::new() })
}

impl Chosen {
    fn of(planned: &Planned) -> Chosen {
        let config = &planned.resolved.config;
        Chosen {
            recompute: config.train.recompute,
            recompute_blocks: config.train.recompute_blocks,
            loss_chunk: config.train.loss_chunk,
            micro_batch_size: config.train.micro_batch_size,
            skip_slower: config.precision.skip_slower.clone(),
            lacks_memory: planned.lacks_memory,
        }
    }
}
