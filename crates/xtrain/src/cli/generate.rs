//! The options of `xtrain generate`.

use super::options::{ComputeArgs, ModelArgs};
use super::values::tokens;
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
    /// Maximum number of tokens to generate; whenever they fill the model's context, its older half is
    /// dropped
    #[arg(long, short = 'n', default_value_t = 128, value_parser = tokens(0..=1 << 30))]
    pub(crate) max_tokens: usize,
    /// 0 always takes the likeliest token; 1 samples from the model's own distribution
    #[arg(long, short, default_value_t = 0.8)]
    pub(crate) temperature: f64,
    /// Sample from the k likeliest tokens only; 0 for all
    #[arg(long, default_value_t = 0)]
    pub(crate) top_k: usize,
    /// Sample from the likeliest tokens that have this probability together
    #[arg(long, default_value_t = 1.0)]
    pub(crate) top_p: f64,
    /// Seed of the sampling
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Print one JSON object at the end instead of the text: prompt_tokens, tokens, text, finish_reason
    /// (stop or length), steps (token, logit, logprob and margin over the best other token) and speed
    #[arg(long)]
    pub(crate) json: bool,
    /// Also print each step's N likeliest tokens, as `top`
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json")]
    pub(crate) logprobs: usize,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PromptArgs {
    /// The text to continue; - reads it from standard input
    #[arg(long, short)]
    pub(crate) prompt: Option<String>,
    /// Token ids to continue, unchanged: no begin token is added
    #[arg(long, value_name = "ID,ID,...", value_delimiter = ',')]
    pub(crate) tokens: Option<Vec<u32>>,
}
