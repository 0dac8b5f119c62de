//! Checkpoints of a run, written while it trains.
//!
//! A save stops training while the state is copied to host memory. A thread then writes the files from that
//! copy while training continues. Two saves never overlap, and older checkpoints are deleted when the new one
//! is complete.
//!
//! Each rank of a run copies and writes its rows, and rank 0 completes the checkpoint. If one rank has too
//! little memory for the copy, all ranks write directly from their state while training waits.

use super::background_save::{BackgroundSave, WrittenCheckpoint};
use crate::error::RunError;
use crate::folder::RunFolder;
use crate::position::{CONFIG, LOADER, POSITION, Position};
use crate::process_group::ProcessGroup;
use crate::state_io::{self, CheckpointStep, SavedState};
use crate::static_scales;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Instant;
use xtrain_checkpoint::{CheckpointError, CheckpointStore, RunLock, TensorSpec};
use xtrain_config::Config;
use xtrain_data::Loader;
use xtrain_distributed::Channel;
use xtrain_report::metrics::jsonl::Unsynced;
use xtrain_runtime::StateEntry;
use xtrain_step::learner::Learner;
use xtrain_tensor::host::{ALIGN_BYTES, AlignedBytes};

/// The checkpoints of a run folder. Rank 0 locks the folder while this exists.
pub(super) struct CheckpointWriter {
    pub(super) store: Arc<CheckpointStore>,
    /// Connects the ranks of the run. No other calls are made on it, because a thread makes these.
    pub(super) channel: Arc<dyn Channel>,
    folder: PathBuf,
    /// The step that was saved last, or is being saved.
    pub(super) last: Option<u64>,
    writing: Option<BackgroundSave>,
    /// Memory of the copy, reused by the next save.
    memory: Arc<AlignedBytes>,
    /// Memory for the next copy, while a thread touches its pages.
    next_memory: Option<JoinHandle<AlignedBytes>>,
    /// True after the warning that there is no memory for a copy.
    has_warned: bool,
    /// Bytes of available memory, if the system reports them. A copy uses at most half of them.
    pub(super) available_bytes: fn() -> Option<u64>,
    pub(super) write: Write,
    /// Dropped after the writing thread has ended. Only rank 0 has it.
    _lock: Option<RunLock>,
}

/// Function that writes the files of a checkpoint.
pub(super) type Write = fn(&CheckpointStore, &Snapshot) -> Result<PathBuf, RunError>;

/// The part of a run's state after a step that one rank writes.
pub(super) struct Snapshot {
    pub(super) step: u64,
    channel: Arc<dyn Channel>,
    tensors: Vec<TensorSpec>,
    /// The rows of each tensor that this rank writes.
    rows: Vec<Range<usize>>,
    /// Byte range of these rows in the memory.
    places: Vec<Range<usize>>,
    memory: Arc<AlignedBytes>,
    documents: Vec<(String, serde_json::Value)>,
}

impl Snapshot {
    pub(super) fn write(store: &CheckpointStore, of: &Snapshot) -> Result<PathBuf, RunError> {
        let bytes = of.memory.as_slice();
        let step = CheckpointStep { number: of.step, documents: &of.documents };
        let read = &mut |n: usize| Ok(&bytes[of.places[n].clone()]);
        state_io::write(store, of.channel.as_ref(), &step, &of.tensors, &of.rows, read)
    }
}

/// Rule that decides which checkpoints stay.
pub(super) struct Retention {
    keep_last: usize,
    keep_every: u64,
    protected: Vec<u64>,
}

impl Retention {
    /// The rule of the configuration at this position.
    pub(super) fn new(config: &Config, at: &Position) -> Self {
        let protected = at.best.map(|(step, _)| step).into_iter().chain([at.step]).collect();
        Retention {
            keep_last: config.checkpoint.keep_last,
            keep_every: config.checkpoint.keep_every,
            protected,
        }
    }

    pub(super) fn apply(&self, store: &CheckpointStore) -> Result<(), CheckpointError> {
        store.retain(self.keep_last, self.keep_every, &self.protected)
    }
}

