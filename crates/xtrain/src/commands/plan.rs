//! `xtrain plan`.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::{plan_table, terminal};
use xtrain_config::Config;
use xtrain_train::engine::{Processor, Room, Target};
use xtrain_train::error::LearnError;
use xtrain_train::fit::Fit;
use xtrain_train::spec::plan_on;
use xtrain_train::{programs, slower};

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let parsed = Config::load(&args.run.file, &args.run.set)?;
    // The workspace of kernels grows with the number of threads.
    terminal::use_threads(parsed.config.train.threads)?;
    // A requested GPU need not be present.
    let processor = Processor::choose(parsed.config.train.device).ok();
    let target = processor.as_ref().map_or(Target::Cuda, Processor::target);
    let planned = plan_on(&parsed, target)?;
    let planned = match &processor {
        Some(processor) => slower::decide_if_measured(planned, processor)?,
        None => planned,
    };
    if let Some(pass) = &args.dump_after {
        let program = programs::training_after(&planned.spec, pass).map_err(LearnError::from)?;
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    if args.dump {
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let reference = planned.spec.in_reference().map(|bf16| programs::training(&bf16)).transpose();
    let reference = reference.map_err(LearnError::from)?;
    let mut text = plan_table::text(&planned, &program, reference.as_ref(), target);
    if let Some(Err(refusal)) = processor.as_ref().map(|processor| processor.check(planned.spec.recipe)) {
        text.push_str(&plan_table::refused(&refusal));
    }
    let batch_size = planned.resolved.config.train.batch_size;
    let has = processor.as_ref().and_then(|processor| Some((processor.room()?, processor.owner())));
    let room = args.memory.map(|size| (Room::of(size.0), "--memory".to_owned())).or(has);
    if let Some((room, owner)) = room {
        text.push_str(&plan_table::fit(&Fit::new(&planned.spec, target, batch_size, room)?, &owner));
    }
    terminal::print(&text).map(|_| ())
}
