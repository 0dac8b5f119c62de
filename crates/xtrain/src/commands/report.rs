//! `xtrain report`.

use crate::cli::ReportArgs;
use crate::failure::Failure;
use crate::terminal;
use std::path::PathBuf;
use xtrain_train::report;

pub(crate) fn run(args: &ReportArgs) -> Result<(), Failure> {
    let path = match (args.runs.as_slice(), &args.out) {
        ([run], None) => report::write(run)?,
        (runs, out) => {
            let path = out.clone().unwrap_or_else(|| PathBuf::from("report.html"));
            report::write_comparison(runs, &path)?;
            path
        }
    };
    terminal::print(&format!("report: {}\n", path.display())).map(|_| ())
}
