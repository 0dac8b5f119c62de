//! The run configuration: one TOML file a run, `--set` overrides, and nothing else.
//!
//! ```text
//! text + --set -> tree (values with their lines) -> check (against the schema) -> rules (between keys)
//!              -> Parsed -> resolve (with what folder, tokenizer and data say) -> Resolved
//! ```
//!
//! * `section` holds one struct a section, one field a key, and is the only place that knows a key. The
//!   schema derived from it drives the checks, the error messages, docs/configuration.md and
//!   docs/run-file.schema.json.
//! * [`Config`] is plain values as written; [`Resolved`] has every default filled in, prints as TOML and
//!   reads back as itself. The run folder keeps that print.
//! * Errors come all at once, one line each, with file, line, section, key and what to do.
//!
//! Deliberately absent: opening anything but the run file. What a Hugging Face folder, a tokenizer, the data
//! or a [file of static scales](ScalesFile) say comes in as [`Facts`].

mod argument;
mod check;
mod diff;
mod elsewhere;
mod error;
pub mod files;
mod fit;
mod hint;
mod json_schema;
mod keys;
mod or_auto;
mod print;
mod quantity;
mod reference;
mod resolve;
mod rules;
mod scales_file;
mod schema;
mod section;
mod time_limit;
mod tree;
mod unknown;
mod value;

#[cfg(test)]
#[path = "../../../tests/messages.rs"]
mod messages;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use argument::{is_key, set_text};
pub use diff::{Change, diff};
pub use error::{ConfigError, ConfigErrors, Origin};
pub use json_schema::run_file_schema;
pub use keys::{Advice, advice, advice_for};
pub use or_auto::OrAuto;
pub use quantity::{COUNT_UNITS, Count, Rate, Size, parse_count};
pub use reference::reference_markdown;
pub use resolve::{Facts, Resolved};
pub use scales_file::ScalesFile;
pub use section::*;
pub use time_limit::{TimeLimit, TimeLimitError};
pub use tree::Override;
pub use xtrain_checkpoint::suggest::{listing, nearest};

use error::Report;
use tree::Tree;

/// Size limit of a run file.
pub const MAX_FILE_BYTES: u64 = 16 << 20;

/// A run as its file describes it, section by section. Keys that were not given hold their fixed default, or
/// `None` if the default depends on something else; [`Parsed::resolve`] fills those in.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// The model to train. Either `init_from` names a Hugging Face folder and the architecture comes from it,
    /// or `dim`, `layers` and `heads` describe a model that starts from random weights.
    pub model: ModelConfig,
    /// Mixtures of experts in place of the feed-forward, for the families that have them: each token passes
    /// through a few SwiGLUs of many, which a router chooses. The keys of the model may be left out with
    /// `model.init_from`.
    pub experts: ExpertsConfig,
    /// Low-rank adapters (LoRA, arXiv 2106.09685), which are trained in place of the model of
    /// `model.init_from`: a linear layer computes y = W x + (alpha / rank) B A x. docs/adapters.md explains
    /// them.
    pub adapter: AdapterConfig,
    /// Texts, tokenizer and sequence length. Relative paths start at `train.started_in`, by default the
    /// current folder; those of `--set` always start at the current folder.
    pub data: DataConfig,
    /// Number formats of the computation. Master weights, accumulated gradients and the optimizer
    /// are fp32 under every recipe; docs/numerics.md defines each.
    pub precision: PrecisionConfig,
    /// AdamW or Muon, with decoupled weight decay, and gradient clipping. The schedule scales `lr`.
    pub optimizer: OptimizerConfig,
    /// The learning rate over the run: a linear warmup whose first step already uses `lr / warmup_steps`,
    /// then the decay that `kind` names. It spans the whole run, so a run that is resumed with more steps
    /// moves back on it, and its rate may rise again; kind `wsd` is made for runs that are extended
    /// (docs/cli.md).
    pub schedule: ScheduleConfig,
    /// Length of the training, batches, device and run folder. Exactly one of `steps`, `tokens` and `epochs`
    /// is given.
    pub train: TrainConfig,
    /// How the processes of a run share its work, one process for each GPU. With one process, only `reduce`
    /// has an effect. docs/parallel.md says how to start several.
    pub parallel: ParallelConfig,
    /// When to save and what to keep. The last step is always saved.
    pub checkpoint: CheckpointConfig,
    /// Interval of reports, and the files that they are written to. The terminal shows them in any case.
    pub log: LogConfig,
    /// Validation during the run, and samples at its end.
    pub eval: EvalConfig,
}

/// A configuration without errors of its own, and the place where each key was given.
#[derive(Clone, Debug)]
pub struct Parsed {
    /// The values.
    pub config: Config,
    file: Arc<Path>,
    origins: error::Origins,
}

