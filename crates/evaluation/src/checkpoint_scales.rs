//! Delayed scales of a checkpoint, for results that are those of its run.

use crate::error::EvaluationError;
use xtrain_checkpoint::{BoxError, Checkpoint, TensorSpec};
use xtrain_program::StateKind;
use xtrain_step::weights::Weights;
use xtrain_tensor::{Shape, TensorType};

/// Reads the delayed scales of a checkpoint, if it has any, into `weights`, which have its masters, and casts
/// the copies of masters that GEMMs read anew. Without them, each cast uses its current amax.
///
/// # Errors
/// A file that cannot be read; errors of the engine.
pub fn read_scales(weights: &mut Weights, checkpoint: &Checkpoint) -> Result<(), EvaluationError> {
    let prefix = StateKind::Scale.prefix();
    let is_scale = |tensor: &&TensorSpec| tensor.name.starts_with(&prefix);
    let specs: Vec<TensorSpec> = checkpoint.tensors().iter().filter(is_scale).cloned().collect();
    if specs.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = specs.iter().map(|spec| spec.name[prefix.len()..].to_owned()).collect();
    let types = specs.iter().map(|spec| TensorType { dtype: spec.dtype, shape: Shape::new(&spec.shape) });
    weights.hold(StateKind::Scale, names.iter().map(String::as_str).zip(types))?;
    let read = checkpoint.load_subset(&specs, &mut |at, bytes| {
        weights.engine().write_state(StateKind::Scale, &names[at], bytes).map_err(BoxError::from)
    });
    read.map_err(|error| EvaluationError::Report(error.into()))?;
    Ok(weights.refresh()?)
}
