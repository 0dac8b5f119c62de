//! The reader of a shard, with random access.
//!
//! Opening checks the header, the size and the table of checksums, some kilobytes in all. The content is
//! checked block by block, each block when something in it is first read; [`Shard::verify`] checks all of it.
//! Nothing is cached or memory-mapped: truncation of a file in use is an error, where
//! touching a truncated mapping would kill the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use xxhash_rust::xxh3::xxh3_64;

use super::header::{CHUNK_BYTES, FileLayout, HEADER_BYTES, ShardHeader, TokenWidth};
use crate::error::{DataError, Result};
use crate::files;
use crate::stream::outside_vocabulary;

/// Tokens per read of the file.
const READ_TOKENS: usize = 1 << 16;
/// Document ends per read of the file.
const READ_ENDS: usize = 512;
const ADVICE: &str = "restore the file, or delete its folder and tokenize again";

/// An open shard.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    header: ShardHeader,
    layout: FileLayout,
    /// The table of checksums, one for each block of [`CHUNK_BYTES`].
    checksums: Vec<u64>,
    /// True for the blocks whose checksum was compared since the shard was opened.
    is_verified: Vec<AtomicBool>,
}

impl Shard {
    /// Opens a shard and checks everything except its content.
    ///
    /// # Errors
    /// A missing file; not a regular file; not a shard; another version; a damaged header; a size that
    /// differs from the header's.
    pub fn open(path: &Path) -> Result<Shard> {
        let corrupt = |problem: String| DataError::corrupt(path, problem, ADVICE);
        let file = files::open(path, "open the shard")?;
        let file_bytes = file.metadata().map_err(DataError::io(path, "open the shard"))?.len();
        let mut bytes = [0; HEADER_BYTES];
        if file_bytes < HEADER_BYTES as u64 {
            return Err(corrupt(format!(
                "it has {file_bytes} bytes, fewer than the header of a token shard"
            )));
        }
        file.read_exact_at(&mut bytes, 0).map_err(DataError::io(path, "read the shard"))?;
        let header = ShardHeader::from_bytes(&bytes).map_err(corrupt)?;
        let layout = header.layout().ok_or_else(|| corrupt("its counts are impossible".to_owned()))?;
        if file_bytes != layout.table.end {
            let expected = layout.table.end;
            return Err(corrupt(format!("it has {file_bytes} bytes, but its header says {expected}")));
        }
        let mut shard = Shard {
            path: path.to_path_buf(),
            file,
            header,
            layout,
            checksums: Vec::new(),
            is_verified: Vec::new(),
        };
        let mut table = vec![0; (shard.layout.table.end - shard.layout.table.start) as usize];
        shard.read_at(shard.layout.table.start, &mut table)?;
        if xxh3_64(&table) != shard.header.table_checksum {
            return Err(shard.corrupt("its table of checksums is damaged".to_owned()));
        }
        shard.checksums = table.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect();
        shard.is_verified = shard.checksums.iter().map(|_| AtomicBool::new(false)).collect();
        Ok(shard)
    }

    /// The header.
    pub fn header(&self) -> &ShardHeader {
        &self.header
    }

