//! From a parsed run file to what will be trained, and how.

use super::{RunError, RunFolder, fit};
use crate::config::{Config, Facts, Parsed, Recompute, Resolved, Slower, Source, TokenizerChoice, nearest};
use crate::engine::{Processor, Target};
use crate::exchange;
use crate::programs::TrainingSpec;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_checkpoint::hf::ExportDtype;
use xtrain_data::{DataError, Dataset, InputOptions, TextFiles, TokenStream, Tokenizer, learn, list_inputs};
use xtrain_model::Recipe;
use xtrain_model::decoder::{Batch, Loss};
use xtrain_model::hf::HfConfig;
use xtrain_program as program;

/// What a Hugging Face folder says of its model.
pub(crate) const CONFIG_FILE: &str = "config.json";
/// How text is made with it; not every folder has one.
pub(crate) const GENERATION_FILE: &str = "generation_config.json";

/// What a run file comes to before its data is opened.
pub struct Planned {
    /// The configuration, every default filled in.
    pub resolved: Resolved,
    /// What a step is made of.
    pub spec: TrainingSpec,
    /// Why the vocabulary may turn out smaller than planned, where it may.
    pub vocabulary_bound: Option<String>,
}

impl Planned {
    /// The same with these layers left in bf16, as its configuration then says.
    pub(crate) fn leaving(self, slower: Vec<Slower>) -> Result<Planned, RunError> {
        let Planned { mut resolved, vocabulary_bound, .. } = self;
        resolved.config.precision.skip_slower = Some(slower);
        Ok(Planned { vocabulary_bound, ..planned(resolved)? })
    }
}

/// Resolves a run file without turning its text into tokens: what `xtrain plan` shows. Of the data it opens only what tells the size of
/// the vocabulary: the index of token shards, or the text whose characters are counted. One that is not known is taken at its bound.
pub fn plan(parsed: &Parsed) -> Result<Planned, RunError> {
    plan_on(parsed, Target::of(parsed.config.train.device))
}

/// The same for what its device comes to elsewhere.
pub fn plan_on(parsed: &Parsed, target: Target) -> Result<Planned, RunError> {
    let config = &parsed.config;
    let init = init(config)?;
    let shards = shards(config)?;
    let vocabulary = match (&config.model, &shards, config.tokenizer()) {
        // A plan needs no file that it can do without.
        (m, ..) if m.vocab_size.is_some() || m.init_from.is_some() => Vocabulary::default(),
        (_, _, TokenizerChoice::Bytes) => Vocabulary::of(&Tokenizer::bytes()),
        (_, _, TokenizerChoice::Path(path)) => Vocabulary::of(&Tokenizer::load(path)?),
        (_, Some(dataset), _) => Vocabulary { size: Some(dataset.vocab_size()), bound: None },
        (_, None, TokenizerChoice::Chars) => characters(config)?,
        (_, None, TokenizerChoice::Bpe) => {
            Vocabulary { size: None, bound: Some("a short text yields fewer".into()) }
        }
    };
    let facts = Facts {
        init: init.as_ref().map(|hf| hf.model),
        tokenizer_vocab_size: vocabulary.size,
        shards: shards.map(|dataset| dataset.folder().display().to_string()),
        recipe: Some(target.recipe()),
        ..Facts::default()
    };
    let planned = planned(parsed.resolve(&facts)?)?;
    Ok(Planned { vocabulary_bound: vocabulary.bound, ..planned })
}

/// Refuses a run that does not fit before its text is turned into tokens, which may take long; nothing where only the text tells the size of
/// the vocabulary.
pub(super) fn check_before_text(parsed: &Parsed, processor: &Processor) -> Result<(), RunError> {
    let config = &parsed.config;
    let is_told = config.model.vocab_size.is_some() || config.model.init_from.is_some();
    let is_read = matches!(config.tokenizer(), TokenizerChoice::Bytes | TokenizerChoice::Path(_));
    if !(is_told || is_read || shards(config)?.is_some()) {
        return Ok(());
    }
    let Planned { resolved, spec, .. } = plan_on(parsed, processor.target())?;
    fit::check(&spec, resolved.config.train.batch_size, processor)
}

/// What a plan knows of the vocabulary.
#[derive(Default)]
struct Vocabulary {
    size: Option<usize>,
    /// Why it may turn out smaller.
    bound: Option<String>,
}

impl Vocabulary {
    fn of(tokenizer: &Tokenizer) -> Self {
        Vocabulary { size: Some(tokenizer.vocab_size()), bound: None }
    }
}

/// Whether a source is token shards.
pub(crate) fn are_shards(source: &Source) -> bool {
    Path::new(&source.path).join(DATASET_FILE).is_file()
}

/// The first training source that is token shards.
pub(super) fn shards(config: &Config) -> Result<Option<Dataset>, RunError> {
    let first = config.data.train.0.iter().find(|source| are_shards(source));
    Ok(first.map(|source| Dataset::open(&source.path)).transpose()?)
}

