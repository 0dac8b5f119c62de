//! The options of `xtrain tokenize`.

use super::options::Threads;
use crate::quantity::Count;
use clap::Args;
use std::path::PathBuf;
use xtrain_data::{BeginOfDocument, PrepareOptions};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain tokenize books/*.txt --tokenizer models/Qwen3-0.6B --out shards/books
  xtrain tokenize crawl.jsonl.zst --text-field content --bpe-vocab-size 32768 --out shards/crawl
A run file then names the folder: [data] train = \"shards/books\". Run the same command again to continue after a stop.")]
pub(crate) struct TokenizeArgs {
    /// Text files (.txt, .jsonl, .parquet; also .gz and .zst) or folders of them
    #[arg(required = true)]
    pub(crate) inputs: Vec<PathBuf>,
    /// The folder for the shards
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    #[command(flatten)]
    pub(crate) tokenizer: TokenizerArgs,
    /// The field of .jsonl lines and the column of .parquet files that holds the text
    #[arg(long, default_value = "text")]
    pub(crate) text_field: String,
    /// Split .txt files into documents at this string; without it each file is one document
    #[arg(long)]
    pub(crate) separator: Option<String>,
    /// Put the tokenizer's begin token before each document: auto (as the template of its file does), true or
    /// false
    #[arg(long, value_name = "CHOICE", default_value = "auto")]
    pub(crate) begin_of_document: BeginOfDocument,
    /// Tokens per shard: a number, or one of thousands (K), millions (M) or billions (G)
    #[arg(long, value_name = "TOKENS", default_value_t = Count(PrepareOptions::default().shard_tokens))]
    pub(crate) shard_tokens: Count,
    /// Read the finished shards again and compare their checksums
    #[arg(long)]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) cpu: Threads,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct TokenizerArgs {
    /// A tokenizer.json, or a folder that holds one
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Learn a byte-level BPE vocabulary of at most this size from the text
    #[arg(long, value_name = "TOKENS")]
    pub(crate) bpe_vocab_size: Option<usize>,
    /// Plain bytes
    #[arg(long)]
    pub(crate) bytes: bool,
    /// The characters that occur in the text
    #[arg(long)]
    pub(crate) chars: bool,
}
