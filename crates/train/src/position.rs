//! The position of a run, and everything else in a checkpoint besides the state.

use crate::error::RunError;
use crate::folder::RunFolder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use xtrain_checkpoint::{Checkpoint, CheckpointStore};
use xtrain_config::{Config, PrecisionConfig};
use xtrain_data::{Loader, LoaderState};
use xtrain_evaluation::loss::{SourceTally, Tally};
use xtrain_report::metrics::ReferenceGap;
use xtrain_step::divergence::Divergence;

/// Progress of a run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Position {
    /// Attempted steps.
    pub step: u64,
    /// Attempted steps whose update was skipped.
    pub skipped: u64,
    /// Casts at static scales that saturated: each tensor counts once in each step.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub saturated: u64,
    /// Wall time in training steps.
    pub train_seconds: f64,
    /// Step and loss, or score on the task of `checkpoint.best`, of the best evaluation whose state was
    /// saved.
    pub best: Option<(u64, f64)>,
    /// The evaluation after this step, if the run was stopped during it.
    #[serde(default)]
    pub evaluation: Option<Tally>,
    /// True if the weights before the first step were evaluated.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evaluated_initial: bool,
    /// True if tasks are still to be scored after this step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tasks_due: bool,
    /// Hashes of the tasks that the run scores, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub task_hashes: BTreeMap<String, String>,
    /// Hash of the model under the adapters, if it trains some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The reference segment in progress.
    #[serde(default)]
    pub reference: Option<Segment>,
    /// Unigram entropy of the evaluated targets in nats, once there was an evaluation.
    #[serde(default)]
    pub unigram_entropy: Option<f64>,
    /// Signs that the run diverges.
    #[serde(default)]
    pub divergence: Divergence,
    /// Losses of each source of a mixture in the steps since they were reported.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trained: Vec<SourceTally>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// A reference segment whose bf16 steps are done, while the run's own steps are not.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Segment {
    /// Number of the run's steps before the segment.
    pub(crate) after: u64,
    /// Number of its steps.
    pub(crate) steps: u64,
    /// Sum of their losses in bf16; `None` if it is not finite, which JSON cannot hold.
    pub(crate) bf16_sum: Option<f64>,
    /// Sum of the losses of the run's own steps that are done; `None` if it is not finite.
    pub(crate) sum: Option<f64>,
}

impl Segment {
    /// Adds the loss of a step of the run; returns the result with the last step.
    pub(crate) fn add(&mut self, step: u64, loss: f64) -> Option<ReferenceGap> {
        self.sum = added(self.sum, loss);
        let mean = |sum: Option<f64>| sum.map_or(f64::NAN, |sum| sum / self.steps as f64);
        (step == self.after + self.steps).then(|| ReferenceGap {
            step,
            steps: self.steps,
            loss: mean(self.sum),
            bf16_loss: mean(self.bf16_sum),
        })
    }
}

pub(crate) fn added(sum: Option<f64>, loss: f64) -> Option<f64> {
    sum.map(|sum| sum + loss).filter(|sum| sum.is_finite())
}

pub(crate) const POSITION: &str = "position";
pub(crate) const LOADER: &str = "loader";
pub(crate) const CONFIG: &str = "config";
/// Static scales as a text ([`crate::static_scales`]).
pub(crate) const STATIC_SCALES: &str = "static_scales";

/// State of the loader in a checkpoint.
pub(crate) fn loader_state(checkpoint: &Checkpoint) -> Result<LoaderState, RunError> {
    document(checkpoint, LOADER)
}

/// The latest checkpoint of the run in `folder`. Does not warn about incomplete ones; a resume does.
pub(crate) fn newest(folder: &RunFolder) -> Result<Option<Checkpoint>, RunError> {
    let store = CheckpointStore::open(&folder.checkpoints())?;
    Ok(store.steps()?.pop().map(|step| store.checkpoint(step)).transpose()?)
}

/// The configuration of whose precision and chosen settings a resumed run in `folder` keeps what it is not
/// given: that of its latest checkpoint. After a killed process, the folder's configuration may be older or
/// newer than the checkpoint.
pub(crate) fn config(folder: &RunFolder) -> Result<Config, RunError> {
    match newest(folder)? {
        Some(checkpoint) => config_of(&checkpoint),
        None => Ok(Config::load::<&str>(&folder.config(), &[])?.config),
    }
}

/// The precision in which the steps before a checkpoint were computed.
pub fn precision_of(checkpoint: &Checkpoint) -> Result<PrecisionConfig, RunError> {
    Ok(config_of(checkpoint)?.precision)
}

pub(crate) fn config_of(checkpoint: &Checkpoint) -> Result<Config, RunError> {
    let text = document::<String>(checkpoint, CONFIG)?;
    let path = checkpoint.path().join("config.json");
    Ok(Config::parse::<&str>(&path, text.as_bytes(), &[])?.config)
}

/// Progress of the run in `folder` by its latest complete checkpoint, if there is one.
pub(crate) fn position(folder: &RunFolder) -> Result<Option<Position>, RunError> {
    newest(folder)?.map(|checkpoint| document(&checkpoint, POSITION)).transpose()
}

/// Number of the first sample that the step after a checkpoint reads, by the state of its loader.
pub fn next_sample(checkpoint: &Checkpoint, loader: &Loader) -> Result<u64, RunError> {
    Ok(loader.resume(&document::<LoaderState>(checkpoint, LOADER)?)?)
}

/// Step and loss of the best checkpoint, as recorded in `checkpoint`, which is a later checkpoint of the same
/// run.
pub(crate) fn best(checkpoint: &Checkpoint) -> Result<Option<(u64, f64)>, RunError> {
    Ok(document::<Position>(checkpoint, POSITION)?.best)
}

pub(crate) fn document<T: serde::de::DeserializeOwned>(
    checkpoint: &Checkpoint,
    name: &str,
) -> Result<T, RunError> {
    serde_json::from_value(checkpoint.document(name)?).map_err(|error| {
        RunError::Refused(format!(
            "{}: {name}.json cannot be understood ({error}); it was written by another version, or damaged: delete this checkpoint to use the one before",
            checkpoint.path().display()
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_from_before_signs_of_divergence_were_saved_loads_without_them() {
        let saved = serde_json::json!({ "step": 7, "skipped": 1, "train_seconds": 2.5, "best": [5, 3.25] });
        let position: Position = serde_json::from_value(saved).expect("a position");
        let expected = Position {
            step: 7,
            skipped: 1,
            train_seconds: 2.5,
            best: Some((5, 3.25)),
            ..Position::default()
        };
        assert_eq!(position, expected);
    }
}
