//! The stages that beginning and resuming have in common, up to a learner without weights.

use super::choices;
use super::observer::{Observer, Start};
use super::recorded::Recorded;
use super::reference::StateCopy;
use super::reporting::Hardware;
use super::wire;
use crate::corpus::{Corpus, RecordedText};
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::growth;
use crate::paths::Sources;
use crate::process_group::ProcessGroup;
use crate::{adapter_folder, base_model, exchange, position, run_file, source, static_scales, tasks};
use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_config::{Config, Facts, Parsed};
use xtrain_data::{DataError, TokenStream};
use xtrain_evaluation::CheckedTask;
use xtrain_evaluation::loss::Evaluator;
use xtrain_model::hf::HfConfig;
use xtrain_planner::estimate::Device;
use xtrain_planner::planned::{Planned, planned_for};
use xtrain_report::LiveReport;
use xtrain_report::metrics::{Command, MetricsSink, Outputs, SinkStart};
use xtrain_runtime::Checks;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::learner::Learner;
use xtrain_step::scoring::Scorer;
use xtrain_step::training_spec::TrainingSpec;

/// Advice for a run that does not fit into memory.
const MEMORY_ADVICE: &str =
    "take a smaller train.micro_batch_size, a shorter data.seq_len or a smaller model";

/// A run that is being opened: its file, its folder, and the configuration before, if it is resumed.
pub(super) struct Setup<'a> {
    pub(super) parsed: &'a Parsed,
    /// The files that the run file names.
    pub(super) sources: Sources<'a>,
    pub(super) process_group: &'a ProcessGroup,
    pub(super) folder: RunFolder,
    /// The configuration of the latest checkpoint of a resumed run; `None` for a run that begins.
    pub(super) before: Option<Config>,
    /// The `config.toml` of a resumed run, if it can be read.
    pub(super) recorded: Option<Recorded>,
}

impl<'a> Setup<'a> {
    /// Finds the folder of the run, and decides for all ranks whether the run begins there or goes on.
    pub(super) fn find(
        parsed: &'a Parsed,
        start: Start,
        process_group: &'a ProcessGroup,
    ) -> Result<Self, RunError> {
        let folder = run_file::folder(parsed);
        let is_resumed = process_group.decide(|| Ok(start == Start::Resume && folder.is_begun()))?;
        if is_resumed {
            process_group.check_shared(&folder)?;
        }
        let before = is_resumed.then(|| position::config(&folder)).transpose()?;
        let recorded = is_resumed.then(|| Recorded::read(&folder)).flatten();
        let sources = Sources::resolve(&parsed.config);
        Ok(Setup { parsed, sources, process_group, folder, before, recorded })
    }

    /// The folder of the run, if it has begun before.
    pub(super) fn resumed(&self) -> Option<&RunFolder> {
        self.before.is_some().then_some(&self.folder)
    }

