//! `xtrain train`.

use crate::cli::TrainArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, TrainingView};
use xtrain_train::config::{Config, Override};
use xtrain_train::run::{Outcome, Start, train};

pub(crate) fn run(args: &TrainArgs) -> Result<(), Failure> {
    let mut overrides: Vec<Override> = args.run.set.iter().map(|set| Override::Set(set.clone())).collect();
    let options = [("--max-time", "train.max_time", &args.max_time), ("--out", "train.out", &args.out)];
    for (option, key, given) in options {
        overrides.extend(given.iter().map(|text| Override::Text { option, key, text: text.clone() }));
    }
    let parsed = Config::load(&args.run.file, &overrides)?;
    terminal::use_threads(parsed.config.train.threads)?;
    let Stop(stop) = Stop::on_signals()?;
    let start = if args.resume { Start::Resume } else { Start::New };
    let mut view = TrainingView::new(stop.clone());
    let said = match train(&parsed, start, &stop, &mut view)? {
        Outcome::Finished => return Ok(()),
        Outcome::Stopped => "stopped; the state is saved, go on with --resume\n",
        Outcome::TimeLimit => "time is up; the state is saved, go on with --resume\n",
        Outcome::StoppedEarly => {
            "stopped before the first step of this run; what is made of its texts is kept, run the same command again\n"
        }
    };
    terminal::print(said).map(|_| ())
}
