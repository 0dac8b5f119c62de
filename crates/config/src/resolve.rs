//! Resolution: fills in every default from the file, the folder, the tokenizer and the data.

use serde_json::Value as Json;

use super::error::Report;
use super::print::toml_value;
use super::section::{AdapterConfig, TokenizerChoice};
use super::{Config, ConfigErrors, OrAuto, Parsed, ScalesFile, rules};
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_data::tokenizer::MIN_BPE_TOKENS;
use xtrain_model::{Architecture, Description, ModelError, Recipe};

/// Facts that are not in the run file. The default has none, which suffices for a configuration that was
/// resolved before.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// The model of `model.init_from`'s config.json.
    pub init: Option<Description>,
    /// The weight of the balance loss in that file, if any.
    pub init_balance_loss: Option<f64>,
    /// Rank, alpha and targets of the adapters in `adapter.init_from`, or of those of a run that is resumed.
    pub init_adapter: Option<AdapterConfig>,
    /// Number of tokens in the tokenizer's vocabulary.
    pub tokenizer_vocab_size: Option<usize>,
    /// The first folder of token shards among the training data. Its tokenizer is used instead of one that
    /// would be learned from text.
    pub shards: Option<String>,
    /// Tokens of one pass over the training data without the part that `held_out` removes.
    pub epoch_tokens: Option<u64>,
    /// The recipe if the run file names none: the one that the run began with, or the best one of its
    /// processor. Without it, fp32.
    pub recipe: Option<Recipe>,
    /// The number of processes that share the run; one if absent.
    pub world_size: Option<usize>,
    /// Today's date, if some of the data are conversations.
    pub chat_date: Option<String>,
    /// The content of `precision.static_scales`, or that of a checkpoint.
    pub static_scales: Option<ScalesFile>,
}

impl Facts {
    fn world_size(&self) -> usize {
        self.world_size.unwrap_or(1).max(1)
    }
}

/// A configuration with every default filled in.
#[derive(Clone, Debug, PartialEq)]
pub struct Resolved {
    /// The values. The run folder keeps them as TOML, which parses and resolves to an equal configuration.
    pub config: Config,
    /// The model that `[model]` describes.
    pub architecture: Architecture,
    /// Length of the run in optimizer steps; `None` only if it is given in epochs and [`Facts::epoch_tokens`]
    /// is not known.
    pub steps: Option<u64>,
    /// The static scales that `precision.static_scales` names.
    pub static_scales: Option<ScalesFile>,
}

/// The architecture keys that must agree with `init_from`'s folder. The others extend its context.
const FIXED_BY_FOLDER: [&str; 12] = [
    "family",
    "dim",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_dim",
    "vocab_size",
    "norm_eps",
    "tie_embeddings",
    "qkv_bias",
    "qk_norm",
];

/// The keys of experts that must agree with `init_from`'s folder. The others balance loads.
const EXPERTS_FIXED_BY_FOLDER: [&str; 10] = [
    "count",
    "per_token",
    "ffn_dim",
    "shared_ffn_dim",
    "score",
    "normalise",
    "scale",
    "groups",
    "top_groups",
    "dense_blocks",
];

impl Parsed {
    /// Fills in every default. Reads nothing, and changes no value that was given.
    ///
    /// # Errors
    ///
    /// Errors that only `facts` can show: architecture keys that differ from the folder's, a vocabulary
    /// smaller than the tokenizer's or unknown, sequences longer than the folder's model allows, a warmup
    /// longer than a run given in epochs, a batch that the processes cannot share evenly.
    pub fn resolve(&self, facts: &Facts) -> Result<Resolved, ConfigErrors> {
        let mut report = Report::new(self.file.clone(), self.origins.clone(), Vec::new());
        let mut config = self.config.clone();
        fill_data(&mut config, facts, &mut report);
        let model = model(&config, facts, &mut report);
        let mut describes_experts = true;
        if let Some(model) = &model {
            config.model.fill_from(model);
            describes_experts = rules::model::experts(&config, model, &mut report);
            if let Some(mixture) = &model.mixture {
                config.experts.fill_from(mixture, facts.init_balance_loss);
            }
            rules::model::positions(&config, &mut report);
            rules::model::within_window(&config, model.window, &mut report);
        }
        let architecture = model.filter(|_| describes_experts).map(|model| -> Result<_, ModelError> {
            let base = model.architecture()?;
            rules::adapter::fill_from_folder(&mut config, facts.init_adapter.as_ref(), &base, &mut report);
            Ok(Architecture { adapter: config.adapter.adapter(), ..base })
        });
        if let Some(Ok(architecture)) = &architecture {
            rules::adapter::fits(architecture, &mut report);
        }
        config.adapter.fill();
        if let Some(Err(error)) = &architecture {
            report.about(&["model.layers"], error.to_string());
        }
        let steps = config.train.total_steps(config.data.seq_len, facts.epoch_tokens);
        if let Some(steps) = steps {
            rules::schedule_fits(&config, steps, &mut report);
        }
        config.schedule.fill(steps);
        self.fill_run(&mut config, facts);
        rules::ranks::shared_by(&config, facts.world_size(), &mut report);
        report.finish()?;
        let architecture =
            architecture.and_then(Result::ok).expect("an unknown architecture has been reported");
        let static_scales = facts.static_scales.clone().filter(|_| config.precision.static_scales.is_some());
        Ok(Resolved { config, architecture, steps, static_scales })
    }

