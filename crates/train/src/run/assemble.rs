//! Assembles a [`Run`] from the parts that beginning and resuming have in common.

use super::describe::{describe, warn_of_no_fp8};
use super::observer::Observer;
use super::reference::StateCopy;
use super::snapshot::CheckpointWriter;
use super::{Hardware, Run, choices};
use crate::corpus::Corpus;
use crate::engine::Processor;
use crate::error::{LearnError, RunError};
use crate::evaluate::Evaluator;
use crate::folder::RunFolder;
use crate::learner::Learner;
use crate::position::Position;
use crate::schedule::Schedule;
use crate::spec::Planned;
use crate::training_spec::TrainingSpec;
use crate::{exchange, fit, source, spec};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_config::{Config, Facts, Parsed};
use xtrain_data::{DataError, Tokenizer};
use xtrain_model::Recipe;
use xtrain_model::hf::HfConfig;
use xtrain_report::metrics::{Event, MetricsSink, Outputs, Resumed, SinkStart};
use xtrain_runtime::Checks;

/// Advice for a run that does not fit into memory.
const LESS: &str = "take a smaller train.micro_batch_size, a shorter data.seq_len or a smaller model";

/// A run that was opened.
pub(super) enum Opened {
    /// The run has steps or other work left.
    Run(Box<Run>),
    /// The run has made `done` steps, at least the requested `steps`, and its end is completely written.
    Finished { done: u64, steps: u64 },
}

/// The data of a run, and its plan.
pub(super) struct Prepared {
    pub(super) corpus: Corpus,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) planned: Planned,
    pub(super) steps: u64,
}

/// Opens the data of a run file and resolves the file with it. `hf` describes the model that training starts
/// from, `tokenizer` is the folder of a run's tokenizer, and `recipe` is used if the file names none.
pub(super) fn prepare(
    parsed: &Parsed,
    hf: Option<&HfConfig>,
    tokenizer: Option<&Path>,
    recipe: Option<Recipe>,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Prepared, RunError> {
    let corpus = Corpus::open(&parsed.config, tokenizer, &mut |notice| match time_is_up() {
        true => ControlFlow::Break(()),
        false => observer.notice(notice),
    })?;
    let prompts = prompts(&parsed.config, &corpus.tokenizer)?;
    let facts = Facts {
        init: hf.map(|hf| hf.model),
        tokenizer_vocab_size: Some(corpus.tokenizer.vocab_size()),
        shards: source::shards(&parsed.config)?.map(|dataset| dataset.folder().display().to_string()),
        epoch_tokens: Some(corpus.loader.epoch_tokens()),
        recipe,
    };
    let planned = spec::planned(parsed.resolve(&facts)?)?;
    let steps = planned.resolved.steps;
    let steps = steps.ok_or_else(|| RunError::Refused("the length of the run is not known".into()))?;
    Ok(Prepared { corpus, prompts, planned, steps })
}

/// The tokens of `eval.prompts`. A prompt that cannot be encoded is refused before the first step.
fn prompts(config: &Config, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>, RunError> {
    let refused = |number: usize, why: &dyn std::fmt::Display| {
        RunError::Refused(format!("[eval] `prompts[{number}]` cannot be continued: {why}"))
    };
    let encoded = |(number, prompt): (usize, &String)| match tokenizer.encode_prompt(prompt) {
        Err(error @ DataError::Internal(_)) => Err(error.into()),
        Err(error) => Err(refused(number, &error)),
        Ok(tokens) if tokens.is_empty() => Err(refused(
            number,
            &"it is empty, and this tokenizer has no token that begins a text; give it some text",
        )),
        Ok(tokens) => Ok(tokens),
    };
    config.eval.prompts.iter().enumerate().map(encoded).collect()
}

/// Refuses an export that would replace a foreign `hf/` or the folder that training starts from.
pub(super) fn check_export(parsed: &Parsed, folder: &RunFolder) -> Result<(), RunError> {
    if !parsed.config.checkpoint.export_hf {
        return Ok(());
    }
    folder.check_hf()?;
    let canonical = |path: &Path| path.canonicalize().ok();
    let from = parsed.config.model.init_from.as_deref().and_then(|from| canonical(Path::new(from)));
    if from.is_none() || canonical(&folder.hf()) != from {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "{} is what model.init_from begins with, and the export of this run would replace it; choose another folder with \
         --out FOLDER, or set checkpoint.export_hf = false",
        folder.hf().display()
    )))
}

