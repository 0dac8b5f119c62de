//! Restores a run from its latest checkpoint, also if its number formats have changed.

use super::snapshot::{CheckpointWriter, Retention};
use crate::error::RunError;
use crate::evaluate::Tally;
use crate::learner::Learner;
use crate::position::{CONFIG, LOADER, POSITION, Position, document, prefix, specs, tensor_name};
use std::collections::{HashMap, HashSet};
use xtrain_checkpoint::{BoxError, Checkpoint};
use xtrain_config::{self as config, Config};
use xtrain_data::{Loader, LoaderState};
use xtrain_model::optimizer::Optimizer;
use xtrain_program::StateKind;
use xtrain_runtime::StateEntry;
use xtrain_tensor::{DType, HostTensor, TensorType, View, ViewMut};

impl CheckpointWriter {
    /// Restores the latest complete checkpoint, if any.
    pub(super) fn restore(
        &mut self,
        learner: &mut Learner,
        loader: &Loader,
        config: &Config,
    ) -> Result<Option<Position>, RunError> {
        let Some(checkpoint) = self.store.latest()? else { return Ok(None) };
        let text = document::<String>(&checkpoint, CONFIG)?;
        let before = Config::parse::<&str>(&checkpoint.path().join("config.toml"), text.as_bytes(), &[]).ok();
        if let Some(before) = &before {
            for change in config::diff(&before.config, config) {
                tracing::info!("changed since the checkpoint: {change}");
            }
        }
        let mut position: Position = document(&checkpoint, POSITION)?;
        if let (Some(before), Some(recipe)) = (&before, config.precision.recipe)
            && before.config.precision.recipe != Some(recipe)
        {
            tracing::info!(
                "from step {} on the run computes in {}; masters, moments and counters are those of the checkpoint",
                position.step + 1,
                recipe.name()
            );
        }
        let is_as_before = before.is_some_and(|before| before.config.precision == config.precision);
        if !is_as_before {
            // An evaluation or a segment that began in other formats is restarted or dropped.
            position.evaluation = position.evaluation.map(|_| Tally::default());
            position.reference = None;
        }
        let state: LoaderState = document(&checkpoint, LOADER)?;
        let samples = loader.resume(&state)?;
        let expected = position.step * config.train.batch_size as u64;
        if samples != expected {
            return Err(RunError::Refused(format!(
                "the checkpoint is at sample {samples} of its data, but {} steps of train.batch_size = {} are {expected}; resume with the batch \
                 size that the run began with",
                position.step, config.train.batch_size
            )));
        }
        // A recipe with delayed scales begins without scales if the checkpoint is of another recipe.
        let of_casts = [StateKind::Scale, StateKind::AmaxHistory];
        let held: HashMap<&str, &[usize]> = checkpoint
            .tensors()
            .iter()
            .map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice()))
            .collect();
        let mut entries = learner.saved_state();
        if !is_as_before {
            // A history of another length cannot be continued: scales stay, and the history begins again.
            let goes_on = |entry: &StateEntry| {
                let shape = held.get(tensor_name(entry).as_str());
                shape.is_some_and(|shape| entry.kind != StateKind::AmaxHistory || **shape == *entry.ty.shape)
            };
            entries.retain(|entry| !of_casts.contains(&entry.kind) || goes_on(entry));
        }
        let optimizer = learner.spec().optimizer;
        let mut wanted = specs(&entries);
        for (spec, entry) in wanted.iter_mut().zip(&entries) {
            spec.dtype = saved_type(&checkpoint, entry, optimizer);
        }
        if let Some((spec, entry)) =
            wanted.iter().zip(&entries).find(|(spec, entry)| spec.dtype != entry.ty.dtype)
        {
            tracing::info!(
                "from step {} on {} are stored in {}; those of the checkpoint are in {} and {}",
                position.step + 1,
                optimizer.state_name(),
                entry.ty.dtype,
                spec.dtype,
                if entry.ty.dtype == DType::BF16 {
                    "are rounded to the nearest"
                } else {
                    "keep their values"
                }
            );
        }
        let named: HashSet<&str> = wanted.iter().map(|spec| spec.name.as_str()).collect();
        let is_of_casts = |name: &str| of_casts.iter().any(|kind| name.starts_with(&prefix(*kind)));
        let load = match held.keys().filter(|name| !named.contains(*name)).all(|name| is_of_casts(name)) {
            true => Checkpoint::load_subset,
            false => Checkpoint::load,
        };
        load(&checkpoint, &wanted, &mut |at, bytes| {
            let entry = &entries[at];
            let tensor =
                (wanted[at].dtype != entry.ty.dtype).then(|| in_type(bytes, wanted[at].dtype, entry.ty));
            let bytes = tensor.as_ref().map_or(bytes, HostTensor::bytes);
            learner.write_state(entry.kind, &entry.name, bytes).map_err(BoxError::from)
        })?;
        learner.weights().refresh()?;
        self.last = Some(checkpoint.step());
        // A process that was killed right after a save did not delete the checkpoints that the save replaces.
        Retention::new(config, &position).apply(&self.store)?;
        Ok(Some(position))
    }
}

/// The element type of an entry in the checkpoint. The optimizer's state may be saved in another type than
/// the run now uses; everything else has one type.
fn saved_type(checkpoint: &Checkpoint, entry: &StateEntry, optimizer: Optimizer) -> DType {
    let types = [DType::F32, DType::BF16];
    let may_differ = optimizer.state().contains(&entry.kind);
    let name = tensor_name(entry);
    let held = checkpoint.tensors().iter().find(|tensor| may_differ && tensor.name == name);
    held.map(|tensor| tensor.dtype).filter(|dtype| types.contains(dtype)).unwrap_or(entry.ty.dtype)
}

/// The elements of a tensor of `ty`, saved as `dtype`, converted to its own type.
fn in_type(bytes: &[u8], dtype: DType, ty: TensorType) -> HostTensor {
    let mut wide = vec![0.0f32; ty.numel()];
    View::new(ty.with_dtype(dtype), bytes).widen_into(&mut wide);
    let mut tensor = HostTensor::zeros(ty);
    ViewMut::new(ty, tensor.bytes_mut(), false).write(&wide);
    tensor
}
