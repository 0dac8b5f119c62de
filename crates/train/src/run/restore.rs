//! Restores a run from its latest checkpoint, also if its number formats have changed.

use super::snapshot::{CheckpointWriter, Retention};
use crate::error::RunError;
use crate::position::{CONFIG, POSITION, Position, document, next_sample};
use crate::state_io::{self, SavedState, SavedValue};
use crate::static_scales;
use std::collections::{HashMap, HashSet};
use xtrain_checkpoint::{Checkpoint, Others};
use xtrain_config::{self as config, Config};
use xtrain_data::Loader;
use xtrain_evaluation::loss::Tally;
use xtrain_model::optimizer::Optimizer;
use xtrain_planner::learning_rates::Rates;
use xtrain_program::StateKind;
use xtrain_step::learner::Learner;
use xtrain_tensor::DType;

impl CheckpointWriter {
    /// Restores the latest complete checkpoint of rank 0, if any. All ranks call it.
    pub(super) fn restore(
        &mut self,
        learner: &mut Learner,
        loader: &Loader,
        config: &Config,
    ) -> Result<Option<Position>, RunError> {
        let Some(checkpoint) = state_io::latest(&self.store, self.channel.as_ref())? else { return Ok(None) };
        let mut position: Position = document(&checkpoint, POSITION)?;
        let text = document::<String>(&checkpoint, CONFIG)?;
        let before = Config::parse::<&str>(&checkpoint.path().join("config.json"), text.as_bytes(), &[]).ok();
        let before = before.map(|parsed| parsed.config);
        check_balance(before.as_ref(), config)?;
        check_adapters(before.as_ref(), config)?;
        check_optimizer(before.as_ref(), config)?;
        if self.channel.rank() == 0 {
            report_changes(before.as_ref(), config, position.step);
            report_rates(before.as_ref(), config, loader, position.step);
        }
        let scales = static_scales::of_checkpoint(&checkpoint)?.map(|file| file.scales);
        let before_best =
            before.as_ref().map(|before| (before.checkpoint.best.clone(), before.eval.tasks_limit));
        let is_as_before = before.is_some_and(|before| before.precision == config.precision)
            && scales == learner.spec().fp8.static_scales;
        if before_best.is_some_and(|best| best != (config.checkpoint.best.clone(), config.eval.tasks_limit)) {
            // The best by something else.
            position.best = None;
        }
        if !is_as_before {
            // An evaluation or a segment that began in other formats is restarted or dropped.
            position.evaluation = position.evaluation.map(|_| Tally::default());
            position.reference = None;
        }
        check_samples(&checkpoint, loader, config, position.step)?;
        load_state(&checkpoint, learner, position.step)?;
        self.last = Some(checkpoint.step());
        if self.channel.rank() == 0 {
            // A process that was killed right after a save did not delete the checkpoints that the save
            // replaces.
            Retention::new(config, &position).apply(&self.store)?;
        }
        Ok(Some(position))
    }
}

/// Logs the keys that have changed since the checkpoint after `step`, whose configuration was `before`.
fn report_changes(before: Option<&Config>, config: &Config, step: u64) {
    let Some(before) = before else { return };
    for change in config::diff(before, config) {
        tracing::info!("changed since the checkpoint: {change}");
    }
    if let Some(recipe) = config.precision.recipe
        && before.precision.recipe != Some(recipe)
    {
        tracing::info!(
            "from step {} on the run computes in {}; masters, moments and counters are those of the checkpoint",
            step + 1,
            recipe.name()
        );
    }
}

/// Logs how the learning rate goes on after `step`, if `config` has another schedule than that of the
/// checkpoint, whose configuration was `before`.
fn report_rates(before: Option<&Config>, config: &Config, loader: &Loader, step: u64) {
    let rates = before.and_then(|before| Rates::compare(before, config, loader.epoch_tokens(), step));
    match rates {
        Some(rates) if rates.jump.as_ref().is_some_and(|jump| jump.is_up) => tracing::warn!("{rates}"),
        Some(rates) => tracing::info!("{rates}"),
        None => {}
    }
}

/// Refuses another kind of balancing of experts than that of the checkpoint, whose configuration was
/// `before`.
fn check_balance(before: Option<&Config>, config: &Config) -> Result<(), RunError> {
    let name = |config: &Config| config.experts.balance.map(|balance| serde_json::json!(balance));
    match (before.and_then(name), name(config)) {
        (Some(before), Some(now)) if before != now => Err(RunError::Refused(format!(
            "the run began with experts.balance = {before}, and now it is {now}; resume with {before} (its weight or rate may change), or begin \
             a new run"
        ))),
        _ => Ok(()),
    }
}