    /// Refuses an export that would replace a foreign `hf/` or the folder that training starts from.
    pub(super) fn check_export(&self) -> Result<(), RunError> {
        if !self.parsed.config.checkpoint.export_hf {
            return Ok(());
        }
        self.folder.check_hf()?;
        let canonical = |path: &Path| path.canonicalize().ok();
        let from = self.sources.init_from.as_deref().and_then(canonical);
        if from.is_none() || canonical(&self.folder.hf()) != from {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "{} is the folder of model.init_from, and the export of this run would replace it; choose another folder with \
             --out FOLDER, or set checkpoint.export_hf = false",
            self.folder.hf().display()
        )))
    }

    /// The description of the model that training started from, if any. A resumed run reads its own copy.
    pub(super) fn initial_model(&self) -> Result<Option<HfConfig>, RunError> {
        if let Some(folder) = self.resumed() {
            return source::saved_init(&self.sources, folder);
        }
        let hf = source::init(&self.sources)?;
        if let (Some(from), Some(hf)) = (&self.sources.init_from, &hf) {
            exchange::checked_model(from, hf)?;
            if self.process_group.is_first() {
                source::warn_of_training(from, hf, self.parsed.config.optimizer.kind);
            }
        }
        Ok(hf)
    }

    /// The processor of this rank.
    pub(super) fn processor(&self) -> Result<Processor, RunError> {
        let config = &self.parsed.config;
        Ok(Processor::for_config_at(config, self.process_group.gpu(config.train.device)?)?)
    }

    /// The device for which time is estimated and settings are chosen, with measured rates on a CPU or if
    /// `train.tune` is set.
    pub(super) fn measured_device(&self, config: &Config, processor: &Processor) -> Device {
        let recipe = config.precision.recipe.unwrap_or(processor.target().recipe());
        let processes = self.process_group.processes_here();
        let device = Device::measured(processor, recipe, config.train.tune, processes);
        device.connected(|network| network.of_nodes(processes).of_run(&config.parallel))
    }

    /// Opens the data of the run, and tokenizes text that is not in the cache yet.
    pub(super) fn data(
        &self,
        observer: &mut dyn Observer,
        time_is_up: &dyn Fn() -> bool,
    ) -> Result<Corpus, RunError> {
        let mut open = || {
            Corpus::open(&self.sources, self.resumed(), &mut |notice| match time_is_up() {
                true => ControlFlow::Break(()),
                false => observer.notice(notice),
            })
        };
        let is_interrupted = |error: &RunError| matches!(error, RunError::Data(DataError::Interrupted));
        let corpus = self.process_group.after_first_of_node(&mut open, is_interrupted)?;
        Ok(corpus.ok_or(DataError::Interrupted)?)
    }

    /// Resolves the run file with its data and the model that training starts from; also returns the number
    /// of steps.
    pub(super) fn plan(
        &self,
        corpus: &Corpus,
        tasks: &[CheckedTask],
        hf: Option<&HfConfig>,
        processor: &Processor,
    ) -> Result<(Planned, u64), RunError> {
        let Setup { parsed, process_group, .. } = self;
        let scales = process_group.decide(|| static_scales::of_run(parsed, &self.sources, self.resumed()))?;
        let model = hf.map(|hf| hf.model);
        let growth = growth::in_words(&corpus.growth, model.as_ref()).filter(|_| process_group.is_first());
        if let (Some(growth), true) = (&growth, parsed.config.adapter.is_given()) {
            return Err(RunError::Refused(format!(
                "the vocabulary {growth}, and adapters do not train new tokens yet; use a chat template whose tokens the model has \
                 (data.chat_template), or train the whole model without [adapter]"
            )));
        }
        growth.into_iter().for_each(|growth| tracing::info!("the vocabulary {growth}"));
        let facts = Facts {
            static_scales: static_scales::parse(scales)?,
            init: model.map(|model| match self.resumed() {
                Some(_) => growth::resumed_model(model, &corpus.tokenizer),
                None => growth::grown_model(model, &corpus.growth),
            }),
            init_balance_loss: hf.and_then(|hf| hf.balance_loss),
            init_adapter: match &self.before {
                // A run keeps its adapters, whose folder may be gone.
                Some(before) => Some(before.adapter.clone()),
                None => adapter_folder::settings(&self.sources, model.as_ref())?,
            },
            tokenizer_vocab_size: Some(corpus.tokenizer.vocab_size()),
            shards: source::shards(&self.sources)?.map(|dataset| dataset.name().to_owned()),
            epoch_tokens: Some(corpus.loader.epoch_tokens()),
            // A run keeps its precision on every device.
            recipe: match &self.before {
                Some(before) => before.precision.recipe,
                None => Some(processor.target().recipe()),
            },
            world_size: Some(process_group.rank().world_size),
            chat_date: (corpus.has_chat || tasks.iter().any(|task| task.task.is_chat()))
                .then(|| self.sources.today())
                .transpose()?
                .map(|date| date.to_string()),
        };
        let mut resolved = parsed.resolve(&facts)?;
        if let Some(before) = &self.before {
            wire::resume(parsed, before, &mut resolved.config)?;
            if let Some(recorded) = &self.recorded {
                recorded.resume_room(before, &mut resolved.config);
            }
        }
        let planned = planned_for(resolved, process_group.rank())?;
        let context = planned.spec.model.context();
        let scored = tasks::shapes(tasks, &self.sources, &corpus.tokenizer, context)?;
        let mut planned = planned.with_scored(scored);
        let config = &mut planned.resolved.config;
        // A recorded configuration must not start programs.
        config.log.command = Vec::new();
        config.train.out = Some(self.folder.path().display().to_string());
        if config.train.started_in.is_none() {
            let current = std::env::current_dir().ok();
            config.train.started_in = current.and_then(|current| current.into_os_string().into_string().ok());
        }
        let steps = planned.resolved.steps;
        let steps = steps.ok_or_else(|| RunError::Refused("the length of the run is unknown".into()))?;
        Ok((planned, steps))
    }

    /// The program to start. One in the `config.toml` of a run folder is ignored, because the folder may come
    /// from anywhere.
    pub(super) fn command(&self) -> Vec<String> {
        let command = &self.parsed.config.log.command;
        let is_of_a_run = |file: &Path| RunFolder::of_config(file).is_some();
        let file = self.parsed.file_with("log.command");
        match file.filter(|file| !command.is_empty() && is_of_a_run(file)) {
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

    /// Loads the programs of `spec` on `processor`. Rank 0 uses the algorithms that a resumed run has
    /// recorded and chooses the others, and the other ranks use those of rank 0.
    pub(super) fn load(
        &self,
        spec: TrainingSpec,
        config: &Config,
        processor: Processor,
        corpus: &Corpus,
    ) -> Result<Loaded, RunError> {
        let process_group = self.process_group;
        let recorded = match self.resumed() {
            Some(folder) if process_group.is_first() => choices::recorded(folder),
            _ => BTreeMap::new(),
        };
        let hardware = Hardware::new(&processor, process_group.rank().world_size);
        let checks = Checks { numerics: config.train.check_numerics, poison: false };
        // All ranks connect at once, before rank 0 prepares programs alone.
        let path = process_group.data_path(&processor, &config.parallel)?;
        let work = |of_rank_0: Option<BTreeMap<String, String>>| {
            let recorded = of_rank_0.unwrap_or(recorded);
            processor.adopt(&recorded);
            let engine = processor
                .engine_of_rank(checks, process_group.communicator(), path)
                .map_err(LearnError::from)?;
            let mut learner =
                Learner::new(engine, spec, config.train.seed).map_err(|e| e.advising(MEMORY_ADVICE))?;
            let state_copy =
                if learner.spec().reference { Some(StateCopy::new(&mut learner)?) } else { None };
            let evaluator = match &corpus.validation {
                Some(validation) => {
                    let (batch, mask, chunk) =
                        (learner.spec().batch, config.data.document_mask(), config.train.loss_chunk());
                    let sources = validation.source_names().len();
                    let evaluator = Evaluator::new(learner.weights(), batch, mask, chunk, sources);
                    Some(evaluator.map_err(|e| e.advising(MEMORY_ADVICE))?)
                }
                None => None,
            };
            let mut scorer = Scorer::new(learner.spec().scored_tokens());
            for shape in learner.spec().scored.clone() {
                let prepared = scorer.prepare(learner.weights(), shape);
                prepared.map_err(|e| e.advising(MEMORY_ADVICE))?;
            }
            Ok(Loaded { learner, evaluator, scorer, state_copy, hardware, recorded })
        };
        process_group.after_first(work, |loaded: &mut Loaded| {
            let mut choices = loaded.recorded.clone();
            choices.extend(loaded.learner.weights().engine().choices());
            choices
        })
    }

    /// Opens the metrics files and the report of a run that has made `done` steps. Only rank 0 writes any; it
    /// also starts the program `command`, and writes the files that a run folder has from its beginning.
    pub(super) fn outputs(
        &self,
        config: &Config,
        config_text: &str,
        texts: &[RecordedText],
        done: u64,
        start: SinkStart,
        command: &[String],
    ) -> Result<(MetricsSink, Option<LiveReport>), RunError> {
        let folder = &self.folder;
        if !self.process_group.is_first() {
            let none = Outputs { jsonl: false, tensorboard: false };
            return Ok((MetricsSink::open(folder.path(), none, SinkStart::Fresh, "", None)?, None));
        }
        // Before anything says that a run has begun here.
        let command = Command::start(command, folder.path())?;
        // A run that has made steps writes the file with its next checkpoint, so that it always matches the
        // latest one.
        if done == 0 {
            folder.write("config.toml", config_text)?;
        }
        RecordedText::save(texts, folder)?;
        let outputs = Outputs { jsonl: config.log.jsonl, tensorboard: config.log.tensorboard };
        let sink = MetricsSink::open(folder.path(), outputs, start, &config.to_toml(), command)?;
        let live = config.log.jsonl.then(|| LiveReport::open(folder.path(), config.to_toml())).transpose()?;
        Ok((sink, live))
    }

    /// Sets the initial weights: random ones, or those of `model.init_from` and `adapter.init_from`.
    pub(super) fn initial_weights(&self, learner: &mut Learner, config: &Config) -> Result<(), RunError> {
        let Some(folder) = &self.sources.init_from else {
            return Ok(learner.weights().initialize(config.train.seed, config.model.init_std)?);
        };
        match &self.sources.adapter {
            Some(adapter) => exchange::import_adapters(learner.weights(), adapter)?,
            None if config.adapter.rank.is_some() => {
                learner.weights().initialize_adapters(config.train.seed)?;
            }
            None => {}
        }
        base_model::import(learner.weights(), folder)
    }
}

/// A learner whose state is still zero, and its processor.
pub(super) struct Loaded {
    pub(super) learner: Learner,
    /// For validation data, if there are any.
    pub(super) evaluator: Option<Evaluator>,
    /// For tasks.
    pub(super) scorer: Scorer,
    pub(super) state_copy: Option<StateCopy>,
    pub(super) hardware: Hardware,
    /// The algorithms recorded so far.
    pub(super) recorded: BTreeMap<String, String>,
}
