//! A model opened for use, from a run folder or a Hugging Face folder.

use crate::adapter_folder::AdapterFolder;
use crate::error::RunError;
use crate::exchange::{self, Identity};
use crate::folder::RunFolder;
use crate::growth;
use crate::paths::{Sources, today};
use crate::{base_model, position, run_file, source, state_io, static_scales};
use std::path::Path;
use std::sync::Arc;
use xtrain_checkpoint::hf::{self, ExportDtype};
use xtrain_checkpoint::{BoxError, Checkpoint, CheckpointStore, TensorSpec};
use xtrain_config::{Config, Device, Facts, ParallelConfig, PrecisionConfig};
use xtrain_data::{ChatOptions, LoaderState, Tokenizer};
use xtrain_evaluation::read_scales;
use xtrain_model::hf::HfConfig;
use xtrain_model::{Architecture, Numerics, Recipe};
use xtrain_planner::hf_names;
use xtrain_planner::planned::{self, Planned};
use xtrain_program::StateKind;
use xtrain_runtime::Checks;
use xtrain_step::engine::{Processor, ProcessorChoice};
use xtrain_step::error::LearnError;
use xtrain_step::weights::Weights;

/// A model with its tokenizer, ready to evaluate, generate or export.
pub struct OpenedModel {
    /// The weights, in masters.
    pub weights: Weights,
    /// The tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Metadata for an export.
    pub identity: Identity,
    /// Step of the checkpoint, if the model is from a run.
    pub step: Option<u64>,
    /// True if it was trained with attention inside documents; false for a Hugging Face folder, which does
    /// not say.
    pub document_mask: bool,
    /// Default element type of an export: the run's `checkpoint.export_dtype`, or the smallest type that
    /// holds the weights of the Hugging Face folder exactly.
    pub export_dtype: ExportDtype,
    /// Length of the sequences that it was trained on, if the model is from a run.
    pub seq_len: Option<usize>,
    /// Tokens of a micro-batch of the run, if the model is from one.
    pub batch_tokens: Option<usize>,
    /// The run, if the model is from one.
    pub(crate) run: Option<RunOrigin>,
}

/// Location of the data of a run.
pub(crate) struct RunOrigin {
    /// Its settings.
    pub(crate) config: Config,
    /// Its folder.
    pub(crate) folder: RunFolder,
    /// State of its loader.
    pub(crate) loader: LoaderState,
    /// The precision of the checkpoint, as it is recorded.
    precision: PrecisionConfig,
}

/// Selection of a run's checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The latest complete checkpoint.
    Latest,
    /// The checkpoint with the lowest validation loss.
    Best,
    /// The checkpoint of this step.
    Step(u64),
}

impl OpenedModel {
    /// The settings with which conversations are rendered: those of the model's run, or the template of the
    /// folder and the date of today.
    ///
    /// # Errors
    /// `data.today` of the run is no date.
    pub fn chat_options(&self) -> Result<ChatOptions, RunError> {
        match &self.run {
            Some(run) => Sources::resolve(&run.config).run_chat_options(&self.tokenizer),
            None => Ok(ChatOptions { today: today(), ..ChatOptions::default() }),
        }
    }

    /// The steps of the complete checkpoints of the run, in order.
    ///
    /// # Errors
    /// The model is not from a run; its folder cannot be read.
    pub fn checkpoints(&self) -> Result<Vec<u64>, RunError> {
        let run = self.run.as_ref().ok_or_else(|| {
            RunError::Refused("only a run has several checkpoints; name the folder of one".into())
        })?;
        Ok(CheckpointStore::open(&run.folder.checkpoints())?.steps()?)
    }

    /// Reads the weights and delayed scales of another checkpoint of the run. Returns false, and reads
    /// nothing, if that must be opened instead: it was trained in another precision, or at static scales, or
    /// the model is not from a run.
    ///
    /// # Errors
    /// There is no such checkpoint; a file that cannot be read.
    pub fn read_checkpoint(&mut self, which: Which) -> Result<bool, RunError> {
        let Some(run) = &self.run else { return Ok(false) };
        let checkpoint = checkpoint(&run.folder, which)?;
        let is_same =
            position::precision_of(&checkpoint)? == run.precision && run.precision.static_scales.is_none();
        if is_same {
            load_masters(&mut self.weights, &checkpoint, &run.folder)?;
            self.step = Some(checkpoint.step());
            self.read_scales()?;
        }
        Ok(is_same)
    }

