//! The options of `xtrain export`.

use super::options::{FolderArgs, ModelArgs};
use super::values::named;
use clap::Args;
use xtrain_checkpoint::hf::ExportDtype;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain export runs/quickstart --out models/quickstart --dtype bf16
  xtrain export runs/llama1b --out models/llama1b-fp8 --dtype fp8")]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Element type of the weights; by default as in the run's own export, or the smallest that holds a
    /// Hugging Face folder's weights exactly. fp8 is E4M3 with a scale for each block of 128 x 128, like
    /// DeepSeek-V3, for linear layers of the blocks whose sizes are multiples of 128; other weights are bf16.
    /// Adapters are fp32
    #[arg(long, value_parser = named(&ExportDtype::ALL, ExportDtype::name))]
    pub(crate) dtype: Option<ExportDtype>,
    #[command(flatten)]
    pub(crate) folder: FolderArgs,
}
