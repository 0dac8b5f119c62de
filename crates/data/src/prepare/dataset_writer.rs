//! The writer of a dataset folder: tokenizes batches in parallel and writes shards, then the index.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use rayon::prelude::*;

use super::file_names::{LEARNED_FILE, shard_name};
use super::progress::{Progress, ProgressTimer};
use super::read_ahead::PieceBatch;
use super::separator::UnusedSeparator;
use super::unfinished::{InputPosition, Unfinished};
use super::{PrepareOptions, discard_unfinished, no_text};
use crate::chat::{ChatEncoder, ChatRecord, EncodedRow, RowError};
use crate::error::{DataError, Result};
use crate::files;
use crate::input::{BadRows, InputFile, Piece};
use crate::shard::{
    Dataset, DatasetIndex, INDEX_FILE, MASKED_SHARD_VERSION, SHARD_VERSION, Shard, ShardEntry, ShardWriter,
};
use crate::stream::TokenStream;
use crate::tokenizer::Tokenizer;

/// Maximum number of documents per shard, which limits the table of document ends if documents are very
/// short.
const SHARD_DOCUMENTS: u64 = 4 << 20;

/// A dataset that is being written: the record of its complete shards, and the open shard.
pub(super) struct DatasetWriter<'r> {
    unfinished: Unfinished,
    inputs: &'r [InputFile],
    tokenizer: &'r Tokenizer,
    /// The encoder of conversations, and the record of their rows.
    chat: Option<(&'r ChatEncoder<'r>, ChatRecord)>,
    options: &'r PrepareOptions,
    folder: PathBuf,
    writer: Option<ShardWriter>,
    separator: UnusedSeparator,
    bad_rows: BadRows,
    /// A warning of dropped rows was given.
    warned_of_rows: bool,
    started: Instant,
    progress_timer: ProgressTimer,
    /// Bytes that earlier runs read. A continued run knows them once its first batch has arrived.
    bytes_before: Option<u64>,
}

