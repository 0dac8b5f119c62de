//! The state of a learner in checkpoints: the rows of each tensor that a rank has, and how the ranks of a run
//! write them as one checkpoint and read them again. A checkpoint has whole tensors, whatever the ranks that
//! wrote it.

use crate::error::RunError;
use std::ops::Range;
use std::path::PathBuf;
use xtrain_checkpoint::{Begun, BoxError, Checkpoint, CheckpointStore, Others, TensorSpec};
use xtrain_distributed::{Channel, CommError};
use xtrain_runtime::StateEntry;
use xtrain_step::layout::{HeldRows, Layout};
use xtrain_step::learner::Learner;
use xtrain_tensor::{DType, HostTensor, TensorType, View, ViewMut};

/// A state value, and its place in a checkpoint.
#[derive(Clone, Debug)]
pub struct SavedValue {
    /// The value on this rank: all rows, or this rank's.
    pub entry: StateEntry,
    /// The tensor of the checkpoint, with all rows. It may have another element type than the value
    /// ([`SavedState::load`]).
    pub tensor: TensorSpec,
    /// The rows that this rank has.
    pub rows: Range<usize>,
    /// True if this rank saves them, and not another that has the same.
    pub is_saved: bool,
    /// False for a value that other stages of a pipeline have.
    pub is_here: bool,
}

/// The state of a learner in checkpoints.
#[derive(Clone, Debug)]
pub struct SavedState {
    /// The values, which are the same on all ranks but for their rows.
    pub values: Vec<SavedValue>,
}

impl SavedState {
    /// The state of `learner`.
    pub fn from_learner(learner: &mut Learner) -> SavedState {
        let own = learner.saved_state();
        let layout = learner.layout();
        let of_others = |entry: &StateEntry| SavedValue {
            entry: entry.clone(),
            tensor: tensor(entry),
            rows: 0..0,
            is_saved: false,
            is_here: false,
        };
        let values = match learner.saved_state_of_model() {
            [] => own.into_iter().map(|entry| value(layout, entry)).collect(),
            all => {
                let find =
                    |of: &StateEntry| own.iter().find(|own| (own.kind, &own.name) == (of.kind, &of.name));
                all.iter()
                    .map(|of| find(of).map_or_else(|| of_others(of), |own| value(layout, own.clone())))
                    .collect()
            }
        };
        SavedState { values }
    }

    /// The tensors of the checkpoint.
    pub fn tensors(&self) -> Vec<TensorSpec> {
        self.values.iter().map(|value| value.tensor.clone()).collect()
    }

    /// The rows that this rank writes: on the first replica its own, and on rank 0 also what all ranks have.
    pub fn written(&self) -> Vec<Range<usize>> {
        let rows = |value: &SavedValue| if value.is_saved { value.rows.clone() } else { 0..0 };
        self.values.iter().map(rows).collect()
    }

    /// The values of which this rank writes rows, in order.
    pub fn copied(&self) -> Vec<StateEntry> {
        let written = self.values.iter().zip(self.written()).filter(|(_, rows)| !rows.is_empty());
        written.map(|(value, _)| value.entry.clone()).collect()
    }

    /// Writes the rows of this rank and, on rank 0, completes the checkpoint. All ranks call it.
    ///
    /// # Errors
    /// Those of [`write()`] and of the learner.
    pub fn save(
        &self,
        learner: &mut Learner,
        store: &CheckpointStore,
        channel: &dyn Channel,
        step: &CheckpointStep<'_>,
    ) -> Result<PathBuf, RunError> {
        let read = &mut |n: usize| {
            let StateEntry { kind, name, .. } = &self.values[n].entry;
            learner.read_state(*kind, name).map_err(BoxError::from)
        };
        write(store, channel, step, &self.tensors(), &self.written(), read)
    }

    /// Reads this rank's rows of each value and writes them to `learner`, in the element types of the
    /// learner. Refresh the weights afterwards.
    ///
    /// # Errors
    /// Those of [`Checkpoint::load_rows`] and of the learner.
    pub fn load(
        &self,
        checkpoint: &Checkpoint,
        others: Others,
        learner: &mut Learner,
    ) -> Result<(), RunError> {
        let rows: Vec<_> = self.values.iter().map(|value| value.rows.clone()).collect();
        checkpoint.load_rows(&self.tensors(), &rows, others, &mut |n, bytes| {
            let SavedValue { entry, tensor, is_here: true, .. } = &self.values[n] else { return Ok(()) };
            let converted = (tensor.dtype != entry.ty.dtype).then(|| in_type(bytes, tensor.dtype, entry.ty));
            let bytes = converted.as_ref().map_or(bytes, HostTensor::bytes);
            learner.write_state(entry.kind, &entry.name, bytes).map_err(BoxError::from)
        })?;
        Ok(())
    }
}

