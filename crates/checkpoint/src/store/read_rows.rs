//! Reading any rows of a tensor: the pieces that overlap them are read and verified, in parallel.

use std::ops::Range;

use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::TensorSpec;
use super::load::Checkpoint;
use super::manifest::ADVICE;
use super::pieces::{Piece, check_rows};
use crate::error::{CheckpointError, Result};
use crate::tensor_file::TensorFile;

impl Checkpoint {
    /// Reads rows of the tensor `name` into `out`: see [`TensorSpec::rows`]. Reads and verifies the pieces
    /// that overlap them, and nothing else of the files but their headers. May be called from several
    /// threads.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], with the tensor, the rows of the piece, the file and a verified
    /// checkpoint to use instead, if a piece does not match its checksum: `out` is then not valid.
    /// [`CheckpointError::Internal`] if there is no such tensor, if it has no such rows, or if `out` has
    /// another length.
    pub fn read_rows(&self, name: &str, rows: Range<usize>, out: &mut [u8]) -> Result<()> {
        let Some(tensor) = self.index_of(name) else {
            return Err(CheckpointError::Internal(format!(
                "no tensor '{name}' in {}",
                self.path().display()
            )));
        };
        let spec = &self.manifest.specs[tensor];
        check_rows(std::slice::from_ref(spec), std::slice::from_ref(&rows))?;
        if out.len() != rows.len() * spec.row_bytes() {
            let (room, place) = (out.len(), spec.place(&rows));
            return Err(CheckpointError::Internal(format!("a buffer of {room} bytes for {place} ({spec})")));
        }
        self.read_into(tensor, &rows, out).map_err(|error| self.with_advice(error))
    }

    /// Reads rows that tensor `tensor` has, into a buffer of their length.
    pub(super) fn read_into(&self, tensor: usize, rows: &Range<usize>, out: &mut [u8]) -> Result<()> {
        let spec = &self.manifest.specs[tensor];
        let mut rest = out;
        let mut tasks = Vec::new();
        for run in runs(&self.manifest.pieces[tensor]) {
            for piece in run {
                let wanted = overlap(&piece.rows, rows);
                if !wanted.is_empty() {
                    let out = rest.split_off_mut(..wanted.len() * spec.row_bytes());
                    let out =
                        out.ok_or_else(|| CheckpointError::Internal("a buffer is too short".to_string()))?;
                    tasks.push((run, piece, wanted, out));
                }
            }
        }
        let read = tasks.into_par_iter().map(|(run, piece, wanted, out)| {
            // Opened by the task: the rows of many ranks are in more files than a process may have open.
            let file = self.files.get(run[0].file, &self.file_path(run[0].file))?;
            let start = start_of_run(&file, spec, run)?;
            PieceInFile::new(spec, piece, run, start).read(&file, &wanted, out)
        });
        // The first error in the order of the rows, independent of the number of threads.
        read.find_map_first(Result::err).map_or(Ok(()), Err)
    }

    /// Reads all files and compares all checksums, with a few MiB of memory for each thread.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`], with the first document or piece of a tensor that differs and its file.
    pub fn verify(&self) -> Result<()> {
        for entry in &self.manifest.documents {
            self.document_bytes(entry)?;
        }
        let mut runs_by_file = vec![Vec::new(); self.manifest.files.len()];
        for (spec, pieces) in self.manifest.specs.iter().zip(&self.manifest.pieces) {
            runs(pieces).for_each(|run| runs_by_file[run[0].file].push((spec, run)));
        }
        for (index, runs) in runs_by_file.into_iter().enumerate() {
            // Opened anew, because its header may have changed.
            let file = TensorFile::open(&self.file_path(index))?;
            let mut pieces = Vec::new();
            for (spec, run) in runs {
                let start = start_of_run(&file, spec, run)?;
                pieces.extend(run.iter().map(|piece| PieceInFile::new(spec, piece, run, start)));
            }
            pieces.sort_by_key(|piece| piece.start);
            let verified = pieces.into_par_iter().map(|piece| piece.verify(&file));
            verified.find_map_first(Result::err).map_or(Ok(()), Err)?;
        }
        Ok(())
    }
}

/// A piece, and its first byte in its file.
struct PieceInFile<'a> {
    spec: &'a TensorSpec,
    piece: &'a Piece,
    start: usize,
}

impl<'a> PieceInFile<'a> {
    /// `start` is the first byte of `run`, to which the piece belongs.
    fn new(spec: &'a TensorSpec, piece: &'a Piece, run: &[Piece], start: usize) -> Self {
        let start = start + (piece.rows.start - run[0].rows.start) * spec.row_bytes();
        Self { spec, piece, start }
    }

    /// Reads and verifies the piece, and writes its rows `wanted` to `out`.
    fn read(&self, file: &TensorFile, wanted: &Range<usize>, out: &mut [u8]) -> Result<()> {
        if *wanted == self.piece.rows {
            file.read_at(self.start, out)?;
            return self.check(file, xxh3_64(out));
        }
        // The rest of the piece is read as well, because its hash is one of all its bytes.
        let place = (wanted.start - self.piece.rows.start) * self.spec.row_bytes();
        let (mut hash, mut at) = (Xxh3::new(), 0);
        file.for_each_chunk(self.bytes(), |chunk| {
            hash.update(chunk);
            let part = overlap(&(at..at + chunk.len()), &(place..place + out.len()));
            if !part.is_empty() {
                out[part.start - place..part.end - place]
                    .copy_from_slice(&chunk[part.start - at..part.end - at]);
            }
            at += chunk.len();
        })?;
        self.check(file, hash.digest())
    }

    fn verify(&self, file: &TensorFile) -> Result<()> {
        let mut hash = Xxh3::new();
        file.for_each_chunk(self.bytes(), |chunk| hash.update(chunk))?;
        self.check(file, hash.digest())
    }

    fn bytes(&self) -> Range<usize> {
        self.start..self.start + self.piece.rows.len() * self.spec.row_bytes()
    }

    fn check(&self, file: &TensorFile, hash: u64) -> Result<()> {
        if hash == self.piece.xxh3 {
            return Ok(());
        }
        let location = self.spec.place(&self.piece.rows);
        Err(CheckpointError::damaged(file.path(), location, "does not match its checksum", ADVICE))
    }
}

/// The pieces by file: those in one file follow each other.
fn runs(pieces: &[Piece]) -> impl Iterator<Item = &[Piece]> {
    pieces.chunk_by(|a, b| a.file == b.file)
}

fn run_rows(run: &[Piece]) -> Range<usize> {
    run[0].rows.start..run[run.len() - 1].rows.end
}

/// The first byte of a run in its file, whose header must agree with the manifest.
fn start_of_run(file: &TensorFile, spec: &TensorSpec, run: &[Piece]) -> Result<usize> {
    let rows = run_rows(run);
    match file
        .tensor(&spec.name)
        .filter(|found| (found.dtype, found.shape.clone()) == spec.stored(rows.len()))
    {
        Some(found) => Ok(found.range.start),
        None => {
            let problem = format!("{spec} is not there as the manifest says");
            Err(CheckpointError::damaged(file.path(), spec.place(&rows), problem, ADVICE))
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    a.start.max(b.start)..a.end.min(b.end)
}
