//! The verbs and their flags.

mod bench;

pub(crate) use bench::*;

use crate::quantity::{Count, Size};
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgAction, Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::io::Write;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
use xtrain_config::{Device, keys_like};
use xtrain_data::{BeginOfDocument, PrepareOptions};
use xtrain_model::Recipe;

/// Train language models: pre-train, continue and fine-tune from one run file.
#[derive(Debug, Parser)]
#[command(name = "xtrain", version, propagate_version = true, max_term_width = 100)]
#[command(after_help = "Examples:
  xtrain train examples/quickstart.toml
  xtrain train run.toml --set optimizer.lr=1e-3 --set train.steps=2000
  xtrain plan run.toml
  xtrain generate runs/quickstart --prompt 'pub fn ' --max-tokens 100")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// The command line of this process; ends it where that is for help or cannot be understood.
    pub(crate) fn read() -> Self {
        // A negative number is a value that an option may refuse with its range, never an unknown option.
        let allow = |arg: Arg| match arg.get_action() {
            ArgAction::Set | ArgAction::Append => arg.allow_negative_numbers(true),
            _ => arg,
        };
        let command = Cli::command().mut_subcommands(|verb| verb.mut_args(allow));
        let read = command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
        read.unwrap_or_else(|error| {
            let verb = std::env::args_os().nth(1);
            let takes_a_run_file =
                verb.is_some_and(|verb| ["train", "plan", "bench"].iter().any(|takes| verb == *takes));
            match no_option_but_a_key(&error).filter(|_| takes_a_run_file) {
                // The exit code says it where nobody can read it.
                Some(message) => {
                    let _ = writeln!(std::io::stderr(), "error: {message}");
                    std::process::exit(2)
                }
                None => error.exit(),
            }
        })
    }
}

/// What is said of an unknown option that is, or may be meant as, a key of the run file.
fn no_option_but_a_key(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = option.strip_prefix("--").filter(|_| error.kind() == ErrorKind::UnknownArgument)?;
    let meant = keys_like(name);
    if !meant.exact && error.get(ContextKind::SuggestedArg).is_some() {
        return None;
    }
    let sets: Vec<String> = meant.keys.iter().map(|key| format!("--set {key}=...")).collect();
    let sets = if sets.is_empty() { String::new() } else { format!(", here {}", sets.join(" or ")) };
    Some(format!(
        "there is no option {option}: keys of the run file are set with --set section.key=value{sets}; docs/configuration.md lists them"
    ))
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model as a run file says
    Train(TrainArgs),
    /// Show parameters, FLOPs and memory of a run without running it
    Plan(PlanArgs),
    /// Turn text into token shards
    Tokenize(TokenizeArgs),
    /// Continue a text with a model
    Generate(GenerateArgs),
    /// Measure the loss of a model on a text
    Eval(EvalArgs),
    /// Write a model as a Hugging Face folder
    Export(ExportArgs),
    /// Write the report of a run, or of several on one page
    Report(ReportArgs),
    /// Set the losses of runs against those of a baseline: the gap, beside what other seeds do
    Compare(CompareArgs),
    /// Show what casts to FP8 do to the tensors of a step: underflow, saturation, signal to noise
    Inspect(InspectArgs),
    /// Find the matrix products that FP8 hurts: put one after another back to bf16, on a checkpoint
    Blame(BlameArgs),
    /// Say what this machine has to train with and what is missing, and try it
    Doctor(DoctorArgs),
    /// Measure speed and memory
    #[command(subcommand)]
    Bench(BenchCommand),
}

#[derive(Debug, Args)]
pub(crate) struct RunFile {
    /// The run file (TOML); docs/configuration.md lists its keys
    pub(crate) file: PathBuf,
    /// Override a key of the run file, e.g. --set optimizer.lr=1e-3; --set section.key= takes it out; may be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain train examples/quickstart.toml
  xtrain train run.toml --resume --max-time 3h50m
  xtrain train run.toml --profile --set train.steps=20")]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Go on from the latest complete checkpoint of the run folder, or begin if there is none
    #[arg(long)]
    pub(crate) resume: bool,
    /// Save and end after this wall-clock time (e.g. 45m, 3h50m); the same as --set train.max_time=...
    #[arg(long, value_name = "TIME")]
    pub(crate) max_time: Option<String>,
    /// The run folder; the same as --set train.out=...
    #[arg(long, value_name = "FOLDER")]
    pub(crate) out: Option<String>,
    /// CPU threads, 0 takes all; the same as --set train.threads=...
    #[arg(long, value_parser = bounded(0..=1024))]
    pub(crate) threads: Option<usize>,
    /// Trace some steps in trace.json of the run folder, which ui.perfetto.dev opens: what the host did, and
    /// what the processor ran when
    #[arg(long)]
    pub(crate) profile: bool,
    /// Steps that are timed op by op, after six that are timed as they run
    #[arg(long, value_name = "STEPS", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000), requires = "profile")]
    pub(crate) profile_steps: u64,
    /// The first traced step; by default the fourth that this process makes
    #[arg(long, value_name = "STEP", value_parser = clap::value_parser!(u64).range(1..), requires = "profile")]
    pub(crate) profile_from: Option<u64>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain plan examples/llama3_8b.toml
  xtrain plan run.toml --set train.device=cuda --memory 80GiB
  xtrain plan run.toml --set train.recompute=block --dump")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) run: RunFile,
    /// Say whether a step fits into this much memory, and what would: a number with a unit (500MB, 24GiB), or of
    /// bytes; by default what is available on the device of the run, where it is there
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<Size>,
    /// Print the step program, one line an instance
    #[arg(long)]
    pub(crate) dump: bool,
}

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
    /// Tokens of a shard: a number, or one of thousands (K), millions (M) or billions (G)
    #[arg(long, value_name = "TOKENS", default_value_t = Count(PrepareOptions::default().shard_tokens))]
    pub(crate) shard_tokens: Count,
    /// Read the finished shards once more and compare their checksums
    #[arg(long)]
    pub(crate) verify: bool,
    /// CPU threads; 0 takes all
    #[arg(long, default_value_t = 0, value_parser = bounded(0..=1024))]
    pub(crate) threads: usize,
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

