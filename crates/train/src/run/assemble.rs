//! Assembles a [`Run`] from the parts that beginning and resuming have in common.

use super::describe::{describe, warn_of_no_fp8};
use super::observer::Observer;
use super::reference::StateCopy;
use super::saturation::Saturation;
use super::snapshot::CheckpointWriter;
use super::together::Together;
use super::{Hardware, Run, choices};
use crate::corpus::{Corpus, RecordedText};
use crate::error::RunError;
use crate::evaluate::Evaluator;
use crate::folder::RunFolder;
use crate::position::Position;
use crate::process_group::ProcessGroup;
use crate::{exchange, source, static_scales};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_config::{Config, Device as DeviceChoice, Facts, Parsed};
use xtrain_data::{DataError, TokenStream, Tokenizer};
use xtrain_model::Recipe;
use xtrain_model::hf::HfConfig;
use xtrain_planner::choose::{self, Choice};
use xtrain_planner::estimate::{Device, RunTime};
use xtrain_planner::planned::Planned;
use xtrain_planner::tunable::Field;
use xtrain_planner::{fit, planned};
use xtrain_report::LiveReport;
use xtrain_report::metrics::{Command, Event, MetricsSink, Outputs, Resumed, SinkStart};
use xtrain_runtime::Checks;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::learner::Learner;
use xtrain_step::programs;
use xtrain_step::schedule::Schedule;
use xtrain_step::training_spec::TrainingSpec;

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
    /// `log.command`. It is removed from the configuration, because a recorded configuration must not start
    /// programs.
    pub(super) command: Vec<String>,
}

/// Opens the data of a run file and resolves the file with it. `hf` describes the model that training starts
/// from, `folder` is that of the run, begun or not, and `recipe` replaces a recipe that the file leaves open.
pub(super) fn prepare(
    parsed: &Parsed,
    folder: &RunFolder,
    hf: Option<&HfConfig>,
    recipe: Option<Recipe>,
    process_group: &ProcessGroup,
    observer: &mut dyn Observer,
    time_is_up: &dyn Fn() -> bool,
) -> Result<Prepared, RunError> {
    let run = process_group.decide(|| Ok(folder.is_begun()))?.then_some(folder);
    let mut opened = || {
        Corpus::open(&parsed.config, run, &mut |notice| match time_is_up() {
            true => ControlFlow::Break(()),
            false => observer.notice(notice),
        })
    };
    let is_interrupted = |error: &RunError| matches!(error, RunError::Data(DataError::Interrupted));
    let corpus =
        process_group.after_first_of_node(&mut opened, is_interrupted)?.ok_or(DataError::Interrupted)?;
    let prompts = prompts(&parsed.config, &corpus.tokenizer)?;
    let scales = process_group.decide(|| static_scales::of_run(parsed, run))?;
    let facts = Facts {
        static_scales: static_scales::parse(scales)?,
        init: hf.map(|hf| hf.model),
        init_balance_loss: hf.and_then(|hf| hf.balance_loss),
        tokenizer_vocab_size: Some(corpus.tokenizer.vocab_size()),
        shards: source::shards(&parsed.config)?.map(|dataset| dataset.name().to_owned()),
        epoch_tokens: Some(corpus.loader.epoch_tokens()),
        recipe,
        world_size: Some(process_group.rank().world_size),
    };
    let mut planned = planned::planned_for(parsed.resolve(&facts)?, process_group.rank())?;
    let config = &mut planned.resolved.config;
    config.log.command = Vec::new();
    config.train.out = Some(folder.path().display().to_string());
    if config.train.started_in.is_none() {
        let current = std::env::current_dir().ok();
        config.train.started_in = current.and_then(|current| current.into_os_string().into_string().ok());
    }
    let steps = planned.resolved.steps;
    let steps = steps.ok_or_else(|| RunError::Refused("the length of the run is unknown".into()))?;
    Ok(Prepared { corpus, prompts, planned, steps, command: command(parsed) })
}

/// The program to start. One in the `config.toml` of a run folder is ignored, because the folder may come
/// from anywhere.
fn command(parsed: &Parsed) -> Vec<String> {
    let command = &parsed.config.log.command;
    let is_of_a_run = |file: &Path| RunFolder::of_config(file).is_some();
    match parsed.file_with("log.command").filter(|file| !command.is_empty() && is_of_a_run(file)) {
        None => command.clone(),
        Some(file) => {
            tracing::warn!(
                "{}: log.command is ignored in the configuration of a run folder; set it in a run file or with --set",
                file.display()
            );
            Vec::new()
        }
    }
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
    let from = source::init_folder(&parsed.config).and_then(|from| canonical(&from));
    if from.is_none() || canonical(&folder.hf()) != from {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "{} is the folder of model.init_from, and the export of this run would replace it; choose another folder with \
         --out FOLDER, or set checkpoint.export_hf = false",
        folder.hf().display()
    )))
}