/// The characters of the training text, or all that there are where the text is not there.
fn characters(config: &Config) -> Result<Vocabulary, RunError> {
    let mut texts = Vec::new();
    for source in &config.data.train.0 {
        let field = config.data.text_field(source).to_owned();
        let separator = config.data.separator(source).map(str::to_owned);
        match list_inputs(&[&source.path]) {
            Ok(inputs) => texts.push(TextFiles { inputs, options: InputOptions { field, separator } }),
            Err(DataError::Io { source: error, .. }) if error.kind() == ErrorKind::NotFound => {
                let why =
                    format!("{} is not there to count its characters; these are all of Unicode", source.path);
                // One more token ends a document.
                return Ok(Vocabulary { size: Some(UNICODE_CHARACTERS + 1), bound: Some(why) });
            }
            Err(other) => return Err(other.into()),
        }
    }
    let tokenizer = learn(&texts, xtrain_data::VocabularyKind::Chars, &mut |_| ControlFlow::Continue(()))?;
    Ok(Vocabulary::of(&tokenizer))
}

/// Code points that are characters: all but the surrogates.
const UNICODE_CHARACTERS: usize = 0x11_0000 - 0x800;

/// What a folder of token shards holds.
const DATASET_FILE: &str = "dataset.json";

/// The model folder that training starts from, if any.
pub(crate) fn init(config: &Config) -> Result<Option<HfConfig>, RunError> {
    let Some(folder) = config.model.init_from.as_deref().map(Path::new) else { return Ok(None) };
    if let Some(refused) = no_hf_folder_but_a_run(folder) {
        return Err(refused);
    }
    read_hf_config(folder).map(Some)
}

/// The same for a run that has begun: what it kept. The folder may be gone or changed since.
pub(crate) fn kept_init(config: &Config, run: &RunFolder) -> Result<Option<HfConfig>, RunError> {
    match &config.model.init_from {
        Some(_) if run.source().is_dir() => read_hf_config(&run.source()).map(Some),
        _ => init(config),
    }
}

/// No description of a model is nearly as large.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// Keeps in the run folder what the model folder that training starts from says of its model.
pub(super) fn keep_init(config: &Config, run: &RunFolder) -> Result<(), RunError> {
    let Some(folder) = &config.model.init_from else { return Ok(()) };
    std::fs::create_dir_all(run.source()).map_err(RunError::io(&run.source(), "create"))?;
    for name in [CONFIG_FILE, GENERATION_FILE] {
        let path = Path::new(folder).join(name);
        if path.exists() {
            let text =
                crate::files::read_text(&path, MAX_CONFIG_BYTES).map_err(RunError::io(&path, "read"))?;
            run.write(&format!("source/{name}"), &text)?;
        }
    }
    Ok(())
}

/// What is said of a run folder, or of a checkpoint, that training is to start from.
fn no_hf_folder_but_a_run(folder: &Path) -> Option<RunError> {
    let (run, what, of_step) = match RunFolder::of_checkpoint(folder) {
        Some((run, step)) => (run, "a checkpoint of a run", format!(" --step {step}")),
        None => (Some(RunFolder::at(folder)).filter(RunFolder::is_begun)?, "a run folder", String::new()),
    };
    let (place, hf) = (run.path().display(), run.hf());
    let advice = match hf.is_dir() && of_step.is_empty() {
        true => format!("its model is in {}", hf.display()),
        false => format!("make one of it: xtrain export {place}{of_step} --out FOLDER"),
    };
    Some(RunError::Refused(format!(
        "model.init_from names {}, which is {what} and no Hugging Face folder; {advice}",
        folder.display()
    )))
}

/// What is said of a model folder that is not there.
pub(crate) fn no_such_folder(folder: &Path) -> RunError {
    let name = folder.to_string_lossy();
    if let Some(near) = near_folder(folder) {
        return RunError::Refused(format!("there is no folder {name}; did you mean {}?", near.display()));
    }
    let download = match looks_like_a_hub_id(&name) {
        true => format!(
            "; if it is a model of the Hugging Face Hub, download it first: hf download {name} --local-dir {name}"
        ),
        false => String::new(),
    };
    RunError::Refused(format!("there is no folder {name}; check the path{download}"))
}

/// The folder beside `folder` whose name is nearest to its own, if one is near.
fn near_folder(folder: &Path) -> Option<PathBuf> {
    let parent = folder.parent()?;
    let listed = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    let folders = std::fs::read_dir(listed).ok()?.flatten().filter(|entry| entry.path().is_dir());
    let names: Vec<String> = folders.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    nearest(folder.file_name()?.to_str()?, names.iter().map(String::as_str)).map(|name| parent.join(name))
}

/// `owner/name`, as models are called on the Hub.
fn looks_like_a_hub_id(name: &str) -> bool {
    let is_part = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    name.split_once('/').is_some_and(|(owner, name)| is_part(owner) && is_part(name))
}