impl CheckpointWriter {
    /// Opens the checkpoints of `folder`, and creates the folder if needed. It is an error if another run
    /// writes there, if the run in it has meanwhile begun, or not, contrary to `is_begun`, and if ranks see
    /// different folders. All ranks call it.
    pub(super) fn open(
        folder: &RunFolder,
        is_begun: bool,
        process_group: &ProcessGroup,
    ) -> Result<Self, RunError> {
        let lock = process_group.is_first().then(|| RunLock::acquire(folder.path())).transpose()?;
        if lock.is_some() && folder.is_begun() != is_begun {
            return Err(RunError::Refused(format!(
                "another process began a run in {} meanwhile; start this one again, with --resume to continue that run",
                folder.path().display()
            )));
        }
        process_group.check_shared(folder)?;
        CheckpointWriter::new(folder, process_group.channel(), lock)
    }

    /// A writer of checkpoints of `folder` by the ranks that `channel` connects.
    pub(super) fn new(
        folder: &RunFolder,
        channel: Arc<dyn Channel>,
        lock: Option<RunLock>,
    ) -> Result<Self, RunError> {
        Ok(CheckpointWriter {
            store: Arc::new(CheckpointStore::open(&folder.checkpoints())?),
            channel,
            folder: folder.checkpoints(),
            last: None,
            writing: None,
            memory: Arc::new(AlignedBytes::zeroed(0)),
            next_memory: None,
            has_warned: false,
            available_bytes: xtrain_tensor::available_bytes,
            write: Snapshot::write,
            _lock: lock,
        })
    }

    /// Frees the memory of the copy, after the last save.
    pub(super) fn free_memory(&mut self) {
        // The thread returns the memory that it still holds.
        drop(self.next_memory.take().map(JoinHandle::join));
        self.memory = Arc::new(AlignedBytes::zeroed(0));
    }

    /// Forgets that this step is saved, because its position has changed.
    pub(super) fn outdate(&mut self) {
        self.last = None;
    }

    /// True if any step is saved, or being saved.
    pub(super) fn has_any(&self) -> bool {
        self.last.is_some() || self.store.steps().is_ok_and(|steps| !steps.is_empty())
    }

    /// True if this step is saved, or being saved.
    pub(super) fn holds(&self, step: u64) -> bool {
        self.last == Some(step)
    }

    /// True if a save is in progress, for which [`CheckpointWriter::finish`] may have to wait.
    pub(super) fn is_writing(&self) -> bool {
        self.writing.is_some()
    }

    /// True if a save has ended in the background, so that [`CheckpointWriter::finish`] does not wait for it.
    pub(super) fn is_written(&self) -> bool {
        self.writing.as_ref().is_some_and(BackgroundSave::is_done)
    }

    /// Waits for the save in progress and returns its checkpoint; `None` if there is none.
    pub(super) fn finish(&mut self) -> Result<Option<WrittenCheckpoint>, RunError> {
        self.writing.take().map(BackgroundSave::finish).transpose()
    }