    /// Reads the delayed scales of the checkpoint, if the model is open in the precision of the run: results
    /// are those of the run's own evaluation.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read_scales(&mut self) -> Result<(), RunError> {
        let (Some(run), Some(step)) = (&self.run, self.step) else { return Ok(()) };
        let is_same = run.precision.recipe == Some(self.weights.numerics().recipe);
        let checkpoint = is_same.then(|| checkpoint(&run.folder, Which::Step(step))).transpose()?;
        Ok(checkpoint.map_or(Ok(()), |checkpoint| read_scales(&mut self.weights, &checkpoint))?)
    }
}

/// Opens `folder`, a run folder (with config.toml) or a Hugging Face folder (with config.json), on the
/// processor of `choice`. `recipe` replaces the run's recipe, or fp32 for a Hugging Face folder; the run's
/// overrides of an FP8 recipe stay.
pub fn open(
    folder: &Path,
    which: Which,
    choice: impl Into<ProcessorChoice>,
    recipe: Option<Recipe>,
) -> Result<OpenedModel, RunError> {
    let choice = &choice.into();
    if !folder.exists() {
        return Err(source::no_such_folder(folder));
    }
    run_file::refuse_as_run(folder)?;
    let run = RunFolder::new(folder);
    if run.is_begun() {
        return open_run(&run, which, choice, recipe);
    }
    if let Some((run, step)) = RunFolder::of_checkpoint(folder) {
        return Err(RunError::Refused(format!(
            "{} is a checkpoint of a run; name the run folder: {} --step {step}",
            folder.display(),
            run.path().display()
        )));
    }
    if !folder.join("config.json").is_file() {
        if let Some(error) = hf::not_a_model(folder) {
            return Err(error.into());
        }
        return Err(RunError::Refused(format!(
            "{} is neither a run folder (it has no config.toml) nor a Hugging Face folder (no config.json)",
            folder.display()
        )));
    }
    if which != Which::Latest {
        return Err(RunError::Refused(format!(
            "{} is a Hugging Face folder and has no checkpoints to choose from; leave out --step and --best, or name the run folder",
            folder.display()
        )));
    }
    open_hf(folder, None, choice, recipe)
}

/// As [`open`], the model in the Hugging Face folder `folder` with the adapters in the folder `adapter`,
/// whose tokenizer it uses, if that has one.
pub fn open_with_adapter(
    folder: &Path,
    adapter: &Path,
    choice: impl Into<ProcessorChoice>,
    recipe: Option<Recipe>,
) -> Result<OpenedModel, RunError> {
    let run = RunFolder::new(folder);
    if run.is_begun() {
        return Err(RunError::Refused(format!(
            "adapters are added to the model of a folder, and {} is a run; name its export, {}",
            folder.display(),
            run.hf().display()
        )));
    }
    open_hf(folder, Some(adapter), &choice.into(), recipe)
}

fn open_hf(
    folder: &Path,
    adapter: Option<&Path>,
    choice: &ProcessorChoice,
    recipe: Option<Recipe>,
) -> Result<OpenedModel, RunError> {
    let HfModel { source, model, adapter } = HfModel::read(folder, adapter)?;
    let tokenizer = match &adapter {
        Some(adapter) => adapter.tokenizer(folder, &model)?,
        None => Tokenizer::load(folder)?,
    };
    let weights = hf_weights(folder, model, adapter.as_ref(), choice, recipe)?;
    let balance_loss = source.balance_loss;
    let identity = Identity::new(Some(source), weights.model(), &tokenizer, balance_loss)?
        .of_base(Some(&folder.to_string_lossy()));
    let export_dtype = hf::lossless_dtype(folder, &hf_names::fp8_names(weights.model(), weights.numerics()))?;
    Ok(OpenedModel {
        weights,
        tokenizer: tokenizer.into(),
        identity,
        step: None,
        document_mask: false,
        seq_len: None,
        batch_tokens: None,
        export_dtype,
        run: None,
    })
}

