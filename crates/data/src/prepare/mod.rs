//! Preparation of datasets: reads input files, tokenizes them in parallel and writes shards.
//!
//! Memory use does not grow with the input. The shards depend only on the files, the tokenizer and the
//! options, not on the number of threads or on interruptions: a stopped or killed run continues after its
//! last complete shard and ends with the same bytes. The index is written last, so a folder with an index is
//! a complete dataset.

mod cache;
mod dataset_writer;
mod file_names;
mod learn;
mod leftovers;
mod progress;
mod read_ahead;
mod separator;
mod text_files;
mod unfinished;

use std::fs::{self, File, TryLockError};
use std::ops::ControlFlow;
use std::path::Path;

pub use cache::{find_learned, find_prepared, learn_cached, prepare_cached};
pub use learn::{VocabularyKind, learn, learn_for_dataset};
pub use progress::{LearnProgress, Progress};
pub use read_ahead::tokenizing_bytes;
pub use text_files::TextFiles;

use xtrain_checkpoint::temporary_target;

use crate::chat::{ChatEncoder, ChatOptions};
use crate::error::{DataError, Result};
use crate::files;
use crate::input::{BadRows, Compression, Format, InputFile, InputOptions};
use crate::shard::{Dataset, INDEX_FILE};
use crate::tokenizer::Tokenizer;
use dataset_writer::DatasetWriter;
use read_ahead::ReadAhead;
use unfinished::Unfinished;
use xtrain_checkpoint::first_few;

/// Options of a dataset.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOptions {
    /// Location of documents in the files. With `chat`, documents are whole rows, whatever it says.
    pub input: InputOptions,
    /// Rows are conversations, which become documents with trained and other tokens.
    pub chat: Option<ChatOptions>,
    /// A shard ends with the piece of text that brings it to this many tokens.
    pub shard_tokens: u64,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        PrepareOptions { input: InputOptions::default(), chat: None, shard_tokens: 64_000_000 }
    }
}

impl PrepareOptions {
    /// How files are read.
    fn read_as(&self) -> InputOptions {
        InputOptions { whole_rows: self.chat.is_some(), ..self.input.clone() }
    }

    /// The encoder of conversations, if rows are that.
    fn encoder<'t>(&self, tokenizer: &'t Tokenizer) -> Result<Option<ChatEncoder<'t>>> {
        self.chat.as_ref().map(|chat| ChatEncoder::new(tokenizer, chat)).transpose()
    }
}

/// Tokenizes `inputs` into a dataset at `folder`. Continues an interrupted run of equal input, tokenizer and
/// options, or returns its finished dataset. `on_progress` is called a few times a second at most;
/// [`ControlFlow::Break`] stops the run, which can be continued later.
///
/// # Errors
/// Damaged input, with file and location; input without text; input that changed during the run; a folder
/// with other files; a full disk; [`DataError::Interrupted`].
pub fn prepare(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    folder: &Path,
    on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Dataset> {
    refuse_empty(inputs)?;
    let is_new = !folder.exists();
    files::create_folder(folder)?;
    let _lock = lock_or_fail(folder)?;
    let prepared = prepare_locked(inputs, tokenizer, options, folder, on_progress);
    if prepared.is_err() && is_new {
        remove_if_empty(folder);
    }
    prepared
}

/// Removes a folder that has nothing but its lock. What cannot be removed stays.
fn remove_if_empty(folder: &Path) {
    let mut names =
        fs::read_dir(folder).into_iter().flatten().map(|entry| entry.map(|entry| entry.file_name()));
    if names.all(|name| name.is_ok_and(|name| name == LOCK_FILE)) {
        let removed = fs::remove_file(folder.join(LOCK_FILE)).and_then(|()| fs::remove_dir(folder));
        if let Err(error) = removed {
            tracing::debug!("the empty folder {} stays: {error}", folder.display());
        }
    }
}

const LOCK_FILE: &str = ".lock";

/// Opens the lock file of a folder. Its lock admits one writer and ends with the process.
fn open_lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK_FILE);
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(DataError::io(&path, "create the lock"))
}

/// Locks a folder; fails if another process holds the lock.
fn lock_or_fail(folder: &Path) -> Result<File> {
    let lock = open_lock(folder)?;
    match lock.try_lock() {
        Ok(()) => Ok(lock),
        Err(TryLockError::WouldBlock) => Err(DataError::invalid(
            format!("another process is writing to {}", folder.display()),
            "wait for it, or choose another folder",
        )),
        Err(TryLockError::Error(error)) => Err(DataError::io(folder, "lock the folder")(error)),
    }
}

/// Locks a folder; waits if another process holds the lock.
fn lock_or_wait(folder: &Path) -> Result<File> {
    let lock = open_lock(folder)?;
    lock.lock().map_err(DataError::io(folder, "lock the folder"))?;
    Ok(lock)
}

