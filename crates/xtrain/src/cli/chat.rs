//! The options of `xtrain chat`.

use super::options::{ComputeArgs, ModelArgs, SamplingArgs, TemplateArgs};
use super::values::tokens;
use clap::Args;

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain chat models/Qwen3-0.6B
  xtrain chat runs/tuned --best --system 'Answer in one sentence.' --temperature 0
  xtrain chat runs/tuned < questions.txt > answers.txt
Each line is a message. Lines that begin with a slash are commands: /reset, /system TEXT, /save FILE,
/help and /quit; write // for a message that begins with one. Ctrl-C stops an answer; twice, or at the
prompt, it ends the chat, as the end of the input does. If standard input is no terminal, only answers
are printed on standard output, and a message that cannot be answered makes the exit code 2.")]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// The system message, which begins the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(long, short = 'n', default_value_t = 1024, value_parser = tokens(1..=1 << 30))]
    pub(crate) max_tokens: usize,
    /// Tokens of the conversation and its answer that are kept, at most those of the model's context. When
    /// they are full, the oldest messages are forgotten, and a line says so
    #[arg(long, value_name = "TOKENS", default_value_t = 8192, value_parser = tokens(1..=1 << 30))]
    pub(crate) context: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) template: TemplateArgs,
}