/// Opens the Hugging Face folder `folder`, which need not have a tokenizer, as in [`open`], with the adapters
/// of another folder, if one is named: its weights, and the ids of the tokens that end its texts.
pub fn open_without_tokenizer(
    folder: &Path,
    adapter: Option<&Path>,
    device: Device,
    recipe: Option<Recipe>,
) -> Result<(Weights, Vec<u32>), RunError> {
    let HfModel { source, model, adapter } = HfModel::read(folder, adapter)?;
    let weights = hf_weights(folder, model, adapter.as_ref(), &device.into(), recipe)?;
    Ok((weights, source.eos_token_ids))
}

/// The description of a model in a Hugging Face folder.
pub(crate) struct HfModel {
    pub(crate) source: HfConfig,
    /// The model, without adapters.
    pub(crate) model: Architecture,
    /// The adapters of another folder.
    pub(crate) adapter: Option<AdapterFolder>,
}

impl HfModel {
    /// Reads and checks the descriptions and the headers of the weights, and warns of what is not read.
    pub(crate) fn read(folder: &Path, adapter: Option<&Path>) -> Result<HfModel, RunError> {
        let source = source::read_hf_config(folder)?;
        let model = exchange::checked_model(folder, &source)?;
        let adapter = adapter.map(|adapter| AdapterFolder::open(adapter, &model)).transpose()?;
        source::warn_of_notes(folder, &source);
        adapter.iter().for_each(AdapterFolder::warn_of_unknown_keys);
        Ok(HfModel { source, model, adapter })
    }
}

fn hf_weights(
    folder: &Path,
    model: Architecture,
    adapter: Option<&AdapterFolder>,
    choice: &ProcessorChoice,
    recipe: Option<Recipe>,
) -> Result<Weights, RunError> {
    let model = Architecture { adapter: adapter.map(|folder| folder.adapter.clone()), ..model };
    let mut weights = weights(choice, model, recipe.unwrap_or(Recipe::Fp32).into())?;
    exchange::import(&mut weights, folder)?;
    adapter.map_or(Ok(()), |adapter| adapter.import(&mut weights))?;
    Ok(weights)
}

/// A checkpoint of a run, and what describes its model.
pub(crate) struct RunModel {
    pub(crate) checkpoint: Checkpoint,
    /// The precision of the checkpoint, as it is recorded.
    precision: PrecisionConfig,
    /// The description of the folder that the run began from.
    pub(crate) source: Option<HfConfig>,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) planned: Planned,
}

impl RunModel {
    /// Finds the checkpoint of `run` that `which` selects, and resolves its settings.
    pub(crate) fn read(run: &RunFolder, which: Which) -> Result<RunModel, RunError> {
        let mut parsed = Config::load::<&str>(&run.config(), &[])?;
        let checkpoint = checkpoint(run, which)?;
        let precision = position::precision_of(&checkpoint)?;
        parsed.config.precision = precision.clone();
        // A single process reads what any number of them wrote.
        parsed.config.parallel = ParallelConfig::default();
        let source = source::saved_init(&Sources::resolve(&parsed.config), run)?;
        let end = parsed.config.data.end_of_document.as_deref();
        let tokenizer = source::load_tokenizer(&run.tokenizer(), end, source::OWN_TOKENIZERS)?;
        let tokenizer = tokenizer.with_begin_of_document(parsed.config.data.begin_of_document)?;
        // The configuration has all sizes, but not the window of the folder that the run began from.
        let facts = Facts {
            init: source.as_ref().map(|hf| growth::resumed_model(hf.model, &tokenizer)),
            static_scales: static_scales::of_checkpoint(&checkpoint)?,
            ..Facts::default()
        };
        let planned = planned::planned(parsed.resolve(&facts)?)?;
        Ok(RunModel { checkpoint, precision, source, tokenizer, planned })
    }
}

