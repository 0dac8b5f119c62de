//! The options of `xtrain report`.

use super::options::PageArgs;
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain report runs/quickstart
  xtrain report runs/a runs/b --out comparison.html")]
#[command(mut_arg("out", |out| out.help("The page to write; by default report.html in the run's folder. Required for several runs")))]
#[command(mut_arg("overwrite", |overwrite| overwrite.help("Replace the file that --out names even if it is not a report")))]
pub(crate) struct ReportArgs {
    /// Run folders
    #[arg(required = true)]
    pub(crate) runs: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) page: PageArgs,
}
