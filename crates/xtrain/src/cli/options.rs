//! Options that several verbs share.

use super::values::{bounded, device, named, number, whole};
use crate::failure::Failure;
use crate::terminal;
use clap::Args;
use std::path::{Path, PathBuf};
use xtrain_chat::Date;
use xtrain_checkpoint::hf::{ExportDtype, ExportOptions};
use xtrain_config::{Device, Override, Size};
use xtrain_data::{ChatOptions, TemplateSource};
use xtrain_model::Recipe;
use xtrain_step::generate::Sampling;

#[derive(Debug, Args)]
pub(crate) struct RunFile {
    /// The run file (TOML); docs/configuration.md lists its keys
    pub(crate) file: PathBuf,
    /// Override a key of the run file, e.g. --set optimizer.lr=1e-3. --set section.key= removes the key. May
    /// be repeated
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,
}

/// The number of processes that share a run.
#[derive(Debug, Args)]
pub(crate) struct Processes {
    /// Use this many GPUs of this machine, one process for each (docs/parallel.md)
    #[arg(long, value_name = "N", conflicts_with = "ranks", value_parser = bounded(1..=1024))]
    pub(crate) gpus: Option<usize>,
    /// Use this many processes on the CPU
    #[arg(long, value_name = "N", value_parser = bounded(1..=1024))]
    pub(crate) ranks: Option<usize>,
}

impl Processes {
    /// The number that an option gives, with the option.
    pub(crate) fn given(&self) -> Option<(&'static str, usize)> {
        let gpus = self.gpus.map(|count| ("--gpus", count));
        gpus.or_else(|| self.ranks.map(|count| ("--ranks", count)))
    }

    /// The device that the options imply, instead of the run file's.
    ///
    /// # Errors
    /// `sets` name another one.
    pub(crate) fn device(&self, sets: &[String]) -> Result<Option<Override>, Failure> {
        const KEY: &str = "train.device";
        let Some((option, count)) = self.given() else { return Ok(None) };
        let device = if self.gpus.is_some() { Device::Cuda } else { Device::Cpu };
        let of_key = |set: &String| {
            set.split_once('=').filter(|(key, _)| key.trim() == KEY).map(|(_, v)| v.to_owned())
        };
        if let Some(given) = sets.iter().find_map(of_key)
            && ![device.name(), Device::Auto.name(), ""].contains(&given.trim().trim_matches(['"', '\'']))
        {
            return Err(Failure::user(format!(
                "{option} {count} is for {}, and --set {KEY}={} asks for another device; leave one of them out",
                if device == Device::Cuda { "GPUs" } else { "processes on the CPU" },
                given.trim()
            )));
        }
        Ok(Some(Override::Text { option, key: KEY, text: device.name().to_owned() }))
    }
}

/// `--threads`.
#[derive(Debug, Args)]
pub(crate) struct Threads {
    /// CPU threads; 0 uses all cores
    #[arg(long, default_value_t = 0, value_parser = bounded(0..=1024))]
    pub(crate) threads: usize,
}

/// `--device`.
#[derive(Debug, Args)]
pub(crate) struct OnDevice {
    /// Device to compute on: auto (a GPU if there is one), cpu or cuda
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device())]
    pub(crate) device: Device,
}

/// A model: a run folder or a Hugging Face folder.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// A run folder or a Hugging Face folder
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) checkpoint: CheckpointArgs,
    /// Add the adapters in this folder, of PEFT's form, to the model of a Hugging Face folder
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["step", "best"])]
    pub(crate) adapter: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cpu: Threads,
}

/// A checkpoint of a run.
#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    /// Use the checkpoint of this step instead of the latest (run folders)
    #[arg(long, value_name = "STEP", value_parser = whole::<u64>(0..=u64::MAX))]
    pub(crate) step: Option<u64>,
    /// Use the best checkpoint (lowest validation loss, or `checkpoint.best`) instead of the latest (run
    /// folders)
    #[arg(long, conflicts_with = "step")]
    pub(crate) best: bool,
}

/// A Hugging Face folder to write.
#[derive(Debug, Args)]
pub(crate) struct FolderArgs {
    /// The folder to write
    #[arg(long, short, value_name = "FOLDER")]
    pub(crate) out: PathBuf,
    /// Maximum size of a weight file, in bytes or with a unit (500MB, 4GiB)
    #[arg(long, value_name = "SIZE", default_value_t = Size(ExportOptions::default().max_shard_bytes))]
    pub(crate) max_shard_size: Size,
    /// Replace an existing folder
    #[arg(long)]
    pub(crate) overwrite: bool,
}

impl FolderArgs {
    /// The options of an export in this type.
    pub(crate) fn options(&self, dtype: ExportDtype) -> ExportOptions {
        ExportOptions { dtype, max_shard_bytes: self.max_shard_size.0, overwrite: self.overwrite }
    }