/// Refuses a run that does not fit into the memory of `processor`; warns of a recipe that leaves everything
/// in bf16.
pub(super) fn check_fits(
    planned: &Planned,
    processor: &Processor,
    process_group: &ProcessGroup,
) -> Result<(), RunError> {
    if process_group.is_first() {
        warn_of_no_fp8(&planned.spec);
    }
    Ok(fit::check(planned, processor, process_group.processes_here())?)
}

/// The processor of this rank.
pub(super) fn processor(config: &Config, process_group: &ProcessGroup) -> Result<Processor, RunError> {
    let visible = if config.train.device == DeviceChoice::Cpu { 0 } else { Processor::visible_gpus() };
    let gpu = if visible == 0 { 0 } else { process_group.gpu(visible)? };
    Ok(Processor::for_config_at(config, gpu)?)
}

/// The device for which time is estimated and settings are chosen, with measured rates on a CPU or if
/// `train.tune` is set.
pub(super) fn measured_device(
    config: &Config,
    processor: &Processor,
    process_group: &ProcessGroup,
) -> Device {
    let recipe = config.precision.recipe.unwrap_or(processor.target().recipe());
    let device =
        Device::measured(processor, recipe, config.train.tune).shared_by(process_group.processes_here());
    device.connected(|network| network.of_run(&config.parallel))
}

/// The remaining time of the run `planned` after `done` steps.
pub(super) fn run_time(planned: &Planned, device: &Device, done: u64) -> Result<RunTime, RunError> {
    let program = programs::training(&planned.spec).map_err(LearnError::from)?;
    Ok(RunTime::estimate(planned, &program, device, done)?)
}

/// Lines that report the choice and the remaining time after `done` steps.
pub(super) fn report_lines(
    planned: &Planned,
    choice: Option<Choice>,
    device: &Device,
    done: u64,
) -> Result<Vec<String>, RunError> {
    let choice = choice.filter(|choice| !choice.is_usual());
    let mut lines: Vec<String> = choice.iter().map(|choice| format!("chosen: {choice}")).collect();
    if planned.resolved.steps.is_none_or(|steps| steps > done) {
        lines.push(format!("the run takes {}", run_time(planned, device, done)?));
    }
    Ok(lines)
}

/// A learner whose state is still zero, and its processor.
pub(super) struct Loaded {
    pub(super) learner: Learner,
    /// For validation data, if there are any.
    evaluator: Option<Evaluator>,
    state_copy: Option<StateCopy>,
    hardware: Hardware,
    /// The algorithms recorded so far.
    recorded: BTreeMap<String, String>,
}

/// Loads the programs of `spec` on `processor`. Rank 0 uses the algorithms that are `recorded` and chooses
/// the others, and the other ranks use those of rank 0.
pub(super) fn load(
    spec: TrainingSpec,
    config: &Config,
    processor: Processor,
    corpus: &Corpus,
    process_group: &ProcessGroup,
    recorded: BTreeMap<String, String>,
) -> Result<Loaded, RunError> {
    let world_size = process_group.rank().world_size;
    let described = match world_size {
        1 => processor.describe(),
        n => format!("{n} x {}", processor.describe()),
    };
    let hardware = Hardware {
        device: described,
        memory_total: processor.total_bytes(),
        peak_flops: processor.peak_flops().map(|peak| peak * world_size as f64),
    };
    let checks = Checks { numerics: config.train.check_numerics, poison: false };
    // All ranks connect at once, before rank 0 prepares programs alone.
    let path = process_group.data_path(&processor, &config.parallel)?;
    let work = |of_rank_0: Option<BTreeMap<String, String>>| {
        let recorded = of_rank_0.unwrap_or(recorded);
        processor.adopt(&recorded);
        let engine =
            processor.engine_of_rank(checks, process_group.communicator(), path).map_err(LearnError::from)?;
        let mut learner = Learner::new(engine, spec, config.train.seed).map_err(|e| e.advising(LESS))?;
        let state_copy = if learner.spec().reference { Some(StateCopy::new(&mut learner)?) } else { None };
        let evaluator = match &corpus.validation {
            Some(validation) => {
                let (batch, mask, chunk) =
                    (learner.spec().batch, config.data.document_mask, config.train.loss_chunk());
                let sources = validation.source_names().len();
                let evaluator = Evaluator::new(learner.weights(), batch, mask, chunk, sources);
                Some(evaluator.map_err(|e| e.advising(LESS))?)
            }
            None => None,
        };
        Ok(Loaded { learner, evaluator, state_copy, hardware, recorded })
    };
    process_group.after_first(work, |loaded: &mut Loaded| {
        let mut choices = loaded.recorded.clone();
        choices.extend(loaded.learner.weights().engine().choices());
        choices
    })
}

