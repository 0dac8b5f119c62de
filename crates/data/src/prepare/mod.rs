//! From input files to a dataset folder: read, tokenize in parallel, write shards.
//!
//! Memory does not grow with the input. The shards depend on the files, the tokenizer and the options alone, never
//! on the number of threads or on interruptions: a run that was stopped or killed continues after its last
//! complete shard and ends with the same bytes. The index is written last, so the folder is a dataset only when it
//! is complete.

mod cache;
mod feed;
mod learn;
mod resume;
mod separator;
mod texts;

use std::fs::{self, File, TryLockError};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rayon::prelude::*;

pub use cache::{learn_cached, prepare_cached};
pub use learn::{Learning, Vocabulary, learn, learn_for_dataset};
pub use texts::Texts;

use crate::error::{DataError, Result};
use crate::files;
use crate::input::{Compression, Format, InputFile, InputOptions, Piece};
use crate::shard::{Dataset, DatasetIndex, INDEX_FILE, SHARD_VERSION, Shard, ShardEntry, ShardWriter};
use crate::stream::TokenStream;
use crate::tokenizer::Tokenizer;
use feed::{Batch, Feed};
use resume::{Position, Unfinished};
use separator::UnusedSeparator;

/// What shapes a dataset beside its input and tokenizer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepareOptions {
    /// How documents lie in the files.
    pub input: InputOptions,
    /// A shard is closed at the first piece of text that brings it to this many tokens.
    pub shard_tokens: u64,
}

impl Default for PrepareOptions {
    fn default() -> Self {
        PrepareOptions { input: InputOptions::default(), shard_tokens: 64_000_000 }
    }
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Bytes of the input files, as they lie on the disk, that are done.
    pub bytes_done: u64,
    /// Bytes of all input files.
    pub bytes_total: u64,
    /// Tokens so far, those of earlier runs included.
    pub tokens: u64,
    /// Documents so far.
    pub documents: u64,
    /// Time since this run began.
    pub elapsed: Duration,
    /// Bytes that an earlier run had done.
    bytes_before: u64,
}

impl Progress {
    /// Speed of this run in megabytes (10^6) of input a second.
    pub fn mb_per_s(&self) -> f64 {
        let bytes = self.bytes_done.saturating_sub(self.bytes_before) as f64;
        bytes / 1e6 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Tokenizes `inputs` into a dataset at `folder`, or continues an interrupted run, or returns the finished dataset
/// of an equal one. `on_progress` is called a few times a second at most; [`ControlFlow::Break`] stops the run,
/// which can be continued later.
///
/// # Errors
/// Broken input, by file and place; no text at all; input that changed since the run began; a folder with
/// something else in it; a full disk; [`DataError::Interrupted`].
pub fn prepare(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    folder: &Path,
    on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
) -> Result<Dataset> {
    refuse_empty(inputs)?;
    files::create_folder(folder)?;
    let _lock = lock_at_once(folder)?;
    prepare_locked(inputs, tokenizer, options, folder, on_progress)
}

const LOCK_FILE: &str = ".lock";

/// The file whose lock says that a process writes to the folder; the system drops the lock with the process.
fn open_lock(folder: &Path) -> Result<File> {
    let path = folder.join(LOCK_FILE);
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(DataError::io(&path, "create the lock"))
}

/// Locks a folder that only one process is to write to.
fn lock_at_once(folder: &Path) -> Result<File> {
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

/// Locks a folder that several processes may want alike: the others wait for the first.
fn lock_in_turn(folder: &Path) -> Result<File> {
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
        return Err(DataError::invalid("shards of 0 tokens are asked for", "give at least 1"));
    }
    let made_from = resume::made_from(inputs, tokenizer, options)?;
    if let Some(dataset) = finished(folder, &made_from)? {
        return Ok(dataset);
    }
    let unfinished = match Unfinished::load(folder)? {
        Some(unfinished) if unfinished.made_from == made_from => unfinished,
        _ => {
            discard_unfinished(folder)?;
            refuse_foreign_files(folder)?;
            learn::forget_other(folder, tokenizer)?;
            let begun = Unfinished::begin(made_from);
            // The record comes first: whatever is in the folder after it is known to be this run's.
            begun.save(folder)?;
            begun
        }
    };
    tokenizer.save(folder)?;
    let mut run = Run::start(unfinished, tokenizer, options, folder, inputs)?;
    std::thread::scope(|scope| {
        let feed = Feed::start(scope, inputs, &options.input, tokenizer.cut_rule(), run.unfinished.position);
        feed.batches().iter().try_for_each(|batch| run.take(batch?, on_progress))
    })?;
    run.finish(on_progress)
}

/// The dataset in `folder`, if there is one; an error if it is another one than is to be made.
fn finished(folder: &Path, made_from: &str) -> Result<Option<Dataset>> {
    if !folder.join(INDEX_FILE).exists() {
        return Ok(None);
    }
    let dataset = Dataset::open(folder)?;
    if dataset.made_from() == made_from {
        return Ok(Some(dataset));
    }
    Err(other_dataset(folder))
}

/// Documents of a few tokens each fill a shard's table of ends before its tokens; this closes it then.
const SHARD_DOCUMENTS: u64 = 4 << 20;
/// The caller hears of progress at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A run in progress: what is on the disk, and the shard being written.
struct Run<'r> {
    unfinished: Unfinished,
    inputs: &'r [InputFile],
    tokenizer: &'r Tokenizer,
    options: &'r PrepareOptions,
    folder: PathBuf,
    writer: Option<ShardWriter>,
    separator: UnusedSeparator,
    begun: Instant,
    last_told: Option<Instant>,
    /// What an earlier run had read; known when a continued run has come to where that one ended.
    bytes_before: Option<u64>,
}

impl<'r> Run<'r> {
    fn start(
        unfinished: Unfinished,
        tokenizer: &'r Tokenizer,
        options: &'r PrepareOptions,
        folder: &Path,
        inputs: &'r [InputFile],
    ) -> Result<Run<'r>> {
        for entry in &unfinished.shards {
            let path = folder.join(&entry.file);
            if ShardEntry::of(entry.file.clone(), &Shard::open(&path)?) != *entry {
                return Err(DataError::corrupt(
                    &path,
                    "it is not the shard that the interrupted run wrote",
                    "delete the folder and begin again",
                ));
            }
        }
        Ok(Run {
            bytes_before: unfinished.shards.is_empty().then_some(0),
            unfinished,
            inputs,
            tokenizer,
            options,
            folder: folder.to_path_buf(),
            writer: None,
            separator: UnusedSeparator::new(tokenizer, &options.input),
            begun: Instant::now(),
            last_told: None,
        })
    }

