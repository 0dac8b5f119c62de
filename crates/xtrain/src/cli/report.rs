//! The options of `xtrain report`.

use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain report runs/quickstart
  xtrain report runs/a runs/b --out comparison.html")]
pub(crate) struct ReportArgs {
    /// Run folders
    #[arg(required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The page to write; by default report.html in the run's folder, but several runs need it
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the file that --out names even if it is no report
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
}
