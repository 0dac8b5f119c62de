//! `xtrain report`.

use crate::cli::ReportArgs;
use crate::failure::Failure;
use crate::terminal;

pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
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