    /// The run folder: as given, else `runs/` and the run file's name.
    pub fn out(&self) -> String {
        self.config.train.out.clone().unwrap_or_else(|| {
            let name = self.file.file_stem().map_or("run".into(), |stem| stem.to_string_lossy());
            format!("runs/{name}")
        })
    }

    fn fill_run(&self, config: &mut Config, facts: &Facts) {
        let recipe = *config.precision.recipe.get_or_insert(facts.recipe.unwrap_or(Recipe::Fp32));
        let ranks = config.parallel.data_ranks(facts.world_size());
        let of_a_rank = (config.train.batch_size / ranks.max(1)).max(1);
        config.train.micro_batch_size.get_or_insert(OrAuto::Is(of_a_rank));
        config.train.out = Some(self.out());
        let eval_every = config.eval.every(config.data.has_validation_data());
        config.eval.every = Some(eval_every);
        config.eval.tokens = Some(config.eval.tokens(config.step_tokens()));
        let best_every =
            if config.checkpoint.is_best_of_task() { config.eval.tasks_every } else { eval_every };
        config.optimizer.fill();
        config.checkpoint.keep_best.get_or_insert(best_every != 0);
        config.checkpoint.export_dtype.get_or_insert(match recipe {
            _ if config.adapter.rank.is_some() => ExportDtype::Fp32,
            Recipe::Fp32 => ExportDtype::Fp32,
            _ => ExportDtype::Bf16,
        });
    }
}

impl Config {
    /// The tokenizer: the given one, else `init_from`'s, else a learned one.
    pub fn tokenizer(&self) -> TokenizerChoice {
        match (&self.data.tokenizer, &self.model.init_from) {
            (Some(given), _) => given.clone(),
            (None, Some(folder)) => TokenizerChoice::Path(folder.clone()),
            (None, None) => TokenizerChoice::Bpe,
        }
    }
}

/// Fills in what conversations need.
fn fill_chat(config: &mut Config, facts: &Facts, report: &mut Report) {
    if facts.chat_date.is_some() && config.data.document_mask == Some(false) {
        let message = "`document_mask` is false, but `train` or `valid` holds conversations, between which attention \
                       would cross; leave it out, or read the rows as text with `format = \"text\"`";
        report.about(&["data.document_mask"], message.to_owned());
    }
    config.data.document_mask.get_or_insert(facts.chat_date.is_some());
    if config.data.today.is_none() {
        config.data.today.clone_from(&facts.chat_date);
    }
}

fn fill_data(config: &mut Config, facts: &Facts, report: &mut Report) {
    fill_chat(config, facts, report);
    let tokenizer = config.tokenizer();
    let makes_one = matches!(tokenizer, TokenizerChoice::Bpe | TokenizerChoice::Chars);
    match &facts.shards {
        Some(shards) if makes_one => {
            if let Some(size) = config.data.bpe_vocab_size {
                let keys = ["data.bpe_vocab_size", "data.train"];
                let message = format!(
                    "`bpe_vocab_size` = {size} learns a vocabulary, but the token shards in {shards:?} bring their \
                     own; {}",
                    report.leave_out(&keys)
                );
                report.about(&keys, message);
            }
            // The word for a learned tokenizer was filled in as a default.
            config.data.tokenizer.get_or_insert(TokenizerChoice::Path(shards.clone()));
        }
        _ => {
            if tokenizer == TokenizerChoice::Bpe {
                config.data.bpe_vocab_size = Some(config.data.bpe_vocab_size());
            }
            config.data.tokenizer = Some(tokenizer);
        }
    }
    if config.data.valid.is_none() {
        config.data.held_out = Some(config.data.held_out());
    }
}

