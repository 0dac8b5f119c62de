//! The reader of a shard, with random access.
//!
//! Opening checks the header, the size and the table of checksums, some kilobytes in all; [`Shard::verify`]
//! checks the content. Nothing is cached or memory-mapped: truncation of a file in use is an error, where
//! touching a truncated mapping would kill the process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::header::{CHUNK_BYTES, HEADER_BYTES, Layout, ShardHeader, TokenWidth};
use crate::error::{DataError, Result};
use crate::files;
use crate::stream::outside_vocabulary;

/// Tokens per read of the file.
const READ_TOKENS: usize = 1 << 16;
/// Document ends per read of the file.
const READ_ENDS: usize = 512;
const ADVICE: &str = "tokenize again, or restore the file";

/// An open shard.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    header: ShardHeader,
    layout: Layout,
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
        let shard = Shard { path: path.to_path_buf(), file, header, layout };
        if xxh3_64(&shard.table()?) != shard.header.table_checksum {
            return Err(shard.corrupt("its table of checksums is damaged".to_owned()));
        }
        Ok(shard)
    }

    /// The header.
    pub fn header(&self) -> &ShardHeader {
        &self.header
    }

    /// Reads `out.len()` tokens at position `start` of this shard.
    ///
    /// # Errors
    /// A read past the end, a file that shrank, a token outside the vocabulary.
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
            self.read_at(self.layout.tokens.start + first * width, bytes)?;
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

    /// Appends the positions in `range` at which a document has ended (the position after its last token),
    /// ascending. Positions count from this shard's first token, and include the one after its last token.
    ///
    /// # Errors
    /// A file that shrank; ends out of order.
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

    /// Reads the whole file and compares all checksums.
    ///
    /// # Errors
    /// The byte range of the first chunk that differs.
    pub fn verify(&self) -> Result<()> {
        let mut chunk = vec![0; CHUNK_BYTES as usize];
        for (number, expected) in self.table()?.chunks_exact(8).enumerate() {
            let start = self.layout.data.start + number as u64 * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(self.layout.data.end);
            let chunk = &mut chunk[..(end - start) as usize];
            self.read_at(start, chunk)?;
            if xxh3_64(chunk).to_le_bytes() != expected {
                return Err(self.corrupt(format!("the checksum of bytes {start} to {} is wrong", end - 1)));
            }
        }
        Ok(())
    }

    /// The table of checksums, as stored.
    fn table(&self) -> Result<Vec<u8>> {
        let table = &self.layout.table;
        let mut bytes = vec![0; (table.end - table.start) as usize];
        self.read_at(table.start, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads document ends, from that of document `first` on.
    fn read_ends(&self, first: u64, out: &mut [u64]) -> Result<()> {
        self.read_at(self.layout.ends.start + first * 8, bytemuck::cast_slice_mut(out))?;
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
