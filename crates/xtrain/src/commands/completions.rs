//! `xtrain completions`.

use crate::cli::{Cli, CompletionsArgs};
use crate::failure::Failure;
use crate::terminal;

pub(crate) fn run(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::whole(), "xtrain", &mut script);
    terminal::print(&String::from_utf8_lossy(&script)).map(|_| ())
}