/// Refuses other adapters than those of the checkpoint, whose configuration was `before`: another rank or
/// other matrices are other state, and another alpha makes another model of it.
fn check_adapters(before: Option<&Config>, config: &Config) -> Result<(), RunError> {
    let changes: Vec<String> = before
        .map(|before| config::diff(before, config))
        .into_iter()
        .flatten()
        .filter(|change| ["adapter.rank", "adapter.alpha", "adapter.targets"].contains(&change.key.as_str()))
        .map(|change| change.to_string())
        .collect();
    if changes.is_empty() {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "the checkpoint has other adapters ({}); resume with those, or begin a new run",
        changes.join(", ")
    )))
}

/// Refuses an optimizer that cannot go on with the state of the checkpoint, whose configuration was `before`.
fn check_optimizer(before: Option<&Config>, config: &Config) -> Result<(), RunError> {
    let refusal = before.and_then(|before| config.optimizer.refuses_state_of(&before.optimizer));
    refusal.map_or(Ok(()), |text| Err(RunError::Refused(text)))
}

/// Refuses a checkpoint after `step` whose data is at another sample than steps of this batch size reach.
fn check_samples(
    checkpoint: &Checkpoint,
    loader: &Loader,
    config: &Config,
    step: u64,
) -> Result<(), RunError> {
    let samples = next_sample(checkpoint, loader)?;
    let expected = step * config.train.batch_size as u64;
    if samples == expected {
        return Ok(());
    }
    Err(RunError::Refused(format!(
        "the checkpoint is at sample {samples} of its data, but {step} steps of train.batch_size = {} are {expected}; resume with the batch \
         size that the run began with",
        config.train.batch_size
    )))
}

/// Loads the state after `step`. The scales of casts that the checkpoint lacks begin anew, and those that
/// the run does not have are ignored: its number formats may be others, and so may its mesh, in which other
/// layers are in FP8.
fn load_state(checkpoint: &Checkpoint, learner: &mut Learner, step: u64) -> Result<(), RunError> {
    let of_casts = [StateKind::Scale, StateKind::AmaxHistory];
    let held: HashMap<&str, &[usize]> =
        checkpoint.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    let mut state = SavedState::from_learner(learner);
    // A history of another length cannot be continued: scales stay, and the history begins again.
    let goes_on = |SavedValue { entry, tensor, .. }: &SavedValue| {
        let shape = held.get(tensor.name.as_str());
        shape.is_some_and(|shape| entry.kind != StateKind::AmaxHistory || **shape == tensor.shape[..])
    };
    state.values.retain(|value| !of_casts.contains(&value.entry.kind) || goes_on(value));
    let optimizer = learner.spec().optimizer;
    for value in &mut state.values {
        value.tensor.dtype = saved_type(checkpoint, value, optimizer);
    }
    let is_other = |value: &&SavedValue| value.tensor.dtype != value.entry.ty.dtype;
    if let Some(SavedValue { entry, tensor, .. }) = state.values.iter().find(is_other) {
        tracing::info!(
            "from step {} on {} are stored in {}; those of the checkpoint are in {} and {}",
            step + 1,
            optimizer.state_name(),
            entry.ty.dtype,
            tensor.dtype,
            if entry.ty.dtype == DType::BF16 { "are rounded to the nearest" } else { "keep their values" }
        );
    }
    let named: HashSet<&str> = state.values.iter().map(|value| value.tensor.name.as_str()).collect();
    let is_of_casts = |name: &str| of_casts.iter().any(|kind| name.starts_with(&kind.prefix()));
    let others = match held.keys().filter(|name| !named.contains(*name)).all(|name| is_of_casts(name)) {
        true => Others::Ignore,
        false => Others::Refuse,
    };
    state.load(checkpoint, others, learner)?;
    Ok(learner.weights().refresh()?)
}

/// The element type of a value in the checkpoint. The optimizer's state may be saved in another type than the
/// run now uses; everything else has one type.
fn saved_type(checkpoint: &Checkpoint, value: &SavedValue, optimizer: Optimizer) -> DType {
    let SavedValue { entry, tensor, .. } = value;
    let types = [DType::F32, DType::BF16];
    let may_differ = optimizer.kinds_of_state().contains(&entry.kind);
    let held = checkpoint.tensors().iter().find(|held| may_differ && held.name == tensor.name);
    held.map(|held| held.dtype).filter(|dtype| types.contains(dtype)).unwrap_or(entry.ty.dtype)
}