    /// Tokenizes a batch in parallel and writes it in order.
    fn take(
        &mut self,
        batch: Batch,
        on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let encode = |piece: &Piece| self.tokenizer.encode_piece(&piece.text, piece.begins_document);
        let encoded: Vec<Result<Vec<u32>>> =
            batch.pieces.par_iter().map(|(piece, _)| encode(piece)).collect();
        for ((piece, position), tokens) in batch.pieces.iter().zip(encoded) {
            self.separator.look_at(&self.inputs[position.file], &piece.text);
            let tokens = tokens.map_err(|error| error.in_file(&self.inputs[position.file].path))?;
            self.write(piece, &tokens, *position)?;
        }
        self.tell(batch.bytes_done, on_progress)
    }

    fn write(&mut self, piece: &Piece, tokens: &[u32], position: Position) -> Result<()> {
        // Only a whole document can be empty.
        if piece.text.is_empty() && piece.begins_document {
            return Ok(());
        }
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => {
                let path = self.folder.join(shard_name(self.unfinished.shards.len()));
                self.writer.insert(ShardWriter::create(&path, self.tokenizer)?)
            }
        };
        if piece.begins_document {
            writer.push(self.tokenizer.document_begin(), 0)?;
        }
        writer.push(tokens, piece.text.len() as u64)?;
        if piece.ends_document {
            writer.end_document()?;
        }
        if writer.token_count() >= self.options.shard_tokens || writer.document_count() >= SHARD_DOCUMENTS {
            self.close_shard(position)?;
        }
        Ok(())
    }

    /// Finishes the current shard and records that everything before `position` is on the disk.
    fn close_shard(&mut self, position: Position) -> Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.finish()?;
        let name = shard_name(self.unfinished.shards.len());
        let shard = Shard::open(&self.folder.join(&name))?;
        self.unfinished.shards.push(ShardEntry::of(name, &shard));
        self.unfinished.position = position;
        self.unfinished.save(&self.folder)
    }

    fn tell(
        &mut self,
        bytes_done: u64,
        on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let bytes_before = *self.bytes_before.get_or_insert(bytes_done);
        if self.last_told.is_some_and(|last| last.elapsed() < PROGRESS_INTERVAL) {
            return Ok(());
        }
        self.last_told = Some(Instant::now());
        let writing = self.writer.as_ref();
        let shards = &self.unfinished.shards;
        let progress = Progress {
            bytes_done,
            bytes_total: self.inputs.iter().map(|input| input.bytes).sum(),
            tokens: shards.iter().map(|s| s.tokens).sum::<u64>()
                + writing.map_or(0, ShardWriter::token_count),
            documents: shards.iter().map(|s| s.documents).sum::<u64>()
                + writing.map_or(0, ShardWriter::document_count),
            elapsed: self.begun.elapsed(),
            bytes_before,
        };
        match on_progress(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(DataError::Interrupted),
        }
    }

    fn finish(mut self, on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>) -> Result<Dataset> {
        self.last_told = None;
        self.tell(self.inputs.iter().map(|input| input.bytes).sum(), on_progress)?;
        self.close_shard(Position { file: self.inputs.len(), pieces: 0 })?;
        let shards = std::mem::take(&mut self.unfinished.shards);
        let index = DatasetIndex {
            version: SHARD_VERSION,
            tokenizer: files::hex(&self.tokenizer.hash()),
            vocab_size: self.tokenizer.vocab_size() as u32,
            end_of_document: self.tokenizer.end_of_document(),
            begin_of_document: self.tokenizer.document_begin().to_vec(),
            tokens: shards.iter().map(|shard| shard.tokens).sum(),
            documents: shards.iter().map(|shard| shard.documents).sum(),
            text_bytes: shards.iter().map(|shard| shard.text_bytes).sum(),
            made_from: self.unfinished.made_from.clone(),
            shards,
        };
        if index.tokens == 0 {
            // Nothing of this run stays in the way of the next one; the record goes last, as it says whose the rest is.
            discard_unfinished(&self.folder)?;
            files::remove(&self.folder.join(learn::LEARNED_FILE))?;
            return Err(no_text(self.inputs));
        }
        files::write_json(&self.folder.join(INDEX_FILE), &index)?;
        Unfinished::remove(&self.folder)?;
        let dataset = Dataset::open(&self.folder)?;
        tracing::info!(
            "{}: {} tokens in {} documents",
            dataset.name(),
            dataset.token_count(),
            dataset.document_count()
        );
        Ok(dataset)
    }
}

