//! `xtrain report`.

use crate::cli::ReportArgs;
use crate::failure::Failure;
use crate::terminal;
use xtrain_train::run_file;

pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    args.runs.iter().try_for_each(|run| run_file::refuse_as_run(run))?;
    let path = match (args.runs.as_slice(), &args.page.out) {
        ([run], None) => xtrain_report::write(run)?,
        (runs, Some(path)) => {
            xtrain_report::write_comparison(runs, path, args.page.overwrite)?;
            path.clone()
        }
        (_, None) => {
            return Err(Failure::user(
                "a report of several runs needs a file of its own; name it, for example --out comparison.html",
            ));
        }
    };
    terminal::print(&format!("report: {}\n", terminal::shown_path(&path))).map(|_| ())
}
