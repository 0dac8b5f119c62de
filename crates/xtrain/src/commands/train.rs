//! `xtrain train`.

use crate::cli::TrainArgs;
use crate::failure::Failure;
use crate::ranks::{self, Place};
use crate::signals::Stop;
use crate::terminal::{self, Detail, Silent, TrainingView};
use std::process::ExitCode;
use xtrain_config::{Override, Parsed};
use xtrain_data::shell_path;
use xtrain_train::error::RunError;
use xtrain_train::profile::ProfileOptions;
use xtrain_train::run::{Observer, Outcome, Start, train_in};
use xtrain_train::run_file;

pub(crate) fn run(args: &TrainArgs, place: &Place) -> Result<ExitCode, Failure> {
    let mut overrides: Vec<Override> = args.run.set.iter().map(|set| Override::Set(set.clone())).collect();
    let options = [("--max-time", "train.max_time", &args.max_time), ("--out", "train.out", &args.out)];
    for (option, key, given) in options {
        overrides.extend(given.iter().map(|text| Override::Text { option, key, text: text.clone() }));
    }
    overrides.extend(args.threads.map(|threads| Override::Set(format!("train.threads={threads}"))));
    overrides.extend(args.processes.device(&args.run.set)?);
    let parsed = match args.resume {
        true => run_file::load_to_resume(&args.run.file, &overrides)?,
        false => run_file::load(&args.run.file, &overrides)?,
    };
    if let Some(count) = place.launches(&args.processes)? {
        parsed.check_shared(count)?;
        return ranks::launch_run(count, &parsed);
    }
    terminal::use_share_of_threads(parsed.config.train.threads, place.local_world_size())?;
    let process_group = place.join(&parsed.config.parallel, run_file::folder(&parsed).path())?;
    let stop = if place.is_first() { Stop::on_signals() } else { Stop::on_signals_silently() };
    let Stop(stop) = stop.map_err(|failure| process_group.fail(RunError::Refused(failure.to_string())))?;
    let start = if args.resume { Start::Resume } else { Start::New };
    let mut view: Box<dyn Observer> = match place.is_first() {
        true => Box::new(TrainingView::new(stop.clone(), detail(args), &parsed.config)),
        false => Box::new(Silent(stop.clone())),
    };
    let profile =
        args.profile.then_some(ProfileOptions { steps: args.profile_steps, from: args.profile_from });
    let said = match train_in(&process_group, &parsed, start, profile, &stop, view.as_mut())? {
        Outcome::Finished => return Ok(ExitCode::SUCCESS),
        Outcome::FinishedBefore { done, steps } => {
            let length = &parsed.config.train;
            let key = match (length.tokens, length.epochs) {
                (Some(_), _) => "tokens",
                (_, Some(_)) => "epochs",
                _ => "steps",
            };
            let steps = if done > steps { format!("{done} steps, of which {steps} were requested") } else { format!("{done} of {steps} steps") };
            format!("already finished: {steps}; continue with --set train.{key}=...")
        }
        Outcome::Stopped => format!("{}stopped; {SAVED}", export_of(&parsed)),
        Outcome::TimeLimit => format!("{}time is up; {SAVED}", export_of(&parsed)),
        Outcome::StoppedEarly => {
            "stopped before the first step of this run; the tokens prepared so far are cached, run the same command again".to_owned()
        }
    };
    if !args.quiet && place.is_first() {
        let _ = terminal::print(&format!("{said}\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The verbosity that the options ask for.
pub(crate) fn detail(args: &TrainArgs) -> Detail {
    match (args.quiet, args.verbose) {
        (true, _) => Detail::Quiet,
        (_, true) => Detail::Whole,
        _ => Detail::Given,
    }
}

/// End of the last line of a run that was stopped.
const SAVED: &str = "the state is saved, continue with --resume";

/// The line that says of which step the export of a stopped run is; empty for a run that exports nothing.
fn export_of(parsed: &Parsed) -> String {
    if !parsed.config.checkpoint.export_hf {
        return String::new();
    }
    let folder = run_file::folder(parsed);
    let (run, hf) = (shell_path(folder.path()), terminal::shown_path(&folder.hf()));
    let stands = match (folder.exported_step(), folder.hf().is_dir()) {
        (Some(step), _) => format!("{hf} is that of step {step}"),
        (None, true) => format!("{hf} is that of an earlier step"),
        (None, false) => "not written yet, because the run is not at its end".to_owned(),
    };
    format!("Hugging Face folder: {stands}; xtrain export {run} --out FOLDER writes one of the saved state\n")
}
