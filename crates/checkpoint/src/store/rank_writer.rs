//! A writer of the rows of each tensor that one rank has, in files of its own.

use std::ops::Range;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::TensorSpec;
use super::manifest::rank_file;
use super::pieces::check_rows;
use super::rank_report::{RankReport, WrittenRows};
use crate::error::{BoxError, CheckpointError, Result};
use crate::tensor_file::{StoredTensor, TensorFileWriter, split_into_shards};
use crate::writers_lock::WritersLock;

/// Maximum size of a file with more than one tensor.
pub(super) const MAX_FILE_BYTES: u64 = 4 << 30;

/// The temporary folder of a step that this process writes into, alone or with others. No process removes the
/// folder as a leftover while this exists.
#[derive(Debug)]
pub struct RankWriter {
    folder: PathBuf,
    max_file_bytes: u64,
    _lock: WritersLock,
}

impl RankWriter {
    pub(super) fn new(folder: &Path, max_file_bytes: u64, lock: WritersLock) -> Self {
        Self { folder: folder.to_path_buf(), max_file_bytes, _lock: lock }
    }

    /// Writes and syncs the rows `rows[i]` of each tensor `tensors[i]`, and returns a report for rank 0 (see
    /// [`super::StepWriter::finish`]). `tensors` has the full shapes and is the same on all ranks; `rank`
    /// counts from 0, and each rank writes once.
    ///
    /// `read(i)` returns the bytes of these rows (little-endian, row-major; packed formats in their packed
    /// form). It is called once for each tensor of which this rank has rows, in the order of the files; one
    /// tensor is in memory at a time.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if the disk fails, the error of `read`, and [`CheckpointError::Internal`] for
    /// rows that a tensor does not have, or a wrong number of bytes.
    pub fn write<B: AsRef<[u8]>>(
        &self,
        rank: usize,
        tensors: &[TensorSpec],
        rows: &[Range<usize>],
        read: &mut dyn FnMut(usize) -> std::result::Result<B, BoxError>,
    ) -> Result<Vec<u8>> {
        check_rows(tensors, rows)?;
        // Widest elements first, so that every tensor is aligned to its element size for readers that map the
        // file.
        let mut order: Vec<usize> = (0..tensors.len()).filter(|&i| !rows[i].is_empty()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(tensors[i].stored(0).0.bitsize()));
        let sizes = order.iter().map(|&i| (rows[i].len() * tensors[i].row_bytes()) as u64);
        let mut report = RankReport { rank, files: Vec::new(), rows: Vec::new() };
        for (file, members) in split_into_shards(sizes, self.max_file_bytes).into_iter().enumerate() {
            let members = &order[members];
            let layout: Vec<StoredTensor> = members
                .iter()
                .map(|&i| {
                    let (dtype, shape) = tensors[i].stored(rows[i].len());
                    StoredTensor { name: tensors[i].name.clone(), dtype, shape }
                })
                .collect();
            let path = self.folder.join(rank_file(rank, file));
            let mut writer = TensorFileWriter::create_in_place(&path, &layout, &[])?;
            for &i in members {
                let (spec, rows) = (&tensors[i], rows[i].clone());
                let bytes = read(i).map_err(CheckpointError::Caller)?;
                let bytes = bytes.as_ref();
                writer.write(bytes)?;
                let place = |row: usize| (row - rows.start) * spec.row_bytes();
                let hash = |piece: Range<usize>| xxh3_64(&bytes[place(piece.start)..place(piece.end)]);
                let hashes = spec.pieces(rows.clone()).map(hash).collect();
                report.rows.push(WrittenRows { tensor: i, file, rows, hashes });
            }
            report.files.push(writer.finish()?);
        }
        report.rows.sort_unstable_by_key(|written| written.tensor);
        Ok(report.to_bytes(tensors))
    }
}
