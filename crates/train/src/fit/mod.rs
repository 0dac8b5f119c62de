//! Check that a training step fits into memory, and settings with which it would, before anything is
//! allocated.

mod search;
#[cfg(test)]
mod tests;
mod text;

use crate::engine::{Processor, Room, Target};
use crate::error::RunError;
use crate::training_spec::TrainingSpec;
use search::Search;
use xtrain_report::metrics::format;

/// Memory that a step needs, and memory that is available.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// Bytes of the plan, of kernel workspace outside of it, and of libraries.
    pub needed_bytes: u64,
    /// Available memory.
    pub room: Room,
    /// The result.
    pub verdict: Verdict,
}

/// Result of the check.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The step fits as configured.
    Fits,
    /// The step does not fit as configured, but these alternatives do; the one that costs the least speed is
    /// first.
    WouldFit(Vec<Alternative>),
    /// No alternative fits.
    Nothing {
        /// The alternative that needs the least memory.
        least: Alternative,
        /// Bytes that no setting changes: weights, gradients, moments.
        state_bytes: u64,
        /// True if it would fit if other programs released their memory.
        is_held: bool,
    },
}

/// Settings that need less memory, and how much they need.
#[derive(Clone, Debug, PartialEq)]
pub struct Alternative {
    /// The settings, as `--set` takes them: `train.recompute=norms`. The global batch does not change.
    pub settings: Vec<String>,
    /// Bytes that the step needs with them.
    pub bytes: u64,
}

impl Fit {
    /// Checks the step of `spec`, with a global batch of `batch_size` sequences, against the `room` in a
    /// `target`'s memory.
    pub fn new(spec: &TrainingSpec, target: Target, batch_size: usize, room: Room) -> Result<Fit, RunError> {
        let mut search = Search { spec, target, batch_size, room, needed_bytes: 0 };
        search.needed_bytes = search.bytes(spec)?;
        let needed_bytes = search.needed_bytes;
        let verdict = match needed_bytes <= room.available_bytes {
            true => Verdict::Fits,
            // Give up first what does not affect learning.
            false if spec.reference => {
                let without = TrainingSpec { reference: false, ..spec.clone() };
                let Fit { needed_bytes, verdict, .. } = Fit::new(&without, target, batch_size, room)?;
                verdict.with_setting("precision.reference_every=0", needed_bytes)
            }
            false => match search.verdict()? {
                nothing @ Verdict::Nothing { .. } => match spec.optimizer.smaller() {
                    // The last setting changes how the model learns.
                    Some((optimizer, setting)) => {
                        let with = TrainingSpec { optimizer, ..spec.clone() };
                        let Fit { needed_bytes, verdict, .. } = Fit::new(&with, target, batch_size, room)?;
                        verdict.with_setting(setting, needed_bytes)
                    }
                    None => nothing,
                },
                verdict => verdict,
            },
        };
        Ok(Fit { needed_bytes, room, verdict })
    }

    /// An error if the step does not fit into the memory of `owner`.
    fn check(&self, owner: &str) -> Result<(), RunError> {
        if self.verdict == Verdict::Fits {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "the run needs {} of memory, but {}; {}. `xtrain plan` shows what it is for",
            format::gib(self.needed_bytes),
            self.available(owner),
            self.verdict
        )))
    }
}

/// An error if the step of `spec` does not fit into the available memory of `processor`, if the system
/// reports it.
pub fn check(spec: &TrainingSpec, batch_size: usize, processor: &Processor) -> Result<(), RunError> {
    match processor.room() {
        Some(room) => Fit::new(spec, processor.target(), batch_size, room)?.check(&processor.owner()),
        None => Ok(()),
    }
}

impl Verdict {
    /// The verdict after `setting` was changed; the step then needs `bytes`.
    fn with_setting(mut self, setting: &str, bytes: u64) -> Self {
        let add = |alternative: &mut Alternative| alternative.settings.insert(0, setting.to_owned());
        match &mut self {
            Verdict::Fits => {
                return Verdict::WouldFit(vec![Alternative { settings: vec![setting.to_owned()], bytes }]);
            }
            Verdict::WouldFit(alternatives) => alternatives.iter_mut().for_each(add),
            Verdict::Nothing { least, .. } => add(least),
        }
        self
    }
}