/// A model: a run folder or a Hugging Face folder.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// A run folder or a Hugging Face folder
    pub(crate) model: PathBuf,
    /// Use the checkpoint of this step instead of the latest (run folders)
    #[arg(long, value_name = "STEP")]
    pub(crate) step: Option<u64>,
    /// Use the checkpoint with the lowest validation loss instead of the latest (run folders)
    #[arg(long, conflicts_with = "step")]
    pub(crate) best: bool,
    /// CPU threads; 0 takes all
    #[arg(long, default_value_t = 0, value_parser = bounded(0..=1024))]
    pub(crate) threads: usize,
}

/// How a model computes.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Compute here: auto (a GPU where there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device())]
    pub(crate) device: Device,
    /// Compute in this precision instead of the run's own, or fp32 for a Hugging Face folder
    #[arg(long, value_parser = named(&Recipe::ALL, Recipe::name))]
    pub(crate) precision: Option<Recipe>,
}

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
    /// Tokens to make at most; whenever they fill the model's context, the older half of it is forgotten
    #[arg(long, short = 'n', default_value_t = 128, value_parser = bounded(0..=1 << 30))]
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
    /// Makes the sampling repeatable
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Print one JSON object at the end instead of the text: prompt_tokens, tokens, text, finish_reason
    /// (stop or length), steps (token, logit, logprob and margin over the best other token) and speed
    #[arg(long)]
    pub(crate) json: bool,
    /// Also give each step's N likeliest tokens, as its top
    #[arg(long, value_name = "N", default_value_t = 0, requires = "json")]
    pub(crate) logprobs: usize,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct PromptArgs {
    /// The text to continue; - reads it from standard input
    #[arg(long, short)]
    pub(crate) prompt: Option<String>,
    /// The token ids to continue, as they are: nothing is added at the beginning
    #[arg(long, value_name = "ID,ID,...", value_delimiter = ',')]
    pub(crate) tokens: Option<Vec<u32>>,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain eval runs/quickstart
  xtrain eval runs/quickstart --precision bf16 --precision fp8-block
  xtrain eval models/Qwen3-0.6B --data wiki.jsonl --seq-len 2048")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Compute here: auto (a GPU where there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device())]
    pub(crate) device: Device,
    /// Compute in this precision instead of the run's own, or fp32 for a Hugging Face folder; given several times, in one
    /// after the other, with the gap of each loss to the first
    #[arg(long, value_parser = named(&Recipe::ALL, Recipe::name))]
    pub(crate) precision: Vec<Recipe>,
    /// Text (.txt, .jsonl, .parquet, .gz, .zst) or a folder of token shards; without it what the run validated on
    #[arg(long)]
    pub(crate) data: Vec<PathBuf>,
    /// Tokens of context; by default those of the run, and for a Hugging Face folder by default 1024, or what the model
    /// allows if that is less
    #[arg(long, requires = "data", value_parser = bounded(1..=1 << 24))]
    pub(crate) seq_len: Option<usize>,
    /// Keep attention inside documents; by default as the run did, and false for a Hugging Face folder
    #[arg(long, requires = "data", value_name = "true|false")]
    pub(crate) document_mask: Option<bool>,
    /// Sequences evaluated at once
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) batch_size: u16,
    /// The field of .jsonl lines and the column of .parquet files that holds the text
    #[arg(long, requires = "data", default_value = "text")]
    pub(crate) text_field: String,
    /// Split .txt files into documents at this string
    #[arg(long, requires = "data")]
    pub(crate) separator: Option<String>,
    /// Keep the tokens of the text in this folder for the next time; by default they are temporary
    #[arg(long, requires = "data", value_name = "FOLDER")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Print a JSON object for each precision instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain export runs/quickstart --out models/quickstart --dtype bf16
  xtrain export runs/llama1b --out models/llama1b-fp8 --dtype fp8")]
