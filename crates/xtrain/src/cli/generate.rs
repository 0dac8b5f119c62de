//! The options of `xtrain generate`.

use super::options::{ComputeArgs, ModelArgs, SamplingArgs, TemplateArgs};
use super::values::{tokens, whole};
use clap::Args;
use std::path::PathBuf;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain generate runs/quickstart --prompt 'pub fn ' --max-tokens 100
  xtrain generate models/Qwen3-0.6B --prompt 'The capital of France is' --temperature 0
  xtrain generate models/Qwen3-0.6B --tokens 785,6722,315 --temperature 0 --json --logprobs 5
  xtrain generate models/Qwen3-0.6B --chats questions.jsonl --json --max-tokens 512")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Maximum number of tokens to generate. When the context is full, its older half is dropped; an answer
    /// to a conversation ends there
    #[arg(long, short = 'n', default_value_t = 128, value_parser = tokens(0..=1 << 30))]
    pub(crate) max_tokens: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
    /// Print one JSON object at the end instead of the text: prompt_tokens, tokens, text, finish_reason
    /// (stop or length), steps (token, logit, logprob and margin over the best other token) and speed. With
    /// --chats, one object a row: row (from 1), messages (or prompt, a text), answer, expected (the answer in
    /// the row), stopped (false if the answer was cut) and tokens, their number; or row and error
    #[arg(long)]
    pub(crate) json: bool,
    /// Also print the N most likely tokens of each step, as `top`
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json", conflicts_with = "chats", value_parser = whole::<usize>(0..=u64::MAX))]
    pub(crate) logprobs: usize,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PromptArgs {
    /// Text to continue, which is not printed again; - reads it from standard input
    #[arg(long, short)]
    pub(crate) prompt: Option<String>,
    /// Token ids to continue; no begin token is added. Without a tokenizer.json, ids are printed too
    #[arg(long, value_name = "ID,ID,...", value_delimiter = ',', value_parser = whole::<u32>(0..=u32::MAX.into()))]
    pub(crate) tokens: Option<Vec<u32>>,
    /// Answer the conversations in this file, whose rows are read as for training (docs/chat.md): without the
    /// last message if that is an answer. Rows of prompt and completion are continued. Row n is sampled with
    /// the seed plus n - 1. A row that cannot be answered is reported, and the exit code is then 2
    #[arg(long, value_name = "FILE")]
    pub(crate) chats: Option<PathBuf>,
}
