//! The options of `xtrain merge`.

use super::options::{CheckpointArgs, FolderArgs, Threads};
use super::values::named;
use clap::Args;
use std::path::PathBuf;
use xtrain_checkpoint::hf::ExportDtype;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain merge runs/lora --out models/tuned
  xtrain merge adapters/chat --base models/Llama-3.2-1B --out models/chat --dtype bf16")]
pub(crate) struct MergeArgs {
    /// A run with adapters, or a folder of adapters of PEFT's form
    pub(crate) adapter: PathBuf,
    #[command(flatten)]
    pub(crate) checkpoint: CheckpointArgs,
    /// The folder of the model beside which the adapters were trained; by default the one that the run or the
    /// description of the adapters names
    #[arg(long, value_name = "FOLDER")]
    pub(crate) base: Option<PathBuf>,
    /// Element type of the weights; by default the smallest that holds those of the model exactly, or bf16 if
    /// they are fp8
    #[arg(long, value_parser = named(&ExportDtype::ALL, ExportDtype::name))]
    pub(crate) dtype: Option<ExportDtype>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
    #[command(flatten)]
    pub(crate) cpu: Threads,
}