/// Refuses a run that does not fit into the memory of `processor`; warns of a recipe that leaves everything
/// in bf16.
pub(super) fn check_fits(planned: &Planned, processor: &Processor) -> Result<(), RunError> {
    warn_of_no_fp8(&planned.spec);
    fit::check(&planned.spec, planned.resolved.config.train.batch_size, processor)
}

/// A learner whose state is still zero, and its processor.
pub(super) struct Loaded {
    pub(super) learner: Learner,
    state_copy: Option<StateCopy>,
    hardware: Hardware,
}

/// Loads the programs of `spec` on `processor`.
pub(super) fn load(spec: TrainingSpec, config: &Config, processor: Processor) -> Result<Loaded, RunError> {
    let hardware = Hardware {
        device: processor.describe(),
        memory_total: processor.total_bytes(),
        peak_flops: processor.peak_flops(),
    };
    let checks = Checks { numerics: config.train.check_numerics, poison: false };
    let engine = processor.engine(checks).map_err(LearnError::from)?;
    let mut learner = Learner::new(engine, spec, config.train.seed).map_err(|e| e.advising(LESS))?;
    let state_copy = if learner.spec().reference { Some(StateCopy::new(&mut learner)?) } else { None };
    Ok(Loaded { learner, state_copy, hardware })
}

/// Sets the initial weights: random ones, or those of `model.init_from`.
pub(super) fn initial_weights(learner: &mut Learner, config: &Config) -> Result<(), RunError> {
    match &config.model.init_from {
        Some(folder) => exchange::import(learner.weights(), Path::new(folder)),
        None => Ok(learner.weights().initialize(config.train.seed, config.model.init_std)?),
    }
}

/// Locks `folder`. Fails if the run in it has meanwhile begun, or not, contrary to `is_begun`.
pub(super) fn lock(folder: &RunFolder, is_begun: bool) -> Result<CheckpointWriter, RunError> {
    let checkpoints = CheckpointWriter::open(folder)?;
    if folder.is_begun() == is_begun {
        return Ok(checkpoints);
    }
    Err(RunError::Refused(format!(
        "another process began a run in {} meanwhile; start this one again, with --resume to continue that run",
        folder.path().display()
    )))
}

/// Everything that a [`Run`] is assembled from.
pub(super) struct Parts {
    pub(super) config: Config,
    pub(super) steps: u64,
    pub(super) folder: RunFolder,
    pub(super) corpus: Corpus,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) hf: Option<HfConfig>,
    pub(super) loaded: Loaded,
    pub(super) checkpoints: CheckpointWriter,
    pub(super) position: Position,
    pub(super) sink: SinkStart,
    /// The event of a resumed run.
    pub(super) resumed: Option<Resumed>,
    /// The algorithms recorded so far, to which those of this process are added; `None` records none.
    pub(super) choices: Option<BTreeMap<String, String>>,
}

/// Opens the metrics files, loads the evaluation, and reports the start to `observer`.
pub(super) fn assemble(parts: Parts, observer: &mut dyn Observer) -> Result<Run, RunError> {
    let Parts { config, steps, folder, corpus, prompts, hf, loaded, checkpoints, position, .. } = parts;
    let Loaded { mut learner, state_copy, hardware } = loaded;
    // A run that has made steps writes the file with its next checkpoint, so that it always matches the
    // latest one.
    if position.step == 0 {
        folder.write("config.toml", &config.to_toml())?;
    }
    let outputs = Outputs { jsonl: config.log.jsonl, tensorboard: config.log.tensorboard };
    let sink = MetricsSink::open(folder.path(), outputs, parts.sink)?;
    let schedule = Schedule::of(&config, steps);
    let identity = exchange::Identity::new(hf, &learner.spec().model, &corpus.tokenizer)?;
    let evaluator = match &corpus.validation {
        Some(_) => {
            let (batch, mask, chunk) =
                (learner.spec().batch, config.data.document_mask, config.train.loss_chunk);
            let evaluator = Evaluator::new(learner.weights(), batch, mask, chunk);
            Some(evaluator.map_err(|e| e.advising(LESS))?)
        }
        None => None,
    };
    if let Some(recorded) = parts.choices {
        choices::record(&folder, recorded, learner.weights().engine());
    }
    observer.started(&config, &describe(learner.spec()), &hardware.device, position.step, steps);
    if let Some(resumed) = parts.resumed {
        observer.event(&Event::Resumed(resumed), steps);
    }
    Ok(Run {
        config,
        steps,
        position,
        folder,
        corpus,
        schedule,
        learner,
        evaluator,
        checkpoints,
        sink,
        hardware,
        identity,
        prompts,
        entropy_is_known: false,
        state_copy,
        profiler: None,
    })
}