/// Sets the initial weights: random ones, or those of `model.init_from`.
pub(super) fn initial_weights(learner: &mut Learner, config: &Config) -> Result<(), RunError> {
    match source::init_folder(config) {
        Some(folder) => exchange::import(learner.weights(), &folder),
        None => Ok(learner.weights().initialize(config.train.seed, config.model.init_std)?),
    }
}

/// Everything that a [`Run`] is assembled from.
pub(super) struct Parts {
    pub(super) process_group: ProcessGroup,
    pub(super) config: Config,
    /// The settings that were chosen.
    pub(super) chosen: Vec<&'static Field>,
    pub(super) steps: u64,
    pub(super) folder: RunFolder,
    pub(super) corpus: Corpus,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) hf: Option<HfConfig>,
    pub(super) loaded: Loaded,
    pub(super) checkpoints: CheckpointWriter,
    pub(super) position: Position,
    pub(super) sink: SinkStart,
    /// `log.command`.
    pub(super) command: Vec<String>,
    /// The event of a resumed run.
    pub(super) resumed: Option<Resumed>,
    /// True if the algorithms of this process are added to those that the run folder records.
    pub(super) records_choices: bool,
}

/// The configuration as the run folder keeps it: with comments on what was chosen.
pub(super) fn commented(config: &Config, chosen: &[&'static Field]) -> String {
    let comments: Vec<_> = chosen.iter().map(|field| (field.key, choose::COMMENT)).collect();
    config.to_toml_with(&comments)
}

/// The metrics files and the report of the run. Only rank 0 writes any; it also starts `log.command` and
/// writes the files that a run folder has from its beginning.
fn outputs(parts: &Parts) -> Result<(MetricsSink, Option<LiveReport>), RunError> {
    let Parts { process_group, config, folder, .. } = parts;
    if !process_group.is_first() {
        let none = Outputs { jsonl: false, tensorboard: false };
        return Ok((MetricsSink::open(folder.path(), none, SinkStart::Fresh, "", None)?, None));
    }
    // Before anything says that a run has begun here.
    let command = Command::start(&parts.command, folder.path())?;
    // A run that has made steps writes the file with its next checkpoint, so that it always matches the
    // latest one.
    if parts.position.step == 0 {
        folder.write("config.toml", &commented(config, &parts.chosen))?;
    }
    RecordedText::save(&parts.corpus.texts, folder)?;
    let outputs = Outputs { jsonl: config.log.jsonl, tensorboard: config.log.tensorboard };
    let sink = MetricsSink::open(folder.path(), outputs, parts.sink, &config.to_toml(), command)?;
    let live = config.log.jsonl.then(|| LiveReport::open(folder.path(), config.to_toml())).transpose()?;
    Ok((sink, live))
}

/// Opens the outputs of the run and reports its start to `observer`.
pub(super) fn assemble(parts: Parts, observer: &mut dyn Observer) -> Result<Run, RunError> {
    let (sink, live) = outputs(&parts)?;
    let Parts {
        process_group, config, chosen, steps, folder, corpus, prompts, hf, loaded, checkpoints, ..
    } = parts;
    let mut position = parts.position;
    let Loaded { mut learner, evaluator, state_copy, hardware, recorded } = loaded;
    let schedule = Schedule::from_config(&config, steps);
    position.divergence.begin(learner.spec().model.vocab_size);
    let (model, tokenizer) = (&learner.spec().model, &corpus.tokenizer);
    let identity = exchange::Identity::new(hf, model, tokenizer, config.experts.balance_loss)?;
    if parts.records_choices && process_group.is_first() {
        choices::record(&folder, recorded, learner.weights().engine());
    }
    if process_group.is_first() {
        observer.started(&config, &describe(learner.spec()), &hardware.device, position.step, steps);
        if let Some(resumed) = parts.resumed {
            observer.event(&Event::Resumed(resumed), steps);
        }
    }
    Ok(Run {
        process_group,
        config,
        chosen,
        steps,
        position,
        folder,
        corpus,
        schedule,
        learner,
        evaluator,
        checkpoints,
        sink,
        live,
        hardware,
        identity,
        prompts,
        entropy_is_known: false,
        state_copy,
        profiler: None,
        together: Together::default(),
        saturation: Saturation::default(),
    })
}