fn model(config: &Config, facts: &Facts, report: &mut Report) -> Option<Description> {
    let known_vocab_size = facts.tokenizer_vocab_size.or(config.data.bpe_vocab_size);
    let model = match (&config.model.init_from, &facts.init) {
        (Some(folder), Some(init)) => from_folder(config, folder, init, report),
        (Some(folder), None) if !complete(config) => {
            let message = format!(
                "the architecture in {folder:?} has not been read, and the file does not give all of it"
            );
            report.about(&["model.init_from"], message);
            return None;
        }
        _ => match config.model.describe(&config.experts, known_vocab_size, config.data.seq_len) {
            Some(model) => model,
            None => {
                let message = "`vocab_size` is missing, and no tokenizer was read that could tell it; \
                    for example `vocab_size = 32000`";
                report.about(&["model.vocab_size"], message.to_owned());
                return None;
            }
        },
    };
    // A vocabulary that is yet to be learned has at least these tokens.
    let is_learned = config.data.tokenizer == Some(TokenizerChoice::Bpe);
    let least = facts.tokenizer_vocab_size.or(is_learned.then_some(MIN_BPE_TOKENS));
    if let Some(tokens) = least
        && model.vocab_size < tokens
    {
        let rows = model.vocab_size;
        let keys = ["model.vocab_size", "data.tokenizer", "model.init_from"];
        let message = match &config.model.init_from {
            Some(folder) if config.data.tokenizer == Some(TokenizerChoice::Path(folder.clone())) => format!(
                "the tokenizer in {folder:?} has {tokens} tokens, but the model there only {rows}; the two do not \
                 belong together: restore the folder's tokenizer.json"
            ),
            Some(folder) => format!(
                "the tokenizer has {tokens} tokens, but the model in {folder:?} only {rows}; leave `data.tokenizer` \
                 out to use the folder's own. docs/data-format.md says what changing a vocabulary needs"
            ),
            None => format!(
                "`vocab_size` = {rows} is less than the tokenizer's {tokens} tokens; {} to use the tokenizer's",
                report.leave_out(&keys)
            ),
        };
        report.about(&keys, message);
    }
    Some(model)
}

/// True if the file gives every size that a folder would give.
fn complete(config: &Config) -> bool {
    let json = serde_json::json!(config.model);
    let taken = FIXED_BY_FOLDER.into_iter().chain(["max_position_embeddings", "rope_theta"]);
    let has_experts = config.model.family().has_experts();
    taken.map(|key| &json[key]).all(|value| !value.is_null())
        && (!has_experts || config.experts.is_complete())
}

/// The folder's model with the file's context extension.
fn from_folder(config: &Config, folder: &str, init: &Description, report: &mut Report) -> Description {
    let mut model = config.model.clone();
    model.fill_from(init);
    let (given, found) = (serde_json::json!(config.model), serde_json::json!(model));
    differing(FIXED_BY_FOLDER, "model", folder, [&given, &found], report);
    if let Some(mixture) = &init.mixture {
        let mut experts = config.experts.clone();
        experts.fill_from(mixture, None);
        let mut given = config.experts.clone();
        // A set of blocks, whose order says nothing.
        if let Some(blocks) = &mut given.dense_blocks {
            blocks.sort_unstable();
            blocks.dedup();
        }
        let (given, found) = (serde_json::json!(given), serde_json::json!(experts));
        differing(EXPERTS_FIXED_BY_FOLDER, "experts", folder, [&given, &found], report);
    }
    let given = &config.model;
    Description {
        max_position_embeddings: given.max_position_embeddings.unwrap_or(init.max_position_embeddings),
        rope_theta: given.rope_theta.unwrap_or(init.rope_theta),
        rope_scaling: given.rope_scaling.map_or(init.rope_scaling, Into::into),
        ..*init
    }
}

/// Reports the keys of a section that are given and differ from those of the folder.
fn differing<const N: usize>(
    keys: [&str; N],
    section: &str,
    folder: &str,
    [given, found]: [&Json; 2],
    report: &mut Report,
) {
    for key in keys {
        if !given[key].is_null() && given[key] != found[key] {
            let values: [&Json; 2] = [&given[key], &found[key]];
            let [given, found] = values.map(toml_value);
            let name = format!("{section}.{key}");
            let leave_out = report.leave_out(&[&name, "model.init_from"]);
            report.about(
                &[&name, "model.init_from"],
                format!("`{key}` is {given}, but {found} in {folder:?}; {leave_out} to use the folder's"),
            );
        }
    }
}
