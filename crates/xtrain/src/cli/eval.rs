//! The options of `xtrain eval`.

use super::options::{ModelArgs, OnDevice, Processes};
use super::values::{named, split, tokens, whole};
use clap::Args;
use std::path::PathBuf;
use xtrain_data::Take;
use xtrain_model::Recipe;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain eval runs/quickstart
  xtrain eval runs/quickstart --precision bf16 --precision fp8-block
  xtrain eval models/Qwen3-0.6B --data wiki.jsonl --seq-len 2048
  xtrain eval models/Qwen3-0.6B --task arc_easy.toml --precision bf16 --precision fp8-row
  xtrain eval runs/quickstart --task names.jsonl --every-checkpoint")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) on: OnDevice,
    #[command(flatten)]
    pub(crate) processes: Processes,
    /// Compute in this precision; by default the run's own, and fp32 for a Hugging Face folder. May be
    /// repeated; each loss is then compared with the first
    #[arg(long, value_parser = named(&Recipe::ALL, Recipe::name))]
    pub(crate) precision: Vec<Recipe>,
    /// Text (.txt, .jsonl, .parquet, .gz, .zst), a folder of it or a pattern ('data/*.txt'), or a folder of
    /// token shards; by default the validation data of the run
    #[arg(long)]
    pub(crate) data: Vec<PathBuf>,
    /// Score this task instead of text: a .toml file, rows of JSON (.jsonl), a task.json of BIG-bench, or
    /// samples_*.jsonl of lm-eval. May be repeated
    #[arg(long, value_name = "FILE", conflicts_with = "data")]
    pub(crate) task: Vec<PathBuf>,
    /// Score only so many rows of each task, the first ones
    #[arg(long, requires = "task", conflicts_with = "data", value_name = "ROWS", value_parser = whole::<u64>(1..=u64::MAX))]
    pub(crate) limit: Option<u64>,
    /// Write the numbers of each row in this folder; by default `scores` in the folder of a run. Scores that
    /// are there are not computed again, and an interrupted evaluation continues
    #[arg(long, requires = "task", conflicts_with = "data", value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
    /// Score all checkpoints of the run
    #[arg(long, requires = "task", conflicts_with_all = ["step", "best", "data"])]
    pub(crate) every_checkpoint: bool,
    /// Compute scores again that are there
    #[arg(long, requires = "task", conflicts_with = "data")]
    pub(crate) again: bool,
    /// Tokens of context; by default those of the run, and for a Hugging Face folder 1024, or the model's
    /// limit if that is less
    #[arg(long, requires = "data", conflicts_with = "task", value_parser = tokens(1..=1 << 24))]
    pub(crate) seq_len: Option<usize>,
    /// Keep attention within documents; by default as in the run, and false for a Hugging Face folder
    #[arg(long, requires = "data", conflicts_with = "task", value_name = "true|false")]
    pub(crate) document_mask: Option<bool>,
    /// Sequences evaluated at once
    #[arg(long, conflicts_with = "task", default_value_t = 8, value_parser = whole::<u16>(1..=65_535))]
    pub(crate) batch_size: u16,
    /// The field of .jsonl lines and the column of .parquet files that holds the text
    #[arg(long, requires = "data", conflicts_with = "task", default_value = "text")]
    pub(crate) text_field: String,
    /// Read this split of --data, by the names of files and folders; by default the validation split of
    /// folders and patterns with several
    #[arg(long, requires = "data", conflicts_with = "task", value_parser = split())]
    pub(crate) split: Option<Take>,
    /// Skip up to this many rows that are not JSON or have no text
    #[arg(long, requires = "data", conflicts_with = "task", value_name = "ROWS", default_value_t = 0)]
    pub(crate) skip_bad_rows: u64,
    /// Split .txt files into documents at this string
    #[arg(long, requires = "data", conflicts_with = "task")]
    pub(crate) separator: Option<String>,
    /// Keep the tokens of the text in this folder for the next time; by default they are deleted
    #[arg(long, requires = "data", conflicts_with = "task", value_name = "FOLDER")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Print a JSON object for each precision, and of tasks for each task and checkpoint, instead of text;
    /// several tasks also have a line with their centred_mean
    #[arg(long)]
    pub(crate) json: bool,
}
