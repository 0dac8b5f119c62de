//! `summary.json`: facts about a run that the trainer knows and the metrics do not contain.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{ReportError, SUMMARY_FILE, write_whole};
use crate::metrics::format;

/// Facts about a run, each of them optional. Unknown fields are ignored, so that reports of older and newer
/// runs work.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RunSummary {
    /// The model in a few words, such as `qwen3, 4 layers, dim 128`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Trained parameters, each counted once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// The precision recipe's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Device, such as `CPU, 2 threads` or `NVIDIA H200`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Steps that the run file requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,
    /// Wall time spent in training steps, in seconds, over all parts of a resumed run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_seconds: Option<f64>,
    /// Entropy of the frequencies of the tokens that evaluations predict, in nats: the loss of a model that
    /// ignores context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unigram_entropy: Option<f64>,
    /// The step of the checkpoint with the lowest validation loss.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_step: Option<u64>,
    /// Loss of the best checkpoint, in nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_loss: Option<f64>,
    /// End of the run, such as `finished` or `stopped at the time limit`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
}

/// Beginning of the outcome of a run under way.
const RUNNING: &str = "running, ";

impl RunSummary {
    /// The outcome of a run that goes on after `step` of `total_steps`.
    pub fn running(step: u64, total_steps: u64) -> String {
        format!("{RUNNING}step {} of {}", format::grouped(step), format::grouped(total_steps))
    }

    /// True if the run was under way.
    pub(super) fn is_running(&self) -> bool {
        self.outcome.as_ref().is_some_and(|outcome| outcome.starts_with(RUNNING))
    }

    /// Writes the summary to `summary.json` in `run_folder`, in place of an older one.
    pub fn write(&self, run_folder: &Path) -> Result<(), ReportError> {
        let text = serde_json::to_string_pretty(self).expect("strings and numbers are always JSON");
        write_whole(&run_folder.join(SUMMARY_FILE), &(text + "\n"))
    }
}