fn prepare_locked(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    folder: &Path,
    on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Dataset> {
    if options.shard_tokens == 0 {
        return Err(DataError::invalid("the shard size is 0 tokens", "set at least 1"));
    }
    let chat = options.encoder(tokenizer)?;
    let made_from = unfinished::describe_inputs(inputs, tokenizer, options, chat.as_ref())?;
    if let Some(dataset) = open_finished(folder, &made_from)? {
        leftovers::remove(folder);
        warn_of_skipped_rows(&dataset, inputs);
        return Ok(dataset);
    }
    let unfinished = match Unfinished::load(folder)? {
        Some(unfinished) if unfinished.made_from == made_from => unfinished,
        _ => {
            discard_unfinished(folder)?;
            refuse_foreign_files(folder)?;
            learn::remove_stale_record(folder, tokenizer)?;
            let record = Unfinished::new(made_from);
            // The record comes first, so that all later files in the folder are known to belong to this run.
            record.save(folder)?;
            record
        }
    };
    leftovers::remove(folder);
    tokenizer.save(folder)?;
    let start = unfinished.position;
    let mut writer = DatasetWriter::start(unfinished, tokenizer, chat.as_ref(), options, folder, inputs)?;
    let input = options.read_as();
    let written = std::thread::scope(|scope| {
        let read_ahead = ReadAhead::start(scope, inputs, &input, tokenizer.cut_rule(), start)
            .map_err(DataError::io(folder, "start a thread that reads"))?;
        read_ahead.batches().iter().try_for_each(|batch| writer.add_batch(batch?, on_progress))
    });
    let finished = written.and_then(|()| writer.finish(on_progress));
    if let Err(error) = &finished
        && !matches!(error, DataError::Interrupted)
        && let Err(error) = leave_nothing(folder, error)
    {
        tracing::debug!("files of a failed run stay: {error}");
    }
    finished
}

/// Removes what a run wrote that failed with `error`, unless it is worth continuing: a learned vocabulary,
/// and complete shards if the input is not to blame. The same input would fail again, and a repaired one is
/// another.
fn leave_nothing(folder: &Path, error: &DataError) -> Result<()> {
    use DataError::{Input, Invalid, Tokenizer};
    if matches!(error, Input { .. } | Tokenizer { .. } | Invalid { .. })
        && let Some(unfinished) = Unfinished::load(folder)?
    {
        // The record goes on to say that what is in the folder belongs to a run.
        Unfinished::new(unfinished.made_from).save(folder)?;
        leftovers::remove_shards(folder)?;
    }
    if folder.join(file_names::LEARNED_FILE).exists() { Ok(()) } else { discard_unfinished(folder) }
}

/// The finished dataset in `folder`, if any. A dataset of other input, tokenizer or options is an error.
fn open_finished(folder: &Path, made_from: &str) -> Result<Option<Dataset>> {
    if !folder.join(INDEX_FILE).exists() {
        return Ok(None);
    }
    let dataset = Dataset::open(folder)?;
    if dataset.inputs() == made_from {
        return Ok(Some(dataset));
    }
    Err(other_dataset(folder))
}

/// Warns of rows that were skipped when a finished dataset was prepared.
fn warn_of_skipped_rows(dataset: &Dataset, inputs: &[InputFile]) {
    if let skipped @ 1.. = dataset.skipped_rows() {
        let rows = if skipped == 1 { "bad row was" } else { "bad rows were" };
        let read = first_few(inputs.iter().map(|input| input.path.display()), 1);
        tracing::warn!("{skipped} {rows} skipped when {read} was tokenized");
    }
}

/// Fails if all input files are empty, before a folder is created.
fn refuse_empty(inputs: &[InputFile]) -> Result<()> {
    // An empty file of another kind is damaged; reading it gives the better error.
    let is_empty = |input: &InputFile| {
        input.bytes == 0 && input.format != Format::Parquet && input.compression == Compression::None
    };
    if inputs.iter().all(is_empty) { Err(no_text(inputs, &BadRows::default())) } else { Ok(()) }
}

fn no_text(inputs: &[InputFile], bad_rows: &BadRows) -> DataError {
    let mut problem = match inputs {
        [input] => format!("{} contains no text", input.path.display()),
        inputs => format!("the {} input files contain no text", inputs.len()),
    };
    if bad_rows.count() > 0 {
        problem += &format!(" ({bad_rows})");
    }
    DataError::invalid(problem, "name input that is not empty")
}

/// Fails if the folder contains the user's files, so that a dataset never mixes with or overwrites them. Our
/// own files (a vocabulary learned for this dataset, a record of the cache) are accepted.
fn refuse_foreign_files(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(DataError::io(folder, "list the folder"))? {
        let name = entry.map_err(DataError::io(folder, "list the folder"))?.file_name();
        let is_ours = name.to_str().is_some_and(|name| {
            let is_unfinished = temporary_target(name) == Some(file_names::UNFINISHED_FILE);
            is_unfinished
                || learn::belongs_to_vocabulary(folder, name)
                || cache::belongs_to_cache(folder, name)
        });
        if name != LOCK_FILE && !is_ours {
            return Err(DataError::invalid(
                format!("{} is not empty (it holds {})", folder.display(), name.to_string_lossy()),
                "name a new or an empty folder",
            ));
        }
    }
    Ok(())
}

/// Removes the files of an unfinished run without a complete shard. Removes the record last, because it
/// identifies the other files.
///
/// # Errors
/// The run has complete shards.
fn discard_unfinished(folder: &Path) -> Result<()> {
    match Unfinished::load(folder)? {
        None => Ok(()),
        Some(unfinished) if unfinished.shards.is_empty() => {
            leftovers::remove(folder);
            leftovers::remove_shards(folder)?;
            Tokenizer::remove_saved(folder)?;
            Unfinished::remove(folder)
        }
        Some(_) => Err(DataError::invalid(
            format!(
                "{} contains an unfinished dataset of other input, tokenizer or options",
                folder.display()
            ),
            "choose another folder, or delete it to start again",
        )),
    }
}

fn other_dataset(folder: &Path) -> DataError {
    DataError::invalid(
        format!("{} already contains a dataset of other input, tokenizer or options", folder.display()),
        "choose another folder, or delete it",
    )
}
