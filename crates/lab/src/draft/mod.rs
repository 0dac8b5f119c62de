//! A first run file, written for a text, for token shards or for a model: `xtrain init`.
//!
//! The model is the largest of a few sizes for which the text is long enough, and which the device trains in
//! an acceptable time for a first run. Settings that a run chooses itself (recomputation, the loss chunk) are
//! left out. The file is planned before it is written, so it is always valid.

mod chat;
mod found;
mod size;
mod text;

use chat::Length;
use found::Found;
use size::{SIZES, Size};
use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use xtrain_config::Config;
use xtrain_planner::choose;
use xtrain_planner::estimate::{Device, RunTime};
use xtrain_planner::planned::Planned;
use xtrain_report::metrics::format;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::programs;
use xtrain_train::error::RunError;
use xtrain_train::spec::plan_on;

/// A run file that is not written yet.
pub struct Draft {
    /// The TOML text.
    pub text: String,
    parameters: u64,
    run_tokens: u64,
    time: RunTime,
    owner: String,
    fits: bool,
    /// Tokens of the text.
    tokens: Option<u64>,
}

/// Time limit of a first run, in seconds; a smaller model is chosen to meet it.
const CPU_SECONDS: f64 = 3_600.0;
const GPU_SECONDS: f64 = 4.0 * 3_600.0;

impl Draft {
    /// A run file named `file` for `sources` (texts, folders of token shards, at most one model folder), on
    /// `processor` with this number of CPU threads. Without sources it is a template.
    pub fn new(
        sources: &[PathBuf],
        file: &Path,
        processor: &Processor,
        threads: usize,
    ) -> Result<Draft, RunError> {
        let found = Found::new(sources)?;
        let draft =
            |size, longest: Option<f64>| Draft::of_size(&found, size, longest, file, processor, threads);
        if found.model.is_some() {
            return draft(None, None);
        }
        let longest = if matches!(processor, Processor::Cpu) { CPU_SECONDS } else { GPU_SECONDS };
        let is_taught =
            |size: &&Size| found.tokens.is_none_or(|tokens| size.block_parameters() <= tokens / 2);
        for size in SIZES.iter().rev().filter(is_taught) {
            let draft = draft(Some(size), None)?;
            if draft.time.seconds.is_some_and(|seconds| seconds <= longest) && draft.fits {
                return Ok(draft);
            }
        }
        let [smallest, ..] = &SIZES;
        draft(Some(smallest), Some(longest))
    }

    /// The draft with a model of this size, or with the model in `found`. The run is shortened to `longest`
    /// seconds if that is given.
    fn of_size(
        found: &Found,
        size: Option<&Size>,
        longest: Option<f64>,
        file: &Path,
        processor: &Processor,
        threads: usize,
    ) -> Result<Draft, RunError> {
        let text = |tokens, length| match &found.chat {
            Some(chat) => chat::run_file(found, chat, file, tokens, length),
            None => text::run_file(found, size, file, tokens, processor),
        };
        let plan = |text: String| -> Result<Planned, RunError> {
            plan_on(&Config::parse::<&str>(file, text.as_bytes(), &[])?, processor.target())
        };
        let planned = |tokens| plan(text(tokens, Length::Planned));
        // The length of the run depends on the number of parameters, which a first plan provides.
        let first = planned(size::run_tokens(found, None))?;
        let parameters = first.spec.model.parameter_count() as u64;
        let device = Device::new(processor, first.spec.recipe, threads, 1);
        let timed = |tokens| -> Result<(Planned, RunTime), RunError> {
            let (planned, _) = choose::decide(planned(tokens)?, &device)?;
            let program = programs::training(&planned.spec).map_err(LearnError::from)?;
            let time = RunTime::estimate(&planned, &program, &device, 0)?;
            Ok((planned, time))
        };
        let mut run_tokens = size::run_tokens(found, Some(parameters));
        let (mut planned, mut time) = timed(run_tokens)?;
        if let (Some(seconds), Some(longest)) = (time.seconds, longest)
            && seconds > longest
        {
            run_tokens = size::shorter(run_tokens, longest / seconds);
            (planned, time) = timed(run_tokens)?;
        }
        let fits = !planned.lacks_memory;
        let (text, tokens) = (text(run_tokens, Length::Written), found.tokens);
        plan(text.clone())?;
        Ok(Draft { text, parameters, run_tokens, time, owner: device.name, fits, tokens })
    }

    /// Writes the draft to `file`, which must not exist.
    pub fn write(&self, file: &Path) -> Result<(), RunError> {
        let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let write = || {
            let mut temporary = tempfile::Builder::new().prefix(".xtrain-init").tempfile_in(folder)?;
            temporary.write_all(self.text.as_bytes())?;
            temporary.as_file().sync_all()?;
            temporary.persist_noclobber(file).map_err(|error| error.error)
        };
        match write() {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Err(exists(file)),
            Err(error) => Err(RunError::io(file, "write")(error)),
        }
    }
}

/// The refusal of a run file that exists.
pub fn exists(file: &Path) -> RunError {
    RunError::Refused(format!(
        "{} already exists and is not replaced; name another file with --out",
        file.display()
    ))
}

impl fmt::Display for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |n: u64| format::count(n as f64);
        write!(f, "{} parameters, trained on {} tokens", count(self.parameters), count(self.run_tokens))?;
        if let Some(tokens) = self.tokens {
            write!(f, " of a text of about {} tokens", count(tokens))?;
        }
        if let Some(seconds) = self.time.seconds {
            write!(f, ": about {} on {}", format::duration(seconds), self.owner)?;
        }
        Ok(())
    }
}
