//! The options of `xtrain tokenize`.

use super::options::{TemplateArgs, Threads};
use super::values::{named, share, split, tokens};
use clap::Args;
use std::path::PathBuf;
use xtrain_chat::TrainOn;
use xtrain_config::Count;
use xtrain_data::{BeginOfDocument, ChatOptions, PrepareOptions, Take};

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain tokenize books/*.txt --tokenizer models/Qwen3-0.6B --out shards/books
  xtrain tokenize crawl.jsonl.zst --text-field content --bpe-vocab-size 32Ki --out shards/crawl
  xtrain tokenize chats.jsonl --tokenizer models/Qwen3-0.6B --show 3
  xtrain tokenize --verify shards/crawl
Give one of --tokenizer, --bpe-vocab-size, --bytes and --chars, except to verify existing shards.
After a stop, run the same command again to continue. A run file names the folder:
[data] train = \"shards/books\".")]
pub(crate) struct TokenizeArgs {
    /// Text files (.txt, .jsonl, .json, .parquet; also .gz and .zst), folders of them, or patterns in quotes:
    /// *, ?, [ab] and {a,b} match within a name, ** matches any number of folders. With --verify and no
    /// --out: folders of token shards to verify
    #[arg(required = true)]
    pub(crate) inputs: Vec<PathBuf>,
    /// Folder for the shards
    #[arg(long, short, value_name = "FOLDER", required_unless_present_any = ["verify", "show"])]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tokenizer: TokenizerArgs,
    /// The field of .jsonl lines and the column of .parquet files that holds the text [default: text]
    #[arg(long)]
    pub(crate) text_field: Option<String>,
    #[command(flatten)]
    pub(crate) chat: RowArgs,
    /// Read this split, by the names of files and folders; by default the training split of folders and
    /// patterns with several
    #[arg(long, value_parser = split())]
    pub(crate) split: Option<Take>,
    /// Skip up to this many rows that are not JSON or have no text
    #[arg(long, value_name = "ROWS", default_value_t = 0)]
    pub(crate) skip_bad_rows: u64,
    /// Split .txt files into documents at this string; by default each file is one document
    #[arg(long)]
    pub(crate) separator: Option<String>,
    /// End each document with this token of the tokenizer, e.g. '<|endoftext|>'; by default the end token
    /// that the tokenizer's files name
    #[arg(long, value_name = "TOKEN")]
    pub(crate) end_of_document: Option<String>,
    /// Put the tokenizer's begin token before each document: auto (if the tokenizer's own template does),
    /// true or false
    #[arg(long, value_name = "CHOICE", default_value = "auto")]
    pub(crate) begin_of_document: BeginOfDocument,
    /// Maximum number of tokens in a shard; may have a unit (K, M, G or B, T; Ki, Mi, Gi, Ti)
    #[arg(long, value_name = "TOKENS", default_value_t = Count(PrepareOptions::default().shard_tokens))]
    pub(crate) shard_tokens: Count,
    /// Read the finished shards again and check their checksums. Without --out, check the given folders of
    /// token shards
    #[arg(long)]
    pub(crate) verify: bool,
    #[command(flatten)]
    pub(crate) cpu: Threads,
}

/// The options of conversations.
#[derive(Debug, Args)]
pub(crate) struct RowArgs {
    /// Read rows as conversations. By default they are if the first ones have the keys of conversations and
    /// no --text-field is given
    #[arg(long, conflicts_with = "text_field")]
    pub(crate) chat: bool,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// Rename unused tokens with names like this pattern, such as '<|reserved_*|>', to the template's markers
    /// that the tokenizer lacks; by default these are added at the end
    #[arg(long, value_name = "PATTERN")]
    pub(crate) reserved_tokens: Option<String>,
    /// Train on this part of a conversation
    #[arg(long, value_name = "PART", default_value = "assistant", value_parser = named(&TrainOn::ALL, TrainOn::name))]
    pub(crate) train_on: TrainOn,
    /// Fail if the template refuses more than this share of the conversations, or nothing in them is trained
    #[arg(long, value_name = "SHARE", default_value_t = ChatOptions::default().bad_rows, value_parser = share)]
    pub(crate) bad_rows: f64,
    /// Show the samples of the first rows, what is trained in [[ ]] or in colour, and write nothing
    #[arg(long, value_name = "ROWS")]
    pub(crate) show: Option<usize>,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct TokenizerArgs {
    /// Use this tokenizer.json, or the one in this folder
    #[arg(long, value_name = "PATH")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Learn a byte-level BPE vocabulary of at most this many tokens from the text
    #[arg(long, value_name = "TOKENS", value_parser = tokens(1..=1 << 24))]
    pub(crate) bpe_vocab_size: Option<usize>,
    /// Use plain bytes as tokens
    #[arg(long)]
    pub(crate) bytes: bool,
    /// Use the characters that occur in the text as tokens
    #[arg(long)]
    pub(crate) chars: bool,
}
