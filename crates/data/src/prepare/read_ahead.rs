//! The thread that reads input files ahead of the tokenizer, in batches of bounded size.

use std::io;
use std::thread::{Builder, Scope};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::unfinished::InputPosition;
use crate::error::Result;
use crate::input::{BadRows, InputFile, InputOptions, PIECE_BYTES, Piece, read_documents};
use crate::tokenizer::CutRule;

/// Consecutive pieces of the input, each with the position after it.
pub(super) struct PieceBatch {
    pub(super) pieces: Vec<(Piece, InputPosition)>,
    /// Bytes of input read by the end of the batch.
    pub(super) bytes_done: u64,
    /// Rows skipped by the end of the batch.
    pub(super) bad_rows: BadRows,
}

/// Batches in the order of the input. An error is the last item.
pub(super) struct ReadAhead {
    batches: Receiver<Result<PieceBatch>>,
}

impl ReadAhead {
    /// Starts a thread that reads from `from` on. Dropping this value stops it.
    ///
    /// # Errors
    /// The system refuses the thread.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        inputs: &'scope [InputFile],
        options: &'scope InputOptions,
        rule: CutRule,
        from: InputPosition,
    ) -> io::Result<ReadAhead> {
        let (sender, batches) = bounded(2);
        let read = move || {
            if let Err(error) = read_all(inputs, options, rule, from, &sender) {
                // If the receiver is gone, it has its own error to report.
                let _ = sender.send(Err(error));
            }
        };
        Builder::new().name("read ahead".to_owned()).spawn_scoped(scope, read)?;
        Ok(ReadAhead { batches })
    }

    pub(super) fn batches(&self) -> &Receiver<Result<PieceBatch>> {
        &self.batches
    }
}

/// Bytes of text in a batch: enough pieces for this number of threads. The result does not depend on it.
fn batch_bytes(threads: usize) -> usize {
    (2 * PIECE_BYTES * threads).clamp(8 << 20, 128 << 20)
}

/// Upper bound of the bytes that tokenizing text uses on this number of threads, besides the tokenizer, if no
/// document is long that cannot be cut: two batches wait, one is read, and one is tokenized, to 4 bytes for
/// each of its own at most.
pub fn tokenizing_bytes(threads: usize) -> u64 {
    8 * batch_bytes(threads) as u64
}

fn read_all(
    inputs: &[InputFile],
    options: &InputOptions,
    rule: CutRule,
    from: InputPosition,
    sender: &Sender<Result<PieceBatch>>,
) -> Result<()> {
    let batch_bytes = batch_bytes(rayon::current_num_threads());
    let mut bytes_before: u64 = inputs[..from.file.min(inputs.len())].iter().map(|input| input.bytes).sum();
    let mut bad_rows = BadRows::new(options.skip_bad_rows, from.bad_rows);
    let mut pieces = Vec::new();
    let mut bytes = 0;
    let mut sent = Instant::now();
    for (file, input) in inputs.iter().enumerate().skip(from.file) {
        let mut position = InputPosition { file, pieces: 0, bad_rows: bad_rows.count() };
        // Pieces before an error are sent first, so that their shards are completed.
        let mut documents = match read_documents(input, options, rule) {
            Ok(documents) => documents.after(bad_rows),
            Err(error) => {
                let _ = sender.send(Ok(PieceBatch { pieces, bytes_done: bytes_before, bad_rows }));
                return Err(error);
            }
        };
        while let Some(piece) = documents.next() {
            let bytes_done = bytes_before + documents.bytes_read().min(input.bytes);
            let piece = match piece {
                Ok(piece) => piece,
                Err(error) => {
                    let bad_rows = documents.bad_rows().clone();
                    let _ = sender.send(Ok(PieceBatch { pieces, bytes_done, bad_rows }));
                    return Err(error);
                }
            };
            position.pieces += 1;
            if file == from.file && position.pieces <= from.pieces {
                continue;
            }
            bytes += piece.text.len() + PIECE_OVERHEAD_BYTES;
            pieces.push((piece, position));
            // Text that is read slowly, or blank lines for long, still show progress.
            if bytes >= batch_bytes || sent.elapsed() >= MAX_WAIT {
                bytes = 0;
                let (pieces, bad_rows) = (std::mem::take(&mut pieces), documents.bad_rows().clone());
                if sender.send(Ok(PieceBatch { pieces, bytes_done, bad_rows })).is_err() {
                    return Ok(());
                }
                sent = Instant::now();
            }
        }
        input.refuse_changed()?;
        bad_rows = documents.bad_rows().clone();
        bytes_before += input.bytes;
    }
    // Without a receiver the run has already stopped.
    let _ = sender.send(Ok(PieceBatch { pieces, bytes_done: bytes_before, bad_rows }));
    Ok(())
}

/// Time after which a batch is sent even if it is small.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Assumed memory of a piece in addition to its text. Limits batches of very short documents.
const PIECE_OVERHEAD_BYTES: usize = 64;