/// A checkpoint that is about to be written.
pub struct CheckpointStep<'a> {
    /// Steps before it.
    pub number: u64,
    /// Documents, the same on all ranks; those of rank 0 are written.
    pub documents: &'a [(String, serde_json::Value)],
}

/// Writes the rows `rows[i]` of each tensor `tensors[i]` and, on rank 0, completes the checkpoint. All ranks
/// call it, and it returns when the checkpoint is complete. `read(i)` returns the bytes of these rows; it is
/// called only for tensors of which there are any.
///
/// # Errors
/// Those of the checkpoint's writers. An error of any rank leaves no part of the step behind, as soon as the
/// channels of the others report that the run has ended.
pub fn write<B: AsRef<[u8]>>(
    store: &CheckpointStore,
    channel: &dyn Channel,
    step: &CheckpointStep<'_>,
    tensors: &[TensorSpec],
    rows: &[Range<usize>],
    read: &mut dyn FnMut(usize) -> Result<B, BoxError>,
) -> Result<PathBuf, RunError> {
    if channel.rank() > 0 {
        let name = text(channel.broadcast(&[])?)?;
        if !name.is_empty() {
            let report = store.join(&name)?.write(channel.rank(), tensors, rows, read)?;
            channel.gather(&report)?;
        }
        // Only when rank 0 has completed it.
        channel.broadcast(&[])?;
        return Ok(store.step_folder(step.number));
    }
    let path = match store.begin(step.number, tensors, step.documents)? {
        Begun::Exists(path) => {
            channel.broadcast(&[])?;
            path
        }
        Begun::Writing(writer) => {
            channel.broadcast(writer.name().as_bytes())?;
            let report = writer.writer().write(0, tensors, rows, read);
            // An error of this rank removes the folder, so it waits for the ranks that still write there.
            // They would report the missing folder as the first cause.
            let reports = channel.gather(report.as_deref().unwrap_or_default())?;
            report?;
            writer.finish(&reports)?
        }
    };
    channel.broadcast(&[])?;
    Ok(path)
}

fn text(bytes: Vec<u8>) -> Result<String, CommError> {
    String::from_utf8(bytes).map_err(|_| CommError::Mismatch("rank 0 sent no text".into()))
}

/// The checkpoint of which rank 0 knows that it is the latest complete one; `None` if there is none. All
/// ranks call it.
///
/// # Errors
/// Those of [`CheckpointStore::latest`], and a rank that does not see the folder of rank 0.
pub fn latest(store: &CheckpointStore, channel: &dyn Channel) -> Result<Option<Checkpoint>, RunError> {
    if channel.rank() == 0 {
        let latest = store.latest()?;
        let step = latest.as_ref().map(|checkpoint| checkpoint.step().to_string());
        channel.broadcast(step.unwrap_or_default().as_bytes())?;
        return Ok(latest);
    }
    match text(channel.broadcast(&[])?)?.as_str() {
        "" => Ok(None),
        step => {
            let step = step.parse().map_err(|_| CommError::Mismatch("rank 0 sent no step".into()))?;
            Ok(Some(store.checkpoint(step)?))
        }
    }
}

/// A state value, and its place in a checkpoint.
fn value(layout: &Layout, entry: StateEntry) -> SavedValue {
    let mut tensor = tensor(&entry);
    let held = layout.held(entry.kind, &entry.name);
    if let (Some(held), Some(rows)) = (&held, tensor.shape.first_mut()) {
        *rows = held.of;
    }
    let is_saved = layout.saves(entry.kind, &entry.name);
    let rows = held.map_or(0..tensor.rows(), |HeldRows { rows, .. }| rows);
    SavedValue { entry, tensor, rows, is_saved, is_here: true }
}

/// The tensor of a state value of which a rank has all rows. Tensors are named by kind and name:
/// `moment1/blocks.0.attn_norm.weight`.
pub(crate) fn tensor(entry: &StateEntry) -> TensorSpec {
    let StateEntry { kind, name, ty } = entry;
    TensorSpec { name: kind.prefix() + name, dtype: ty.dtype, shape: ty.shape.to_vec() }
}

/// The elements of a tensor of `ty`, saved as `dtype`, converted to its own type.
fn in_type(bytes: &[u8], dtype: DType, ty: TensorType) -> HostTensor {
    let mut wide = vec![0.0f32; ty.numel()];
    View::new(ty.with_dtype(dtype), bytes).widen_into(&mut wide);
    let mut tensor = HostTensor::zeros(ty);
    ViewMut::new(ty, tensor.bytes_mut(), false).write(&wide);
    tensor
}