fn open_run(
    run: &RunFolder,
    which: Which,
    choice: &ProcessorChoice,
    recipe: Option<Recipe>,
) -> Result<OpenedModel, RunError> {
    let model = RunModel::read(run, which)?;
    let trained = model.planned.spec.numerics();
    let numerics = Numerics { recipe: recipe.unwrap_or(trained.recipe), ..trained };
    let mut weights = weights(choice, model.planned.spec.model.clone(), numerics)?;
    let RunModel { checkpoint, precision, source, tokenizer, planned } = model;
    load_base(&mut weights, &checkpoint, &planned.resolved.config)?;
    load_masters(&mut weights, &checkpoint, run)?;
    let balance_loss = planned.resolved.config.experts.balance_loss;
    let identity = Identity::new(source, weights.model(), &tokenizer, balance_loss)?
        .trained_by(planned.resolved.config.optimizer.kind)
        .of_base(planned.resolved.config.model.init_from.as_deref());
    Ok(OpenedModel {
        weights,
        tokenizer: tokenizer.into(),
        identity,
        step: Some(checkpoint.step()),
        document_mask: planned.spec.document_mask,
        seq_len: Some(planned.spec.batch.seq_len),
        batch_tokens: Some(planned.spec.scored_tokens()),
        export_dtype: exchange::export_options(&planned.resolved.config).dtype,
        run: Some(RunOrigin {
            loader: position::loader_state(&checkpoint)?,
            folder: run.clone(),
            config: planned.resolved.config,
            precision,
        }),
    })
}

/// Finds the checkpoint of `run` that `which` selects.
pub fn checkpoint(run: &RunFolder, which: Which) -> Result<Checkpoint, RunError> {
    let store = CheckpointStore::open(&run.checkpoints())?;
    let place = run.path().display();
    let latest = || {
        store.latest()?.ok_or_else(|| RunError::Refused(format!("{place} has no complete checkpoint yet")))
    };
    match which {
        Which::Step(step) => Ok(store.checkpoint(step)?),
        Which::Latest => latest(),
        Which::Best => match position::best(&latest()?)? {
            Some((step, _)) => Ok(store.checkpoint(step)?),
            None => Err(RunError::Refused(format!(
                "no checkpoint of {place} is known to be the best: its run kept none (checkpoint.keep_best), or did not \
                 evaluate; leave out --best, or name a --step"
            ))),
        },
    }
}

/// Reads the model under the adapters of a checkpoint, whose run is that of `config`, if it has adapters.
///
/// # Errors
/// A folder that cannot be read, or has changed since the adapters were trained on it.
pub fn load_base(weights: &mut Weights, checkpoint: &Checkpoint, config: &Config) -> Result<(), RunError> {
    let Some(folder) = base_model::folder(config) else { return Ok(()) };
    let option = "generate, chat or eval MODEL --adapter RUN/hf";
    check_base(checkpoint, weights.model(), &folder, option)?;
    base_model::import(weights, &folder)
}

/// Refuses a folder with another model than the one on which the adapters of a checkpoint were trained;
/// `option` names another folder.
pub(crate) fn check_base(
    checkpoint: &Checkpoint,
    model: &Architecture,
    folder: &Path,
    option: &str,
) -> Result<(), RunError> {
    let position: position::Position = position::document(checkpoint, position::POSITION)?;
    position.base.map_or(Ok(()), |trained| base_model::check(folder, model, &trained, option))
}

/// Reads the masters of a checkpoint of `run`, and refreshes the copies that GEMMs read.
pub fn load_masters(weights: &mut Weights, checkpoint: &Checkpoint, run: &RunFolder) -> Result<(), RunError> {
    let masters = weights.masters();
    let specs: Vec<TensorSpec> = masters.iter().map(state_io::tensor).collect();
    let is_master = |name: &str| name.starts_with(&StateKind::Master.prefix());
    let unknown = |name: &str| is_master(name) && !specs.iter().any(|spec| spec.name == name);
    if let Some(other) = checkpoint.tensors().iter().find(|tensor| unknown(&tensor.name)) {
        return Err(RunError::Refused(format!(
            "{} holds {}, which the model of {} does not have: the two are of different runs; restore the folder's own config.toml",
            checkpoint.path().display(),
            other.name,
            run.config().display()
        )));
    }
    checkpoint.load_subset(&specs, &mut |at, bytes| {
        weights.engine().write_state(StateKind::Master, &masters[at].name, bytes).map_err(BoxError::from)
    })?;
    Ok(weights.refresh()?)
}

fn weights(choice: &ProcessorChoice, model: Architecture, numerics: Numerics) -> Result<Weights, RunError> {
    let processor =
        Processor::chosen(choice).map_err(|e| RunError::Refused(format!("no model on a GPU: {e}")))?;
    let engine = processor.engine(Checks::default()).map_err(LearnError::from)?;
    let weights = Weights::new(engine, model, numerics);
    Ok(weights.map_err(|e| e.advising("use a smaller model, or a machine with more memory"))?)
}
