//! `xtrain train`.

use crate::cli::TrainArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Detail, TrainingView};
use xtrain_config::Override;
use xtrain_train::profile::ProfileOptions;
use xtrain_train::run::{Outcome, Start, train_profiled};
use xtrain_train::run_file;

pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    let mut overrides: Vec<Override> = args.run.set.iter().map(|set| Override::Set(set.clone())).collect();
    let options = [("--max-time", "train.max_time", &args.max_time), ("--out", "train.out", &args.out)];
    for (option, key, given) in options {
        overrides.extend(given.iter().map(|text| Override::Text { option, key, text: text.clone() }));
    }
    overrides.extend(args.threads.map(|threads| Override::Set(format!("train.threads={threads}"))));
    let parsed = run_file::load(&args.run.file, &overrides)?;
    terminal::use_threads(parsed.config.train.threads)?;
    let Stop(stop) = Stop::on_signals()?;
    let start = if args.resume { Start::Resume } else { Start::New };
    let detail = match (args.quiet, args.verbose) {
        (true, _) => Detail::Quiet,
        (_, true) => Detail::Whole,
        _ => Detail::Given,
    };
    let mut view = TrainingView::new(stop.clone(), detail, &parsed.config);
    let profile =
        args.profile.then_some(ProfileOptions { steps: args.profile_steps, from: args.profile_from });
    let said = match train_profiled(&parsed, start, profile, &stop, &mut view)? {
        Outcome::Finished => return Ok(()),
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
        Outcome::Stopped => "stopped; the state is saved, continue with --resume".to_owned(),
        Outcome::TimeLimit => "time is up; the state is saved, continue with --resume".to_owned(),
        Outcome::StoppedEarly => {
            "stopped before the first step of this run; the tokens prepared so far are cached, run the same command again".to_owned()
        }
    };
    if args.quiet {
        return Ok(());
    }
    terminal::print(&format!("{said}\n")).map(|_| ())
}
