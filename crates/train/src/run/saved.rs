//! What a checkpoint holds of a run, and how it goes back.

use super::{RunError, RunFolder};
use crate::config::{self, Config, TokenizerChoice};
use crate::evaluate::Tally;
use crate::learner::Learner;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use xtrain_checkpoint::{BoxError, Checkpoint, CheckpointStore, RunLock, TensorSpec};
use xtrain_data::{Loader, LoaderState, Tokenizer};
use xtrain_runtime::StateEntry;

/// How far a run is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Position {
    /// Attempted steps.
    pub step: u64,
    /// Those of them whose update was skipped.
    pub skipped: u64,
    /// Wall time in training steps.
    pub train_seconds: f64,
    /// The step of the best evaluation whose state was kept, and its loss.
    pub best: Option<(u64, f64)>,
    /// The evaluation after this step, where the run was stopped in it.
    #[serde(default)]
    pub evaluation: Option<Tally>,
    /// The entropy of the evaluated targets taken one by one, in nats, where there was an evaluation.
    #[serde(default)]
    pub unigram_entropy: Option<f64>,
}

/// The checkpoints of a run folder, which is locked as long as this lives.
pub(super) struct Saved {
    store: CheckpointStore,
    _lock: RunLock,
    last: Option<u64>,
}

const POSITION: &str = "position";
const LOADER: &str = "loader";
const CONFIG: &str = "config";

impl Saved {
    /// Opens the checkpoints of `folder`, making it if need be; another process that writes there is an error.
    pub(super) fn open(folder: &RunFolder) -> Result<Self, RunError> {
        let lock = RunLock::acquire(folder.path())?;
        Ok(Saved { store: CheckpointStore::open(&folder.checkpoints())?, _lock: lock, last: None })
    }

    /// Puts the latest complete checkpoint back, if there is one.
    pub(super) fn restore(
        &mut self,
        learner: &mut Learner,
        loader: &Loader,
        config: &Config,
    ) -> Result<Option<Position>, RunError> {
        let Some(checkpoint) = self.store.latest()? else { return Ok(None) };
        let text = document::<String>(&checkpoint, CONFIG)?;
        if let Ok(before) =
            Config::parse::<&str>(&checkpoint.path().join("config.toml"), text.as_bytes(), &[])
        {
            for change in config::diff(&before.config, config) {
                tracing::info!("changed since the checkpoint: {change}");
            }
        }
        let position: Position = document(&checkpoint, POSITION)?;
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
        let entries = learner.saved_state();
        checkpoint.load(&specs(&entries), &mut |at, bytes| {
            let entry = &entries[at];
            learner.write_state(entry.kind, &entry.name, bytes).map_err(BoxError::from)
        })?;
        learner.weights().refresh()?;
        self.last = Some(checkpoint.step());
        // A process that was killed right after a save has left what that save was to push out.
        self.retain(config, &position)?;
        Ok(Some(position))
    }

    /// Forgets that this step is saved: what is known of it has changed.
    pub(super) fn outdate(&mut self) {
        self.last = None;
    }

    /// Saves the state, and drops what the configuration does not keep. Returns the checkpoint's folder; nothing if this step is saved already.
    pub(super) fn save(
        &mut self,
        learner: &mut Learner,
        loader: &Loader,
        config: &Config,
        at: &Position,
    ) -> Result<Option<PathBuf>, RunError> {
        if self.last == Some(at.step) {
            return Ok(None);
        }
        let entries = learner.saved_state();
        let documents = [
            (POSITION.to_owned(), serde_json::json!(at)),
            (LOADER.to_owned(), serde_json::json!(loader.state(at.step * config.train.batch_size as u64))),
            (CONFIG.to_owned(), serde_json::json!(config.to_toml())),
        ];
        let mut read =
            |n: usize| learner.read_state(entries[n].kind, &entries[n].name).map_err(BoxError::from);
        let path = self.store.save(at.step, &specs(&entries), &mut read, &documents)?;
        self.last = Some(at.step);
        self.retain(config, at)?;
        Ok(Some(path))
    }

    /// Drops the checkpoints that the configuration does not keep at this position.
    fn retain(&self, config: &Config, at: &Position) -> Result<(), RunError> {
        let protected: Vec<u64> = at.best.map(|(step, _)| step).into_iter().chain([at.step]).collect();
        Ok(self.store.retain(config.checkpoint.keep_last, config.checkpoint.keep_every, &protected)?)
    }
}

/// Refuses to go on with another tokenizer than `kept`, which the run in `folder` began with: its tokens are that one's. Both
/// configurations are resolved. A tokenizer that only lies elsewhere now is the same.
pub(super) fn check_tokenizer(folder: &RunFolder, config: &Config, kept: &Tokenizer) -> Result<(), RunError> {
    let path = folder.config();
    let text = crate::files::read(&path, config::MAX_FILE_BYTES).map_err(RunError::io(&path, "read"))?;
    // What cannot be understood any more says nothing of what changed; the run keeps what it began with in any case.
    let Ok(before) = Config::parse::<&str>(&path, &text, &[]) else { return Ok(()) };
    let of = |config: &Config| (config.tokenizer(), config.data.bpe_vocab_size);
    let is_kept = match config.tokenizer() {
        _ if of(&before.config) == of(config) => true,
        TokenizerChoice::Path(path) => Tokenizer::load(path).is_ok_and(|t| t.hash() == kept.hash()),
        TokenizerChoice::Bytes => Tokenizer::bytes().hash() == kept.hash(),
        TokenizerChoice::Bpe | TokenizerChoice::Chars => false,
    };
    if is_kept {
        return Ok(());
    }
    let changes: Vec<String> = config::diff(&before.config, config)
        .iter()
        .filter(|change| ["data.tokenizer", "data.bpe_vocab_size"].contains(&change.key.as_str()))
        .map(config::Change::to_string)
        .collect();
    Err(RunError::Refused(format!(
        "the tokenizer is another one than the run in {} began with ({}), and its weights know only that one; resume with the \
         tokenizer that it began with, or begin a new run",
        folder.path().display(),
        changes.join(", ")
    )))
}

/// The step of the best checkpoint and its loss, as that checkpoint of its run knows it.
pub(crate) fn best(checkpoint: &Checkpoint) -> Result<Option<(u64, f64)>, RunError> {
    Ok(document::<Position>(checkpoint, POSITION)?.best)
}

/// Tensors are named by kind and name: `moment1/blocks.0.attn_norm.weight`.
pub(crate) fn specs(entries: &[StateEntry]) -> Vec<TensorSpec> {
    let spec = |e: &StateEntry| TensorSpec {
        name: format!("{}/{}", e.kind.name(), e.name),
        dtype: e.ty.dtype,
        shape: e.ty.shape.to_vec(),
    };
    entries.iter().map(spec).collect()
}

fn document<T: serde::de::DeserializeOwned>(checkpoint: &Checkpoint, name: &str) -> Result<T, RunError> {
    serde_json::from_value(checkpoint.document(name)?).map_err(|error| {
        RunError::Refused(format!(
            "{}: {name}.json cannot be understood ({error}); it was written by another version, or damaged: delete this checkpoint to use the one before",
            checkpoint.path().display()
        ))
    })
}
