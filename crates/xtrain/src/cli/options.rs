//! Options that several verbs share.

use super::values::{bounded, device, named, whole};
use crate::failure::Failure;
use clap::Args;
use std::path::PathBuf;
use xtrain_config::{Device, Override};
use xtrain_model::Recipe;

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
    /// Use the checkpoint of this step instead of the latest (run folders)
    #[arg(long, value_name = "STEP", value_parser = whole::<u64>(0..=u64::MAX))]
    pub(crate) step: Option<u64>,
    /// Use the checkpoint with the lowest validation loss instead of the latest (run folders)
    #[arg(long, conflicts_with = "step")]
    pub(crate) best: bool,
    #[command(flatten)]
    pub(crate) cpu: Threads,
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

/// A checkpoint to examine, and the formats.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// A run folder, or one of its checkpoints
    pub(crate) run: PathBuf,
    /// Use the checkpoint of this step instead of the latest
    #[arg(long, value_name = "STEP", value_parser = whole::<u64>(0..=u64::MAX))]
    pub(crate) step: Option<u64>,
    /// Use the checkpoint with the lowest validation loss instead of the latest
    #[arg(long, conflicts_with = "step")]
    pub(crate) best: bool,
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