fn shard_name(number: usize) -> String {
    format!("shard-{number:05}.tokens")
}

/// Files that are all empty need no folder to be found so.
fn refuse_empty(inputs: &[InputFile]) -> Result<()> {
    // An empty file of any other kind is a damaged one, which reading it says better.
    let is_empty = |input: &InputFile| {
        input.bytes == 0 && input.format != Format::Parquet && input.compression == Compression::None
    };
    if inputs.iter().all(is_empty) { Err(no_text(inputs)) } else { Ok(()) }
}

fn no_text(inputs: &[InputFile]) -> DataError {
    let what = match inputs {
        [input] => format!("{} holds no text", input.path.display()),
        inputs => format!("the {} input files hold no text", inputs.len()),
    };
    DataError::invalid(what, "name input that is not empty")
}

/// A new dataset goes into an empty folder: nothing of the user's is mixed with it or overwritten. A vocabulary that was
/// learned for it may be there.
fn refuse_foreign_files(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(DataError::io(folder, "list the folder"))? {
        let name = entry.map_err(DataError::io(folder, "list the folder"))?.file_name();
        let is_ours = name
            .to_str()
            .is_some_and(|name| learn::is_of_learned(folder, name) || cache::is_of_entry(folder, name));
        if name != LOCK_FILE && !Unfinished::is_beginning(&name) && !is_ours {
            return Err(DataError::invalid(
                format!("{} is not empty (it holds {})", folder.display(), name.to_string_lossy()),
                "name a new or an empty folder",
            ));
        }
    }
    Ok(())
}

/// Removes what a run left that had no shard complete: it is in the way of another one, and nobody misses it. The record
/// goes last, as it says whose the rest is.
///
/// # Errors
/// There are complete shards.
fn discard_unfinished(folder: &Path) -> Result<()> {
    match Unfinished::load(folder)? {
        None => Ok(()),
        Some(unfinished) if unfinished.shards.is_empty() => {
            let half_written = files::aside(&folder.join(shard_name(0)));
            let tokenizer = Tokenizer::saved_names().map(|name| folder.join(name));
            tokenizer.chain([half_written]).try_for_each(|path| files::remove(&path))?;
            Unfinished::remove(folder)
        }
        Some(_) => Err(DataError::invalid(
            format!("{} holds an unfinished dataset of other input, tokenizer or options", folder.display()),
            "choose another folder, or delete it to begin again",
        )),
    }
}

fn other_dataset(folder: &Path) -> DataError {
    DataError::invalid(
        format!("{} already holds a dataset of other input, tokenizer or options", folder.display()),
        "choose another folder, or delete it",
    )
}