    /// Saves the state, then deletes checkpoints that the configuration does not keep. If `copies` is true,
    /// which [`CheckpointWriter::can_copy`] must have allowed, this copies the state and returns `None` while
    /// a thread writes; else the checkpoint is complete when this returns. It becomes complete only after
    /// `metrics` are on disk. All ranks call it after the same steps, with the same `copies`.
    pub(super) fn begin(
        &mut self,
        learner: &mut Learner,
        loader: &Loader,
        config: &Config,
        at: &Position,
        metrics: Option<Unsynced>,
        copies: bool,
    ) -> Result<Option<WrittenCheckpoint>, RunError> {
        debug_assert!(self.writing.is_none(), "two saves never overlap");
        let begun = Instant::now();
        let (step, state) = (at.step, SavedState::from_learner(learner));
        let mut documents = vec![
            (POSITION.to_owned(), serde_json::json!(at)),
            (LOADER.to_owned(), serde_json::json!(loader.state(step * config.train.batch_size as u64))),
            (CONFIG.to_owned(), serde_json::json!(config.to_toml())),
        ];
        documents.extend(static_scales::document_of(learner.spec()));
        let retention = (self.channel.rank() == 0).then(|| Retention::new(config, at));
        let retain = move |store: &CheckpointStore| retention.map_or(Ok(()), |rule| rule.apply(store));
        let sync = move || metrics.map_or(Ok(()), |metrics| metrics.sync());
        if copies {
            let snapshot = self.copy(learner, &state, step, documents)?;
            let (store, write) = (self.store.clone(), self.write);
            let save = move || {
                sync()?;
                let path = write(&store, &snapshot)?;
                retain(&store)?;
                Ok(path)
            };
            self.writing = Some(BackgroundSave::start(step, begun, &self.folder, save)?);
            self.last = Some(step);
            return Ok(None);
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                "there is too little memory for a copy of the state: training waits for each save"
            );
        }
        sync()?;
        let content = CheckpointStep { number: step, documents: &documents };
        let path = state.save(learner, &self.store, self.channel.as_ref(), &content)?;
        self.last = Some(step);
        retain(&self.store)?;
        Ok(Some(WrittenCheckpoint { step, path, took: begun.elapsed() }))
    }

    /// Copies the rows of `state` that this rank writes.
    fn copy(
        &mut self,
        learner: &mut Learner,
        state: &SavedState,
        step: u64,
        documents: Vec<(String, serde_json::Value)>,
    ) -> Result<Snapshot, RunError> {
        let copied = state.copied();
        let (parts_of_memory, _) = places(&copied);
        // The thread of the last save has released it.
        let Some(memory) = Arc::get_mut(&mut self.memory) else { unreachable!("two saves never overlap") };
        learner.copy_state(&copied, &mut parts(memory.as_mut_slice(), &parts_of_memory))?;
        let rows = state.written();
        let mut parts_of_memory = parts_of_memory.into_iter();
        let place = |rows: &Range<usize>| match rows.is_empty() {
            true => 0..0,
            false => parts_of_memory.next().unwrap_or(0..0),
        };
        Ok(Snapshot {
            step,
            channel: self.channel.clone(),
            tensors: state.tensors(),
            places: rows.iter().map(place).collect(),
            rows,
            memory: self.memory.clone(),
            documents,
        })
    }

    /// Begins to allocate the memory for copies during the first steps, so that the first save stops training
    /// for no longer than the others.
    pub(super) fn prepare(&mut self, learner: &mut Learner) {
        let (_, bytes) = places(&SavedState::from_learner(learner).copied());
        if let Some(mut memory) = self.allocate(bytes) {
            // Without a thread the first copy touches the pages.
            let take = move || {
                memory.commit_pages();
                memory
            };
            self.next_memory = thread::Builder::new().name("memory for saves".to_owned()).spawn(take).ok();
        }
    }

    /// Allocates the memory for a copy of the state, unless an earlier save has. Returns false if there is
    /// too little.
    pub(super) fn can_copy(&mut self, learner: &mut Learner) -> bool {
        if let Some(Ok(memory)) = self.next_memory.take().map(JoinHandle::join) {
            self.memory = Arc::new(memory);
        }
        let (_, bytes) = places(&SavedState::from_learner(learner).copied());
        if self.memory.as_slice().len() < bytes {
            let Some(memory) = self.allocate(bytes) else { return false };
            self.memory = Arc::new(memory);
        }
        true
    }

    /// Allocates `bytes` if at least as many stay free for others.
    fn allocate(&self, bytes: usize) -> Option<AlignedBytes> {
        let is_room = (self.available_bytes)().is_none_or(|available| available / 2 >= bytes as u64);
        if is_room { AlignedBytes::try_zeroed(bytes) } else { None }
    }
}

/// Range of each value in the memory of a copy, and the bytes of all.
pub(super) fn places(entries: &[StateEntry]) -> (Vec<Range<usize>>, usize) {
    let mut end = 0;
    let place = |entry: &StateEntry| {
        let begin = end;
        end = (begin + entry.ty.bytes()).next_multiple_of(ALIGN_BYTES);
        begin..begin + entry.ty.bytes()
    };
    let places = entries.iter().map(place).collect();
    (places, end)
}

/// Splits the memory into these ranges, which are in order.
pub(super) fn parts<'m>(mut memory: &'m mut [u8], places: &[Range<usize>]) -> Vec<&'m mut [u8]> {
    let mut at = 0;
    let mut part = |place: &Range<usize>| {
        let rest = std::mem::take(&mut memory);
        let (part, rest) = rest[place.start - at..].split_at_mut(place.len());
        (memory, at) = (rest, place.end);
        part
    };
    places.iter().map(&mut part).collect()
}