impl<'r> DatasetWriter<'r> {
    pub(super) fn start(
        unfinished: Unfinished,
        tokenizer: &'r Tokenizer,
        chat: Option<&'r ChatEncoder<'r>>,
        options: &'r PrepareOptions,
        folder: &Path,
        inputs: &'r [InputFile],
    ) -> Result<DatasetWriter<'r>> {
        for entry in &unfinished.shards {
            let path = folder.join(&entry.file);
            if ShardEntry::from_shard(entry.file.clone(), &Shard::open(&path)?) != *entry {
                return Err(DataError::corrupt(
                    &path,
                    "it is not the shard that the interrupted run wrote",
                    "delete the folder and start again",
                ));
            }
        }
        Ok(DatasetWriter {
            bytes_before: unfinished.shards.is_empty().then_some(0),
            bad_rows: BadRows::new(options.input.skip_bad_rows, unfinished.position.bad_rows),
            chat: chat.map(|encoder| {
                (
                    encoder,
                    unfinished
                        .chat
                        .clone()
                        .unwrap_or_else(|| ChatRecord::new(encoder.options(), encoder.template_hash())),
                )
            }),
            warned_of_rows: false,
            unfinished,
            inputs,
            tokenizer,
            options,
            folder: folder.to_path_buf(),
            writer: None,
            separator: UnusedSeparator::new(tokenizer, &options.input),
            started: Instant::now(),
            progress_timer: ProgressTimer::default(),
        })
    }

    /// Tokenizes a batch in parallel and writes its tokens in order.
    pub(super) fn add_batch(
        &mut self,
        batch: PieceBatch,
        on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        if self.chat.is_some() {
            self.add_rows(&batch)?;
            self.bad_rows = batch.bad_rows;
            return self.report(batch.bytes_done, on_progress);
        }
        let encode = |piece: &Piece| self.tokenizer.encode_piece(&piece.text, piece.begins_document);
        let encoded: Vec<Result<Vec<u32>>> =
            batch.pieces.par_iter().map(|(piece, _)| encode(piece)).collect();
        for ((piece, position), tokens) in batch.pieces.iter().zip(encoded) {
            self.separator.check(&self.inputs[position.file], &piece.text);
            let tokens = tokens.map_err(|error| error.in_file(&self.inputs[position.file].path))?;
            self.write(piece, &tokens, *position)?;
        }
        self.bad_rows = batch.bad_rows;
        self.report(batch.bytes_done, on_progress)
    }

    /// Encodes rows of conversations in parallel and writes their documents in order.
    fn add_rows(&mut self, batch: &PieceBatch) -> Result<()> {
        let Some((encoder, _)) = &self.chat else { return Ok(()) };
        let rows = batch.pieces.par_iter().map(|(piece, _)| {
            // Blank lines are pieces too.
            (!piece.is_nothing() && !piece.text.is_empty()).then(|| encoder.encode(&piece.text))
        });
        let rows: Vec<Option<std::result::Result<EncodedRow, RowError>>> = rows.collect();
        for ((piece, position), row) in batch.pieces.iter().zip(rows) {
            let Some(row) = row else { continue };
            let input = &self.inputs[position.file];
            let location = input.location_of_row(piece.row);
            let Some((encoder, record)) = &mut self.chat else { break };
            match row {
                Ok(row) => {
                    record.add(&row.counts);
                    self.write_row(&row)?;
                }
                Err(error) => {
                    // Few that cannot be read are skipped, as bad rows of text are.
                    let may_skip = record.unreadable_rows() < self.options.input.skip_bad_rows;
                    let (reason, what) = error.dropped(may_skip).map_err(|error| {
                        DataError::input(&input.path, &location, error.problem, error.advice)
                    })?;
                    record.drop(reason, &format!("{}, {location}", input.path.display()), &what);
                    record.check_early(encoder.options().bad_rows, &mut self.warned_of_rows)?;
                }
            }
            self.close_full_shard(*position)?;
        }
        Ok(())
    }

    fn write_row(&mut self, row: &EncodedRow) -> Result<()> {
        let writer = self.open_shard()?;
        for sample in &row.samples {
            writer.push_document(&sample.ids, &sample.trained, Some(row.question), sample.text_bytes)?;
        }
        Ok(())
    }

    /// The shard that is being written; a new one if there is none.
    fn open_shard(&mut self) -> Result<&mut ShardWriter> {
        if self.writer.is_none() {
            let path = self.folder.join(shard_name(self.unfinished.shards.len()));
            self.writer = Some(match self.chat {
                Some(_) => ShardWriter::create_masked(&path, self.tokenizer)?,
                None => ShardWriter::create(&path, self.tokenizer)?,
            });
        }
        self.writer.as_mut().ok_or_else(|| DataError::Internal("no shard is open".to_owned()))
    }

    fn write(&mut self, piece: &Piece, tokens: &[u32], position: InputPosition) -> Result<()> {
        if piece.is_nothing() {
            return Ok(());
        }
        let document_begin = self.tokenizer.document_begin();
        let writer = self.open_shard()?;
        if piece.begins_document {
            writer.push(document_begin, 0)?;
        }
        writer.push(tokens, piece.text.len() as u64)?;
        if piece.ends_document {
            writer.end_document()?;
        }
        self.close_full_shard(position)
    }

    /// Finishes the open shard if it has as many tokens or documents as a shard may have.
    fn close_full_shard(&mut self, position: InputPosition) -> Result<()> {
        let is_full = self.writer.as_ref().is_some_and(|writer| {
            writer.token_count() >= self.options.shard_tokens || writer.document_count() >= SHARD_DOCUMENTS
        });
        if is_full { self.close_shard(position) } else { Ok(()) }
    }

    /// Finishes the open shard and records that all input before `position` is on disk.
    fn close_shard(&mut self, position: InputPosition) -> Result<()> {
        let Some(writer) = self.writer.take() else { return Ok(()) };
        writer.finish()?;
        let name = shard_name(self.unfinished.shards.len());
        let shard = Shard::open(&self.folder.join(&name))?;
        self.unfinished.shards.push(ShardEntry::from_shard(name, &shard));
        self.unfinished.position = position;
        self.unfinished.chat = self.chat.as_ref().map(|(_, record)| record.clone());
        self.unfinished.save(&self.folder)
    }

    fn report(
        &mut self,
        bytes_done: u64,
        on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<()> {
        let bytes_before = *self.bytes_before.get_or_insert(bytes_done);
        if !self.progress_timer.is_due() {
            return Ok(());
        }
        let writing = self.writer.as_ref();
        let shards = &self.unfinished.shards;
        let progress = Progress {
            bytes_done,
            bytes_total: self.inputs.iter().map(|input| input.bytes).sum(),
            tokens: shards.iter().map(|s| s.tokens).sum::<u64>()
                + writing.map_or(0, ShardWriter::token_count),
            documents: shards.iter().map(|s| s.documents).sum::<u64>()
                + writing.map_or(0, ShardWriter::document_count),
            elapsed: self.started.elapsed(),
            bytes_before,
        };
        match on_progress(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(DataError::Interrupted),
        }
    }

    pub(super) fn finish(
        mut self,
        on_progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Dataset> {
        self.progress_timer = ProgressTimer::default();
        self.report(self.inputs.iter().map(|input| input.bytes).sum(), on_progress)?;
        let bad_rows = self.bad_rows.count();
        if let Some((encoder, record)) = &self.chat {
            record.check(encoder.options().bad_rows)?;
        }
        self.close_shard(InputPosition { file: self.inputs.len(), pieces: 0, bad_rows })?;
        let shards = std::mem::take(&mut self.unfinished.shards);
        let index = DatasetIndex {
            version: if self.chat.is_some() { MASKED_SHARD_VERSION } else { SHARD_VERSION },
            tokenizer: files::hex(&self.tokenizer.hash()),
            vocab_size: self.tokenizer.vocab_size() as u32,
            end_of_document: self.tokenizer.end_of_document(),
            begin_of_document: self.tokenizer.document_begin().to_vec(),
            tokens: shards.iter().map(|shard| shard.tokens).sum(),
            documents: shards.iter().map(|shard| shard.documents).sum(),
            text_bytes: shards.iter().map(|shard| shard.text_bytes).sum(),
            skipped_rows: bad_rows,
            chat: self.chat.as_ref().map(|(_, record)| record.clone()),
            made_from: self.unfinished.made_from.clone(),
            shards,
        };
        if index.tokens == 0 {
            // Leave nothing that would block the next run.
            discard_unfinished(&self.folder)?;
            files::remove(&self.folder.join(LEARNED_FILE))?;
            let dropped = self.chat.as_ref().and_then(|(_, record)| record.nothing_left());
            return Err(dropped.unwrap_or_else(|| no_text(self.inputs, &self.bad_rows)));
        }
        files::write_json(&self.folder.join(INDEX_FILE), &index)?;
        Unfinished::remove(&self.folder)?;
        if bad_rows > 0 {
            tracing::warn!("{}", self.bad_rows);
        }
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
