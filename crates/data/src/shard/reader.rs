//! Reading a shard through a memory map.
//!
//! Opening checks the header, the size and the table of checksums, which together are some kilobytes; the content
//! is checked by [`Shard::verify`]. Before every read the file's size is asked again: a file that was truncated
//! meanwhile is an error, where touching its map would be the end of the process. A file cut in the instant
//! between the question and the read is beyond this; `verify` reads without the map and has no such instant.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use xxhash_rust::xxh3::xxh3_64;

use super::header::{CHUNK_BYTES, HEADER_BYTES, Layout, ShardHeader, TokenWidth};
use crate::error::{DataError, Result};
use crate::stream::outside_vocabulary;

const FIX: &str = "tokenize again, or restore the file";

/// An open shard.
#[derive(Debug)]
pub struct Shard {
    path: PathBuf,
    file: File,
    map: Mmap,
    header: ShardHeader,
    layout: Layout,
}

impl Shard {
    /// Opens a shard and checks everything but its content.
    ///
    /// # Errors
    /// No such file; no shard; another version; a damaged header; a size that is not the header's.
    pub fn open(path: &Path) -> Result<Shard> {
        let corrupt = |what: String| DataError::corrupt(path, what, FIX);
        let mut file = File::open(path).map_err(DataError::io(path, "open the shard"))?;
        let file_bytes = file.metadata().map_err(DataError::io(path, "open the shard"))?.len();
        let mut bytes = [0; HEADER_BYTES];
        if file_bytes < HEADER_BYTES as u64 {
            return Err(corrupt(format!(
                "it has {file_bytes} bytes, fewer than the header of a token shard"
            )));
        }
        file.read_exact(&mut bytes).map_err(DataError::io(path, "read the shard"))?;
        let header = ShardHeader::from_bytes(&bytes).map_err(corrupt)?;
        let layout = header.layout().ok_or_else(|| corrupt("its counts are impossible".to_owned()))?;
        if file_bytes != layout.table.end {
            let expected = layout.table.end;
            return Err(corrupt(format!("it has {file_bytes} bytes where its header says {expected}")));
        }
        // SAFETY: the map is read only, and every access first checks that the file still has its full length; a
        // file that changes in place can give other tokens, which are checked against the vocabulary, but nothing
        // here relies on the bytes staying the same.
        let map = unsafe { Mmap::map(&file) }.map_err(DataError::io(path, "map the shard"))?;
        let shard = Shard { path: path.to_path_buf(), file, map, header, layout };
        if xxh3_64(shard.bytes(shard.layout.table.clone())?) != shard.header.table_checksum {
            return Err(shard.corrupt("its table of checksums is damaged".to_owned()));
        }
        Ok(shard)
    }

    /// What the shard says about itself.
    pub fn header(&self) -> &ShardHeader {
        &self.header
    }

    /// Fills `out` with the tokens from position `start` of this shard on.
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
                "{len} tokens wanted at {start} of {name}, which has {count}"
            )));
        };
        let base = self.layout.tokens.start;
        let bytes = self.bytes(base + start * width..base + end * width)?;
        let mut largest = 0;
        match self.header.width {
            TokenWidth::U16 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    let token = u32::from(u16::from_le_bytes([bytes[0], bytes[1]]));
                    largest = largest.max(token);
                    *out = token as i32;
                }
            }
            TokenWidth::U32 => {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    let token = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
                    largest = largest.max(token);
                    *out = token as i32;
                }
            }
        }
        if largest >= self.header.vocab_size || i32::try_from(largest).is_err() {
            let at = start + out.iter().position(|&token| token as u32 == largest).unwrap_or(0) as u64;
            let name = self.path.display().to_string();
            return Err(outside_vocabulary(&name, largest, at, self.header.vocab_size as usize));
        }
        Ok(())
    }

    /// Appends, ascending, each position in `range` behind a document's last token. Positions count from this
    /// shard's first token; the one behind its last token may be among them.
    ///
    /// # Errors
    /// A file that shrank; ends that are out of order.
    pub fn document_ends(&self, range: Range<u64>, out: &mut Vec<u64>) -> Result<()> {
        let table = self.bytes(self.layout.ends.clone())?;
        let end_of = |document: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&table[document * 8..document * 8 + 8]);
            u64::from_le_bytes(bytes)
        };
        let (mut low, mut high) = (0, table.len() / 8);
        while low < high {
            let middle = low + (high - low) / 2;
            if end_of(middle) < range.start { low = middle + 1 } else { high = middle }
        }
        let before = out.len();
        out.extend((low..table.len() / 8).map(end_of).take_while(|&end| end < range.end));
        let is_ascending = out[before..].is_sorted_by(|a, b| a < b);
        if !is_ascending || out.get(before).is_some_and(|&end| end < range.start) {
            let (start, end) = (self.layout.ends.start, self.layout.ends.end);
            return Err(self.corrupt(format!("its document ends (bytes {start} to {}) are damaged", end - 1)));
        }
        Ok(())
    }

    /// Reads the whole file and compares every checksum.
    ///
    /// # Errors
    /// The first chunk that differs, by its byte range.
    pub fn verify(&self) -> Result<()> {
        let table = self.bytes(self.layout.table.clone())?.to_vec();
        let mut file = File::open(&self.path).map_err(DataError::io(&self.path, "open the shard"))?;
        file.seek(SeekFrom::Start(self.layout.data.start))
            .map_err(DataError::io(&self.path, "read the shard"))?;
        let mut chunk = vec![0; CHUNK_BYTES as usize];
        for (number, expected) in table.chunks_exact(8).enumerate() {
            let start = self.layout.data.start + number as u64 * CHUNK_BYTES;
            let end = (start + CHUNK_BYTES).min(self.layout.data.end);
            let chunk = &mut chunk[..(end - start) as usize];
            file.read_exact(chunk).map_err(DataError::io(&self.path, "read the shard"))?;
            if xxh3_64(chunk).to_le_bytes() != expected {
                return Err(self.corrupt(format!("the checksum of bytes {start} to {} is wrong", end - 1)));
            }
        }
        Ok(())
    }

    /// A part of the map, after making sure that the file is still all there.
    fn bytes(&self, range: Range<u64>) -> Result<&[u8]> {
        let now = self.file.metadata().map_err(DataError::io(&self.path, "read the shard"))?.len();
        if now < self.layout.table.end {
            let before = self.layout.table.end;
            return Err(self.corrupt(format!("it shrank from {before} to {now} bytes while it was in use")));
        }
        Ok(&self.map[range.start as usize..range.end as usize])
    }

    fn corrupt(&self, what: String) -> DataError {
        DataError::corrupt(&self.path, what, FIX)
    }
}