    /// Refuses a folder that holds something, before weights are read, which may take minutes. The export
    /// itself checks again.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        let holds_something = self.out.read_dir().is_ok_and(|mut entries| entries.next().is_some());
        match holds_something && !self.overwrite {
            true => Err(Failure::user(format!(
                "{} exists already and is not empty; choose another folder, or replace it with --overwrite",
                terminal::shown_path(&self.out)
            ))),
            false => Ok(()),
        }
    }
}

/// Device and precision of a model.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    #[command(flatten)]
    pub(crate) on: OnDevice,
    /// Compute in this precision; by default the run's own, and fp32 for a Hugging Face folder
    #[arg(long, value_parser = named(&Recipe::ALL, Recipe::name))]
    pub(crate) precision: Option<Recipe>,
}

/// The options of sampling.
#[derive(Debug, Args)]
pub(crate) struct SamplingArgs {
    /// Sampling temperature: 0 always takes the most likely token (greedy), 1 samples from the model's own
    /// distribution
    #[arg(long, short, default_value_t = 0.8, value_parser = number)]
    temperature: f64,
    /// Sample from the k most likely tokens only; 0 means all
    #[arg(long, default_value_t = 0, value_parser = whole::<usize>(0..=u64::MAX))]
    top_k: usize,
    /// Sample from the smallest set of most likely tokens whose probabilities add up to this
    #[arg(long, default_value_t = 1.0, value_parser = number)]
    top_p: f64,
    /// Seed for sampling
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..=u64::MAX))]
    seed: u64,
}

impl SamplingArgs {
    /// The settings of sampling.
    ///
    /// # Errors
    /// A temperature or probability out of range.
    pub(crate) fn sampling(&self) -> Result<Sampling, Failure> {
        let SamplingArgs { temperature, top_k, top_p, seed } = *self;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(Failure::user(format!("--temperature is {temperature:?}; it must be 0 or more")));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Failure::user(format!("--top-p is {top_p:?}; it must be above 0 and at most 1")));
        }
        Ok(Sampling { temperature, top_k, top_p, seed })
    }
}

/// The options of rendering conversations.
#[derive(Debug, Args)]
pub(crate) struct TemplateArgs {
    /// Render conversations with this template, a file or "chatml"; by default with that of the run or of
    /// the folder
    #[arg(long, value_name = "PATH")]
    chat_template: Option<PathBuf>,
    /// Variables of the chat template, as JSON: '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON")]
    chat_template_kwargs: Option<String>,
    /// The date that the chat template prints; by default that of the run, or today
    #[arg(long, value_name = "YYYY-MM-DD")]
    today: Option<Date>,
}

impl TemplateArgs {
    /// The first option that is given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let all = [
            ("--chat-template", self.chat_template.is_some()),
            ("--chat-template-kwargs", self.chat_template_kwargs.is_some()),
            ("--today", self.today.is_some()),
        ];
        all.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
    }

    /// `options` with what is given here.
    ///
    /// # Errors
    /// Variables that are no JSON object.
    pub(crate) fn over(&self, mut options: ChatOptions) -> Result<ChatOptions, Failure> {
        if let Some(path) = &self.chat_template {
            options.template = match path == Path::new("chatml") {
                true => TemplateSource::ChatMl,
                false => TemplateSource::File(path.clone()),
            };
        }
        if let Some(kwargs) = &self.chat_template_kwargs {
            options.kwargs = serde_json::from_str(kwargs).map_err(|error| {
                Failure::user(format!(
                    "--chat-template-kwargs is no JSON object ({error}); write it as '{{\"enable_thinking\": false}}'"
                ))
            })?;
        }
        if let Some(today) = self.today {
            options.today = today;
        }
        Ok(options)
    }
}

/// A checkpoint to examine, and the formats.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// A run folder, or one of its checkpoints
    pub(crate) run: PathBuf,
    #[command(flatten)]
    pub(crate) checkpoint: CheckpointArgs,
    /// Examine the casts of this recipe instead of the run's own; by default fp8-block if the run has no FP8
    #[arg(long, value_name = "RECIPE", value_parser = named(&Recipe::FP8, Recipe::name))]
    pub(crate) casts: Option<Recipe>,
    /// Take batches from this text (.txt, .jsonl, .parquet, .gz, .zst; a folder or a pattern) or from these
    /// token shards, prepared like the run's own data; by default the run's next batches
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) on: OnDevice,
    #[command(flatten)]
    pub(crate) cpu: Threads,
}

/// The page that a verb writes. The help of `--out` states its default for each verb.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// The page to write
    #[arg(long, short, value_name = "FILE")]
    pub(crate) out: Option<PathBuf>,
    /// Replace the file that --out names even if xtrain did not write it as a page
    #[arg(long, requires = "out")]
    pub(crate) overwrite: bool,
}