/// Reads the config.json of a Hugging Face folder, and the generation_config.json beside it.
pub(crate) fn read_hf_config(folder: &Path) -> Result<HfConfig, RunError> {
    if !folder.exists() {
        return Err(no_such_folder(folder));
    }
    let read =
        |path: &Path| crate::files::read_text(path, MAX_CONFIG_BYTES).map_err(RunError::io(path, "read"));
    let refused = |error| RunError::Model { place: folder.display().to_string(), error };
    let mut hf = HfConfig::parse(&read(&folder.join(CONFIG_FILE))?).map_err(refused)?;
    let generation = folder.join(GENERATION_FILE);
    if generation.exists() {
        hf.parse_generation(&read(&generation)?).map_err(refused)?;
    }
    Ok(hf)
}

pub(crate) fn planned(resolved: Resolved) -> Result<Planned, RunError> {
    let c = &resolved.config;
    let model = resolved.architecture.clone();
    model.validate().map_err(|error| RunError::Model { place: "[model]".into(), error })?;
    let spec = TrainingSpec {
        // Filled in; it has no other default on the CPU.
        recipe: c.precision.recipe.unwrap_or(Recipe::Fp32),
        fp8: c.precision.fp8(&model).map_err(RunError::Refused)?,
        batch: Batch { sequences: c.train.micro_batch_size(), seq_len: c.data.seq_len },
        document_mask: c.data.document_mask,
        attention_deterministic: c.train.attention_deterministic,
        loss: Loss { chunk_tokens: c.train.loss_chunk, z_loss: c.model.z_loss as f32 },
        dropout: c.model.dropout as f32,
        recompute: match c.train.recompute {
            Recompute::None => program::Recompute::None,
            Recompute::Norms => program::Recompute::Norms,
            Recompute::Block => program::Recompute::Block,
        },
        recompute_blocks: c.train.recompute_blocks,
        max_grad_norm: c.optimizer.grad_clip,
        optimizer: c.optimizer.optimizer(c.train.seed),
        reference: c.precision.reference_every > 0,
        model,
    };
    check_sizes(&spec, c.train.batch_size)?;
    if c.checkpoint.export_hf && c.checkpoint.export_dtype == Some(ExportDtype::Fp8) {
        exchange::check_fp8(&exchange::fp8_names(&spec.model, &spec.numerics()))?;
    }
    Ok(Planned { resolved, spec, vocabulary_bound: None })
}

/// Refuses batches whose bytes could not even be counted, or whose tokens dropout could not.
fn check_sizes(spec: &TrainingSpec, batch_size: usize) -> Result<(), RunError> {
    let (m, wide) = (&spec.model, |n: usize| n as u128);
    // Dropout draws by a token's place in the global batch, which has 32 bits.
    if spec.dropout > 0.0 && wide(batch_size) * wide(spec.batch.seq_len) > 1 << 32 {
        return Err(RunError::Refused(format!(
            "a step of {batch_size} sequences of {} tokens is more than dropout can number, which is 2^32 tokens; check \
             train.batch_size and data.seq_len for a slip, or set model.dropout = 0",
            spec.batch.seq_len
        )));
    }
    let tokens = wide(spec.batch.sequences) * wide(spec.batch.seq_len);
    // More than all activations and their gradients: a block has fewer than 32 values, of 4 bytes an element at most.
    if tokens * wide(m.widest()) * 128 * wide(m.layers.len() + 2) < 1 << 62 {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "a micro-batch of {} sequences of {} tokens is more than any machine holds with this model; check data.seq_len and \
         train.micro_batch_size for a slip",
        spec.batch.sequences, spec.batch.seq_len
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const CONFIG: &str = r#"{"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "intermediate_size": 8, "vocab_size": 9, "unheard_of": 1.50}"#;

    #[test]
    fn a_model_of_the_hub_is_recognised_by_its_name() {
        for id in ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "01-ai/Yi_6B"] {
            assert!(looks_like_a_hub_id(id), "{id}");
        }
        for path in ["Qwen", "./Qwen/Qwen3", "/models/Qwen3", "a/b/c", "../a", "a/", "a/b c", "~/a", ""] {
            assert!(!looks_like_a_hub_id(path), "{path}");
        }
    }

    #[test]
    fn a_run_keeps_what_the_folder_that_it_began_from_said() {
        let place = tempfile::tempdir().expect("a folder");
        let (folder, run) = (place.path().join("model"), RunFolder::at(place.path().join("run")));
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join(CONFIG_FILE), CONFIG).expect("written");
        fs::write(folder.join(GENERATION_FILE), r#"{"temperature": 0.6}"#).expect("written");
        let text = format!(
            "[model]\ninit_from = {:?}\n[data]\ntrain = \"a.txt\"\n[train]\nsteps = 1\n",
            folder.display().to_string()
        );
        let config =
            Config::parse::<&str>(Path::new("run.toml"), text.as_bytes(), &[]).expect("a run file").config;
        let before = init(&config).expect("read").expect("there is one");
        assert_eq!(before.generation["temperature"], 0.6);
        keep_init(&config, &run).expect("kept");
        assert_eq!(fs::read_to_string(run.source().join(CONFIG_FILE)).expect("there"), CONFIG);
        fs::remove_dir_all(&folder).expect("removed");
        assert_eq!(kept_init(&config, &run).expect("read"), Some(before));
        fs::remove_dir_all(run.source()).expect("removed");
        assert!(kept_init(&config, &run).is_err(), "what is lost is not passed over");
    }
}