    /// Reads `out.len()` tokens at position `start` of this shard.
    ///
    /// # Errors
    /// A read past the end, a file that shrank, a damaged block, a token outside the vocabulary.
    pub fn read(&self, start: u64, out: &mut [i32]) -> Result<()> {
        let width = self.header.width.bytes() as u64;
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.header.token_count);
        let Some(end) = end else {
            let (len, count) = (out.len(), self.header.token_count);
            let name = self.path.display();
            return Err(DataError::Internal(format!(
                "a read of {len} tokens at {start} of {name}, which has {count}"
            )));
        };
        let mut bytes = vec![0; out.len().min(READ_TOKENS) * width as usize];
        for (first, out) in (start..end).step_by(READ_TOKENS).zip(out.chunks_mut(READ_TOKENS)) {
            let bytes = &mut bytes[..out.len() * width as usize];
            self.read_verified(self.layout.tokens.start + first * width, bytes)?;
            let largest = match self.header.width {
                TokenWidth::U16 => unpack(bytes, out, |b: [u8; 2]| u16::from_le_bytes(b).into()),
                TokenWidth::U32 => unpack(bytes, out, u32::from_le_bytes),
            };
            if largest >= self.header.vocab_size || i32::try_from(largest).is_err() {
                let at = first + out.iter().position(|&token| token as u32 == largest).unwrap_or(0) as u64;
                let name = self.path.display().to_string();
                return Err(outside_vocabulary(&name, largest, at, self.header.vocab_size as usize));
            }
        }
        Ok(())
    }

    /// Reads whether tokens are trained, for `out.len()` tokens at position `start` of this shard. All tokens
    /// of a shard without bits are.
    ///
    /// # Errors
    /// A read past the end, a file that shrank, a damaged block.
    pub fn trained(&self, start: u64, out: &mut [bool]) -> Result<()> {
        let end = start.checked_add(out.len() as u64).filter(|&end| end <= self.header.token_count);
        let Some(end) = end else {
            let (len, count, name) = (out.len(), self.header.token_count, self.path.display());
            return Err(DataError::Internal(format!(
                "a read of {len} bits at {start} of {name}, which has {count} tokens"
            )));
        };
        if self.header.trained_count.is_none() || out.is_empty() {
            out.fill(true);
            return Ok(());
        }
        let (first, last) = (start / 8, end.div_ceil(8));
        let mut bytes = vec![0; (last - first) as usize];
        self.read_verified(self.layout.trained.start + first, &mut bytes)?;
        let skipped = (start - first * 8) as usize;
        for (at, out) in out.iter_mut().enumerate() {
            let bit = skipped + at;
            *out = bytes[bit / 8] >> (bit % 8) & 1 == 1;
        }
        Ok(())
    }

    /// Appends the positions in `range` at which a document has ended (the position after its last token),
    /// ascending. Positions count from this shard's first token, and include the one after its last token.
    ///
    /// # Errors
    /// A file that shrank; a damaged block; ends out of order.
    pub fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        let count = self.header.document_count;
        // A binary search whose every probe reads the file. The first two probes enclose the position that
        // equal document lengths would give; the last few ends are read together.
        let guess = u128::from(range.start) * u128::from(count) / u128::from(self.header.token_count.max(1));
        let margin = 2 * READ_ENDS as u64;
        let mut probes =
            [(guess as u64).saturating_sub(margin), (guess as u64).saturating_add(margin)].into_iter();
        let (mut low, mut high) = (0, count);
        while high - low > READ_ENDS as u64 {
            let probe = probes.next().filter(|probe| (low..high).contains(probe));
            let probe = probe.unwrap_or(low + (high - low) / 2);
            let mut end = [0];
            self.read_ends(probe, &mut end)?;
            if end[0] < range.start { low = probe + 1 } else { high = probe }
        }
        let before = out.len();
        let mut ends = [0; READ_ENDS];
        while low < count {
            let ends = &mut ends[..READ_ENDS.min((count - low) as usize)];
            self.read_ends(low, ends)?;
            low += ends.len() as u64;
            let from = if out.len() > before { 0 } else { ends.partition_point(|&end| end < range.start) };
            out.extend(ends[from..].iter().take_while(|&&end| end < range.end));
            if ends.iter().any(|&end| end >= range.end) {
                break;
            }
        }
        let is_ascending = out[before..].is_sorted_by(|a, b| a < b);
        if !is_ascending || out.get(before).is_some_and(|&end| end < range.start) {
            let (start, end) = (self.layout.ends.start, self.layout.ends.end);
            return Err(self.corrupt(format!("its document ends (bytes {start} to {}) are damaged", end - 1)));
        }
        Ok(())
    }

    /// The hash of each document's question; none if the shard has none.
    ///
    /// # Errors
    /// A file that shrank; a damaged block.
    pub fn questions(&self) -> Result<Vec<u64>> {
        let section = &self.layout.questions;
        let mut hashes = vec![0; ((section.end - section.start) / 8) as usize];
        self.read_verified(section.start, bytemuck::cast_slice_mut(&mut hashes))?;
        hashes.iter_mut().for_each(|hash| *hash = u64::from_le(*hash));
        Ok(hashes)
    }

    /// Reads the whole file and compares all checksums.
    ///
    /// # Errors
    /// The number and byte range of the first block that differs.
    pub fn verify(&self) -> Result<()> {
        (0..self.block_count()).try_for_each(|block| self.verify_block(block))
    }

    /// Number of blocks with a checksum.
    pub(super) fn block_count(&self) -> usize {
        self.checksums.len()
    }

    /// Reads a block and compares its checksum.
    pub(super) fn verify_block(&self, block: usize) -> Result<()> {
        let start = self.layout.data.start + block as u64 * CHUNK_BYTES;
        let end = (start + CHUNK_BYTES).min(self.layout.data.end);
        let mut bytes = vec![0; (end - start) as usize];
        self.read_at(start, &mut bytes)?;
        if xxh3_64(&bytes) != self.checksums[block] {
            let last = end - 1;
            return Err(
                self.corrupt(format!("the checksum of bytes {start} to {last} (block {block}) is wrong"))
            );
        }
        self.is_verified[block].store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Reads bytes of the tokens, bits, document ends or questions at offset `start`, and verifies blocks
    /// that are read for the first time.
    fn read_verified(&self, start: u64, out: &mut [u8]) -> Result<()> {
        let block = |at: u64| ((at - self.layout.data.start) / CHUNK_BYTES) as usize;
        if !out.is_empty() {
            for block in block(start)..=block(start + out.len() as u64 - 1) {
                if !self.is_verified[block].load(Ordering::Relaxed) {
                    self.verify_block(block)?;
                }
            }
        }
        self.read_at(start, out)
    }

    /// Reads document ends, from that of document `first` on.
    fn read_ends(&self, first: u64, out: &mut [u64]) -> Result<()> {
        self.read_verified(self.layout.ends.start + first * 8, bytemuck::cast_slice_mut(out))?;
        out.iter_mut().for_each(|end| *end = u64::from_le(*end));
        Ok(())
    }

    /// Reads bytes of the file at offset `start`.
    fn read_at(&self, start: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, start).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                let (before, now) =
                    (self.layout.table.end, self.file.metadata().map_or(0, |file| file.len()));
                self.corrupt(format!("it shrank from {before} to {now} bytes while it was in use"))
            }
            _ => DataError::io(&self.path, "read the shard")(error),
        })
    }

    fn corrupt(&self, problem: String) -> DataError {
        DataError::corrupt(&self.path, problem, ADVICE)
    }
}

/// Converts stored tokens to `i32` and returns the largest.
fn unpack<const N: usize>(bytes: &[u8], out: &mut [i32], token: impl Fn([u8; N]) -> u32) -> u32 {
    let mut largest = 0;
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
        let token = token(*bytes);
        largest = largest.max(token);
        *out = token as i32;
    }
    largest
}