impl Parsed {
    /// The run file, if it sets this key (`log.command`); `None` if the command line sets it, or nothing
    /// does.
    pub fn file_with(&self, key: &str) -> Option<&Path> {
        matches!(self.origins.get(key), Some(Origin::Line { .. })).then_some(&*self.file)
    }

    /// The path of the run file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// Makes the paths of arguments absolute: they start at the current folder, those of the file elsewhere.
    fn anchor_arguments(&mut self) {
        let given = |key: &str| matches!(self.origins.get(key), Some(Origin::Argument { .. }));
        let anchor = |path: &mut String| {
            if let Ok(absolute) = std::path::absolute(&*path)
                && let Ok(absolute) = absolute.into_os_string().into_string()
            {
                *path = absolute;
            }
        };
        let Config { model, data, precision, .. } = &mut self.config;
        for (key, sources) in [("data.train", Some(&mut data.train)), ("data.valid", data.valid.as_mut())] {
            if let Some(sources) = sources.filter(|_| given(key)) {
                sources.0.iter_mut().for_each(|source| anchor(&mut source.path));
            }
        }
        if let (true, Some(TokenizerChoice::Path(path))) = (given("data.tokenizer"), &mut data.tokenizer) {
            anchor(path);
        }
        if given("data.cache_dir") {
            anchor(&mut data.cache_dir);
        }
        if let (true, Some(folder)) = (given("model.init_from"), &mut model.init_from) {
            anchor(folder);
        }
        if let (true, Some(file)) = (given("precision.static_scales"), &mut precision.static_scales) {
            anchor(file);
        }
    }

    /// Checks that so many ranks can share the batch evenly and be divided into replicas.
    ///
    /// # Errors
    /// They cannot, with sizes that would do.
    pub fn check_shared(&self, ranks: usize) -> Result<(), ConfigErrors> {
        let mut report = Report::new(self.file.clone(), self.origins.clone(), Vec::new());
        rules::ranks::shared_by(&self.config, ranks, &mut report);
        report.finish()
    }

    /// True if the value of a key (`train.recompute`) is given on the command line, not in the file.
    pub fn is_argument(&self, key: &str) -> bool {
        matches!(self.origins.get(key), Some(Origin::Argument { .. }))
    }
}

impl Config {
    /// Reads the run file at `path` and applies `overrides`; the last one of a key wins. A string is what
    /// `--set` takes, `section.key=value`.
    ///
    /// # Errors
    /// Everything that is wrong with the file and the arguments, as far as it can be told at once: a file
    /// that cannot be read or is no TOML, unknown sections and keys, wrong types, values out of range,
    /// missing keys and keys that contradict each other.
    pub fn load<O: Clone + Into<Override>>(path: &Path, overrides: &[O]) -> Result<Parsed, ConfigErrors> {
        let bytes = crate::files::read(path, MAX_FILE_BYTES).map_err(|error| {
            let message = format!("cannot be read: {error}{}", crate::files::advice(&error));
            ConfigErrors::one(Origin::File { file: path.into() }, message)
        })?;
        let mut parsed = Self::parse(path, &bytes, overrides)?;
        if parsed.config.train.started_in.is_some() {
            parsed.anchor_arguments();
        }
        Ok(parsed)
    }

    /// As [`Config::load`], for contents in memory; `path` names them in errors and gives the run folder its
    /// default name.
    ///
    /// # Errors
    ///
    /// As [`Config::load`].
    pub fn parse<O: Clone + Into<Override>>(
        path: &Path,
        bytes: &[u8],
        overrides: &[O],
    ) -> Result<Parsed, ConfigErrors> {
        let file: Arc<Path> = path.into();
        let mut tree = Tree::from_toml(&file, bytes)?;
        let mut errors = Vec::new();
        for value in overrides {
            let value = value.clone().into();
            let Err(mut error) = tree.lay(&value) else { continue };
            if let Override::Set(argument) = &value
                && let Some(meant) = keys::without_section(argument)
            {
                error.message = meant;
            }
            errors.push(error);
        }
        let mut report = Report::new(file.clone(), tree.origins(), errors);
        let config = check::config(&tree, &mut report);
        rules::check(&config, &mut report);
        report.finish()?;
        Ok(Parsed { config, file, origins: tree.origins() })
    }

    /// The configuration as a run file, with every key that has a value. [`Config::parse`] of the text
    /// returns an equal configuration if the values are valid in a file.
    pub fn to_toml(&self) -> String {
        print::config(self, &[])
    }

    /// As [`Config::to_toml`], with a comment after some keys (`train.recompute`).
    pub fn to_toml_with(&self, comments: &[(&str, &str)]) -> String {
        print::config(self, comments)
    }

    /// Tokens in an optimizer step.
    pub fn step_tokens(&self) -> u64 {
        (self.train.batch_size as u64).saturating_mul(self.data.seq_len as u64)
    }
}
