//! `xtrain plan`.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::{plan_table, terminal};
use xtrain_train::config::Config;
use xtrain_train::engine::Target;
use xtrain_train::programs;
use xtrain_train::run::plan;
use xtrain_train::weights::LearnError;

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let parsed = Config::load(&args.run.file, &args.run.set)?;
    let planned = plan(&parsed)?;
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    if args.dump {
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let target = Target::of(planned.resolved.config.train.device);
    terminal::print(&plan_table::text(&planned, &program, &target.plan(&program))).map(|_| ())
}