pub(crate) struct ExportArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// The folder to write
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// The element type of the weights; by default as the run's own export, or what loses nothing of a Hugging Face folder.
    /// fp8 is E4M3 with scales for blocks of 128 x 128, as DeepSeek-V3 is published: the linear layers of
    /// the blocks, where their sizes are multiples of 128; the rest is bf16
    #[arg(long, value_parser = named(&ExportDtype::ALL, ExportDtype::name))]
    pub(crate) dtype: Option<ExportDtype>,
    /// Bytes of a file at most: a number with a unit (500MB, 4GiB), or of bytes
    #[arg(long, value_name = "SIZE", default_value_t = Size(ExportOptions::default().max_shard_bytes))]
    pub(crate) max_shard_size: Size,
    /// Replace the folder if it is there
    #[arg(long)]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain report runs/quickstart
  xtrain report runs/a runs/b --out comparison.html")]
pub(crate) struct ReportArgs {
    /// Run folders
    #[arg(required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The page to write; by default report.html in the run's folder, but several runs need it
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the file that --out names even if it is no report
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain compare runs/bf16 runs/fp8-block
  xtrain compare runs/fp8-* --baseline runs/bf16-*
Runs whose configurations differ in nothing but the seed are one row: name as many as there are.")]
pub(crate) struct CompareArgs {
    /// Run folders; without --baseline the first is the baseline, with those that are as it is but for their seed
    #[arg(required = true)]
    pub(crate) runs: Vec<PathBuf>,
    /// The runs to compare with: one, or several that differ in their seeds, which then tell how far seeds alone lie apart
    #[arg(long, value_name = "RUN", num_args = 1..)]
    pub(crate) baseline: Vec<PathBuf>,
    /// Average training losses over the last N steps that both sides have made
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub(crate) last: u64,
    /// The page to write; by default compare.html in the folder of the first run that is compared
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the file that --out names even if it is no page of xtrain's
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// A checkpoint that is looked at, and in which formats.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// A run folder, or one of its checkpoints
    pub(crate) run: PathBuf,
    /// Use the checkpoint of this step instead of the latest
    #[arg(long, value_name = "STEP")]
    pub(crate) step: Option<u64>,
    /// Use the checkpoint with the lowest validation loss instead of the latest
    #[arg(long, conflicts_with = "step")]
    pub(crate) best: bool,
    /// Look at the casts of this recipe instead of the run's own; by default fp8-block where the run has no FP8
    #[arg(long, value_name = "RECIPE", value_parser = named(&Recipe::FP8, Recipe::name))]
    pub(crate) casts: Option<Recipe>,
    /// Compute here: auto (a GPU where there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device())]
    pub(crate) device: Device,
    /// CPU threads; 0 takes all
    #[arg(long, default_value_t = 0, value_parser = bounded(0..=1024))]
    pub(crate) threads: usize,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain inspect runs/fp8
  xtrain inspect runs/bf16 --step 2000 --casts fp8-current --all
Names are those that [precision] skip takes: a product whose factors suffer is put back to bf16 with one of them.")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
    /// Print every cast, not a line for those of each layer in all blocks
    #[arg(long)]
    pub(crate) all: bool,
    /// The page to write; by default inspect.html in the run's folder
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the file that --out names even if it is no page of xtrain's
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain blame runs/fp8
  xtrain blame runs/bf16 --step 2000 --casts fp8-current --batches 4 --by-block 1
A pattern that is to blame is put back to bf16 with [precision] skip.")]
pub(crate) struct BlameArgs {
    #[command(flatten)]
    pub(crate) probe: ProbeArgs,
    /// Take the batches of the next N steps
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(crate) batches: u64,
    /// Also put each block of the N worst back by itself
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = bounded(0..=1_000_000))]
    pub(crate) by_block: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
#[command(after_help = "Examples:
  xtrain doctor
  xtrain doctor --json
The exit code is 0 where training works on the device that train.device = \"auto\" takes, with or without a GPU.")]
pub(crate) struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// One of `all`, by its name in run files.
fn named<T: Copy + Send + Sync>(
    all: &'static [T],
    name: fn(T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let parser = PossibleValuesParser::new(all.iter().map(|&value| name(value)));
    parser.try_map(move |text| all.iter().copied().find(|&value| name(value) == text).ok_or("no such name"))
}

/// A device, by its name in run files; one by another's name for it is told ours.
fn device() -> impl TypedValueParser<Value = Device> {
    let values = Device::ALL.map(|device| PossibleValue::new(device.name()).aliases(device.aliases()));
    PossibleValuesParser::new(values).try_map(|text| {
        let is_called = |device: &Device| device.aliases().contains(&text.as_str());
        let ours = Device::ALL.into_iter().find(is_called).map(Device::name);
        let named = Device::ALL.into_iter().find(|device| device.name() == text);
        named.ok_or_else(|| format!("did you mean '{}'?", ours.unwrap_or("auto")))
    })
}

/// A whole number within `range`.
fn bounded(range: RangeInclusive<u64>) -> impl TypedValueParser<Value = usize> {
    clap::value_parser!(u64).range(range).try_map(usize::try_from)
}
