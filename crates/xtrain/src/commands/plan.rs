//! `xtrain plan`.

use crate::cli::PlanArgs;
use crate::failure::Failure;
use crate::{plan_table, terminal};
use xtrain_train::config::Config;
use xtrain_train::run::plan;
use xtrain_train::weights::LearnError;
use xtrain_train::{engine, programs};

pub(crate) fn run(args: &PlanArgs) -> Result<(), Failure> {
    let parsed = Config::load(&args.run.file, &args.run.set)?;
    // What kernels work in grows with the threads of the run.
    terminal::use_threads(parsed.config.train.threads)?;
    let planned = plan(&parsed)?;
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    if args.dump {
        return terminal::print(&program.to_string()).map(|_| ());
    }
    let (plan, work) = (engine::plan(&program), engine::work_bytes(&program));
    terminal::print(&plan_table::text(&planned, &program, &plan, work)).map(|_| ())
}
