//! Checks, before anything is allocated, that a training step fits into memory; finds settings with which it
//! would.

mod search;
#[cfg(test)]
mod tests;
mod text;

use crate::error::PlanError;
pub use crate::memory::{needed_bytes, save_bytes};
use crate::planned::Planned;
use crate::tunable::{TUNABLE, TunedStep};
use search::Search;
pub use text::on_gpus;
use xtrain_report::metrics::format;
use xtrain_step::engine::{Processor, Room, Target};
use xtrain_step::training_spec::TrainingSpec;

/// Memory that a step needs, and memory that is available.
#[derive(Clone, Debug, PartialEq)]
pub struct Fit {
    /// Bytes of the plan, of kernel workspace outside of it, of libraries, and of the process.
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
        /// The ranks of the run.
        ranks: usize,
        /// True if it would fit if other programs released their memory.
        is_held: bool,
        /// Other models and numbers of GPUs with which it would fit.
        instead: Instead,
    },
}

/// Models and numbers of GPUs with which a run would fit if no setting is enough.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instead {
    /// Layers of the model.
    pub layers: usize,
    /// Largest number of layers that would fit, if any.
    pub fewer_layers: Option<usize>,
    /// Longest sequence that would fit, found by halving the run's, if any.
    pub seq_len: Option<usize>,
    /// The least number of GPUs of this size that would fit in the mesh as configured, with all state cut.
    pub gpus: Option<MoreGpus>,
    /// The largest number that was tried; `None` on a CPU.
    pub most_gpus: Option<usize>,
}

/// A number of GPUs among which weights, gradients and moments are divided (`parallel.shard = "weights"`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MoreGpus {
    /// The number.
    pub count: usize,
    /// The bytes that each needs.
    pub bytes: u64,
    /// The least batch that they can share, if the run's is too small.
    pub batch_size: Option<usize>,
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
    /// `target`'s memory, on this number of CPU threads.
    pub fn new(
        spec: &TrainingSpec,
        target: Target,
        threads: usize,
        batch_size: usize,
        room: Room,
    ) -> Result<Fit, PlanError> {
        let step = TunedStep { spec, batch_size };
        let mut search = Search { step, target, threads, room, needed_bytes: 0 };
        search.needed_bytes = search.bytes(spec)?;
        let needed_bytes = search.needed_bytes;
        if needed_bytes <= room.available_bytes {
            return Ok(Fit { needed_bytes, room, verdict: Verdict::Fits });
        }
        let (mut verdict, mut changed) = (Verdict::Fits, search.first_change()?);
        if changed.is_none() {
            verdict = search.verdict()?;
            if let (Verdict::Nothing { .. }, Some((optimizer, setting))) =
                (&verdict, spec.optimizer.smaller())
            {
                // The last setting changes how the model learns.
                changed = Some((TrainingSpec { optimizer, ..spec.clone() }, setting.to_owned()));
            }
        }
        if let Some((with, setting)) = changed {
            let with = Fit::new(&with, target, threads, batch_size, room)?;
            verdict = with.verdict.with_setting(&setting, with.needed_bytes);
        }
        Ok(Fit { needed_bytes, room, verdict })
    }

    /// As [`Fit::new`], for the step of `planned`. If it would fit without the memory that other programs
    /// hold, each alternative includes the chosen settings, so that `--set` does not choose them again.
    pub fn from_planned(
        planned: &Planned,
        target: Target,
        threads: usize,
        room: Room,
    ) -> Result<Fit, PlanError> {
        let mut fit =
            Fit::new(&planned.spec, target, threads, planned.resolved.config.train.batch_size, room)?;
        let chosen = planned.pinned();
        match &mut fit.verdict {
            Verdict::WouldFit(alternatives) if !planned.lacks_memory => {
                alternatives.iter_mut().for_each(|alternative| alternative.complete(&chosen));
            }
            Verdict::Nothing { least, .. } => least.complete(&chosen),
            Verdict::Fits | Verdict::WouldFit(_) => {}
        }
        Ok(fit)
    }

    /// An error if the step does not fit into the memory of `owner`.
    fn check(&self, owner: &str) -> Result<(), PlanError> {
        if self.verdict == Verdict::Fits {
            return Ok(());
        }
        Err(PlanError::Refused(format!(
            "the run needs {} of memory, but {}; {}. `xtrain plan` lists what needs it",
            format::gib(self.needed_bytes),
            self.available(owner),
            self.verdict
        )))
    }
}

/// An error if the step of `planned` does not fit into the memory that `processor` has available, as far as
/// the system tells. `processes` of the run are on this machine.
pub fn check(planned: &Planned, processor: &Processor, processes: usize) -> Result<(), PlanError> {
    match processor.room_of_each(processes) {
        Some(room) => {
            let threads = rayon::current_num_threads();
            Fit::from_planned(planned, processor.target(), threads, room)?.check(&processor.owner(processes))
        }
        None => Ok(()),
    }
}

impl Alternative {
    /// Adds those of `settings` whose keys it does not set.
    fn complete(&mut self, settings: &[String]) {
        let key = |setting: &str| setting.split('=').next().unwrap_or_default().to_owned();
        let given: Vec<String> = self.settings.iter().map(|setting| key(setting)).collect();
        self.settings.extend(settings.iter().filter(|setting| !given.contains(&key(setting))).cloned());
        // The others come first already.
        self.settings.sort_by_key(|setting| TUNABLE.iter().position(|row| row.field.key == key(setting)));
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
