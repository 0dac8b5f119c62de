//! The options of `xtrain init`.

use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain init books.txt
  xtrain init data/crawl --out crawl.toml
  xtrain init models/Qwen3-0.6B my-text.jsonl
  xtrain init
Next: xtrain plan run.toml, then xtrain train run.toml.")]
pub(crate) struct InitArgs {
    /// Text to train on (.txt, .jsonl, .parquet; also .gz and .zst), folders of text, patterns in quotes, or
    /// a folder of token shards. A Hugging Face folder is a model to train further. Without arguments, write
    /// a template
    #[arg(value_name = "TEXT|MODEL")]
    pub(crate) sources: Vec<PathBuf>,
    /// The run file to write; an existing one is never replaced
    #[arg(long, short, value_name = "FILE", default_value = "run.toml")]
    pub(crate) out: PathBuf,
}
