//! The options of `xtrain doctor`.

use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain doctor
  xtrain doctor --json
The exit code is 0 if training works on the device that train.device = \"auto\" selects, GPU or CPU.")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}
