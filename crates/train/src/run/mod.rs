//! A training run, from its file to its folder.
//!
//! ```text
//! <out>/config.toml      the resolved configuration
//! <out>/tokenizer/       the tokenizer
//! <out>/texts.json       the texts, with the cache entries that hold their tokens
//! <out>/source/          metadata of the folder that init_from names
//! <out>/choices.json     the algorithms that the run chose on a GPU
//! <out>/metrics.jsonl    every reported step and event
//! <out>/events.out.*     the same for TensorBoard
//! <out>/checkpoints/     step-N/ with the state, complete or absent
//! <out>/scores/          the numbers of each row of tasks
//! <out>/hf/              the last state as a Hugging Face folder
//! <out>/sample.txt       the samples generated at the end
//! <out>/summary.json     facts about the run for the report
//! <out>/report.html      curves and figures on one page
//! <out>/command.log      the output of the program in log.command
//! <out>/trace.json       a trace of some steps, with --profile
//! ```

mod background_save;
mod begin;
mod capacity;
mod choices;
mod evaluation;
mod finish;
mod observer;
mod open;
mod prompts;
mod recorded;
mod reference;
mod reporting;
mod restore;
mod resume;
mod saturation;
mod saving;
mod settings;
mod setup;
mod snapshot;
mod steps;
mod tasks;
#[cfg(test)]
mod tests;
mod together;
mod watch;
mod wire;

pub use crate::spec::plan;
pub use observer::{Observer, Outcome, Start};

use crate::corpus::Corpus;
use crate::error::RunError;
use crate::exchange;
use crate::folder::RunFolder;
use crate::position::Position;
use crate::process_group::ProcessGroup;
use crate::profile::{ProfileOptions, Profiler};
use evaluation::Evaluation;
use open::Opened;
use reference::StateCopy;
use reporting::Reports;
use snapshot::CheckpointWriter;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use together::Together;
use watch::Watch;
use xtrain_config::{Config, Parsed};
use xtrain_data::DataError;
use xtrain_step::learner::Learner;
use xtrain_step::schedule::Schedule;

/// Runs the run file `parsed` to its end, to its time limit, or until `stop` is set.
pub fn train(
    parsed: &Parsed,
    start: Start,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    train_in(&ProcessGroup::alone(), parsed, start, None, stop, observer)
}

/// As [`train`], as one of several processes, and with a trace of some steps in `trace.json` of the run
/// folder if `profile` is given. Rank 0 alone writes files and calls `observer`, but for
/// [`Observer::notice`].
pub fn train_in(
    process_group: &ProcessGroup,
    parsed: &Parsed,
    start: Start,
    profile: Option<ProfileOptions>,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let ended = train_to_the_end(process_group, parsed, start, profile, stop, observer);
    let ended = ended.and_then(|outcome| process_group.finish().map(|()| outcome));
    ended.map_err(|error| process_group.fail(error))
}

fn train_to_the_end(
    process_group: &ProcessGroup,
    parsed: &Parsed,
    start: Start,
    profile: Option<ProfileOptions>,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Outcome, RunError> {
    let begun = Instant::now();
    let limit = parsed.config.train.max_time.map(|t| t.duration());
    let time_is_up = || limit.is_some_and(|limit| begun.elapsed() >= limit);
    let mut run = match open::open(parsed, start, process_group, observer, &time_is_up) {
        Err(RunError::Data(DataError::Interrupted)) => return Ok(Outcome::StoppedEarly),
        opened => match opened? {
            Opened::Run(run) => run,
            Opened::Finished { done, steps } => return Ok(Outcome::FinishedBefore { done, steps }),
        },
    };
    let (done, steps) = (run.position.step, run.schedule.steps());
    run.profiler = profile.map(|options| Profiler::new(options, done, steps, process_group.is_first()));
    match run.go(Watch::new(stop, begun, limit), observer) {
        // GPUs close their connection together, when the engines are dropped.
        Ok(outcome) => process_group.barrier().map(|()| outcome),
        // The others hear of the cause before that connection breaks.
        Err(error) => Err(process_group.fail(error)),
    }
}

/// An open run: `open` opens it, `steps` trains, `finish` ends it.
struct Run {
    process_group: ProcessGroup,
    config: Config,
    /// The learning rates of all steps.
    schedule: Schedule,
    position: Position,
    folder: RunFolder,
    corpus: Corpus,
    learner: Learner,
    checkpoints: CheckpointWriter,
    evaluation: Evaluation,
    reports: Reports,
    /// Metadata of the exported Hugging Face folder.
    identity: exchange::Identity,
    /// Holds the state during reference segments, if the run has any.
    state_copy: Option<StateCopy>,
    profiler: Option<Profiler>,
    together: Together,
}

impl Run {
    /// Runs the remaining steps and the end of the run.
    fn go(&mut self, mut watch: Watch<'_>, observer: &mut dyn Observer) -> Result<Outcome, RunError> {
        let ended = self.steps(&mut watch, observer);
        // A save in progress is completed, however the steps ended.
        let saved = self.settle(&mut watch, observer);
        let outcome = match (ended, saved) {
            (Ok(outcome), Ok(())) => outcome,
            (Err(error), saved) => return Err(self.failed(error, saved.err())),
            (Ok(_), Err(error)) => return Err(self.failed(error, None)),
        };
        if let Some(profiler) = &mut self.profiler {
            profiler.finish(&mut self.learner, &self.folder, &self.reports.hardware.device)?;
        }
        self.finish(outcome, &watch, observer)
    }

    /// Ends the run on all ranks, and returns the first cause. `of_save` is the error of the save in
    /// progress.
    fn failed(&mut self, error: RunError, of_save: Option<RunError>) -> RunError {
        let error = self.process_group.fail(error);
        // A rank whose run was ended by another one has no save to complete.
        if let Some(of_save) = of_save.filter(|_| !matches!(error, RunError::Ranks(_))) {
            tracing::error!("{of_save}");
        }
        self.report_error(&error);
        error
    }
}

/// True if `step` is one of every `every` steps; never if that is 0.
fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
