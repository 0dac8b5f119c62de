//! A model opened to be used: from a run folder or from a Hugging Face folder.

use crate::config::Config;
use crate::exchange::{self, Identity};
use crate::programs;
use crate::run::{RunError, RunFolder, saved, setup};
use crate::weights::Weights;
use std::path::Path;
use std::sync::Arc;
use xtrain_checkpoint::{BoxError, CheckpointStore};
use xtrain_data::Tokenizer;
use xtrain_model::Recipe;
use xtrain_program::StateKind;
use xtrain_runtime::CpuEngine;

/// A model with its tokenizer, ready to evaluate, generate or export.
pub struct OpenedModel {
    /// The weights, in masters.
    pub weights: Weights,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// What an export says of it.
    pub identity: Identity,
    /// The step of the checkpoint, where it came from a run.
    pub step: Option<u64>,
}

/// Which checkpoint of a run is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The latest complete one.
    Latest,
    /// That of this step.
    Step(u64),
}

/// Opens `folder`: a run folder (one with config.toml) or a Hugging Face folder (one with config.json). `recipe` replaces the run's, or fp32 for
/// a Hugging Face folder.
pub fn open(folder: &Path, which: Which, recipe: Option<Recipe>) -> Result<OpenedModel, RunError> {
    let run = RunFolder::at(folder);
    if run.is_begun() {
        return open_run(&run, which, recipe);
    }
    if !folder.join("config.json").is_file() {
        return Err(RunError::Refused(format!(
            "{} is neither a run folder (it has no config.toml) nor a Hugging Face folder (no config.json)",
            folder.display()
        )));
    }
    let hf = setup::read_hf_config(folder)?;
    let tokenizer = Tokenizer::load(folder)?;
    let mut weights = weights(hf.model.clone(), recipe.unwrap_or(Recipe::Fp32))?;
    exchange::import(&mut weights, folder)?;
    let identity = Identity::new(Some(hf), weights.model(), &tokenizer);
    Ok(OpenedModel { weights, tokenizer, identity, step: None })
}

fn open_run(run: &RunFolder, which: Which, recipe: Option<Recipe>) -> Result<OpenedModel, RunError> {
    let parsed = Config::load::<&str>(&run.config(), &[])?;
    let planned = setup::planned(parsed.resolve(&Default::default())?)?;
    let store = CheckpointStore::open(&run.checkpoints())?;
    let checkpoint = match which {
        Which::Step(step) => store.at(step)?,
        Which::Latest => store.latest()?.ok_or_else(|| {
            RunError::Refused(format!("{} has no complete checkpoint yet", run.path().display()))
        })?,
    };
    let mut weights = weights(planned.spec.model.clone(), recipe.unwrap_or(planned.spec.recipe))?;
    let masters = weights.masters();
    let specs = saved::specs(&masters);
    let is_master = |name: &str| name.starts_with(&format!("{}/", StateKind::Master.name()));
    let unknown = |name: &str| is_master(name) && !specs.iter().any(|spec| spec.name == name);
    if let Some(other) = checkpoint.tensors().iter().find(|tensor| unknown(&tensor.name)) {
        return Err(RunError::Refused(format!(
            "{} holds {}, which the model of {} does not have: the two are of different runs; restore the folder's own config.toml",
            checkpoint.path().display(),
            other.name,
            run.config().display()
        )));
    }
    checkpoint.load_some(&specs, &mut |at, bytes| {
        weights.engine().write_state(StateKind::Master, &masters[at].name, bytes).map_err(BoxError::from)
    })?;
    weights.refresh()?;
    let tokenizer = Tokenizer::load(run.tokenizer())?;
    let tokenizer = tokenizer.with_begin_of_document(parsed.config.data.begin_of_document)?;
    let source = setup::kept_init(&parsed.config, run)?;
    let identity = Identity::new(source, weights.model(), &tokenizer);
    Ok(OpenedModel { weights, tokenizer, identity, step: Some(checkpoint.step()) })
}

fn weights(model: xtrain_model::Architecture, recipe: Recipe) -> Result<Weights, RunError> {
    let engine = CpuEngine::new(Arc::new(programs::cpu_kernels()));
    Ok(Weights::new(Box::new(engine), model, recipe)?)
}
