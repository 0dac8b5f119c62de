//! The options of `xtrain generate`.

use super::options::{ComputeArgs, ModelArgs};
use super::values::{number, tokens, whole};
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain generate runs/quickstart --prompt 'pub fn ' --max-tokens 100
  xtrain generate models/Qwen3-0.6B --prompt 'The capital of France is' --temperature 0
  xtrain generate models/Qwen3-0.6B --tokens 785,6722,315 --temperature 0 --json --logprobs 5")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    #[command(flatten)]
    pub(crate) prompt: PromptArgs,
    /// Maximum number of tokens to generate. When the context is full, its older half is dropped
    #[arg(long, short = 'n', default_value_t = 128, value_parser = tokens(0..=1 << 30))]
    pub(crate) max_tokens: usize,
    /// Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own
    /// distribution
    #[arg(long, short, default_value_t = 0.8, value_parser = number)]
    pub(crate) temperature: f64,
    /// Sample from the k most likely tokens only; 0 means all
    #[arg(long, default_value_t = 0, value_parser = whole::<usize>(0..=u64::MAX))]
    pub(crate) top_k: usize,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0, value_parser = number)]
    pub(crate) top_p: f64,
    /// Seed for sampling
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..=u64::MAX))]
    pub(crate) seed: u64,
    /// Print one JSON object at the end instead of the text: prompt_tokens, tokens, text, finish_reason
    /// (stop or length), steps (token, logit, logprob and margin over the best other token) and speed
    #[arg(long)]
    pub(crate) json: bool,
    /// Also print the N most likely tokens of each step, as `top`
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json", value_parser = whole::<usize>(0..=u64::MAX))]
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
}
