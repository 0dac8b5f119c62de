//! A limit on the size of parquet pages, checked before a page is read and decompressed.
//!
//! A page is in memory as a whole, and a few kilobytes may declare gigabytes. The parquet crate reads each
//! page header at the start of a reader that it asks for, so this file parses the header there first. That
//! crate takes the types of known fields for granted, so a header in which one has another type is refused
//! here: both then read the same, and no lists, whose elements that crate skips by the billion.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bytes::Bytes;
use parquet::data_type::ByteArray;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

use super::thrift;

/// Maximum memory of a page: its bytes, compressed and decompressed, and the values of a dictionary.
const MAX_PAGE_BYTES: u64 = 512 << 20;

/// A parquet file whose pages are limited in size.
pub(super) struct LimitedPages {
    file: File,
    /// Size of a page that was refused; 0 if none was.
    refused_bytes: AtomicU64,
    /// Ends of the headers that were checked. The parquet crate asks for a reader there, too, and does not
    /// use it, if it has looked at a header before it takes the page.
    header_ends: Mutex<HashSet<u64>>,
}

impl LimitedPages {
    pub(super) fn new(file: File) -> LimitedPages {
        LimitedPages { file, refused_bytes: AtomicU64::new(0), header_ends: Mutex::default() }
    }

    /// The problem with the page that was refused, if one was.
    pub(super) fn refused(&self) -> Option<String> {
        let bytes = self.refused_bytes.load(Ordering::Relaxed);
        let (bytes, most) = (bytes.div_ceil(1 << 20), MAX_PAGE_BYTES >> 20);
        (bytes > 0).then(|| format!("a page takes {bytes} MiB of memory, more than {most} MiB"))
    }
}

impl Length for LimitedPages {
    fn len(&self) -> u64 {
        Length::len(&self.file)
    }
}

impl ChunkReader for LimitedPages {
    type T = BufReader<File>;

    fn get_read(&self, start: u64) -> Result<Self::T> {
        let mut header_ends = self.header_ends.lock().unwrap_or_else(PoisonError::into_inner);
        if header_ends.remove(&start) {
            return self.file.get_read(start);
        }
        let mut header = CountingReader { reader: self.file.get_read(start)?, bytes: 0 };
        let PageSize { memory: bytes, in_file } = page_size(&mut header)?;
        // After a page without bytes comes the next header.
        if in_file > 0 {
            header_ends.insert(start + header.bytes);
        }
        if bytes > MAX_PAGE_BYTES {
            self.refused_bytes.store(bytes, Ordering::Relaxed);
            return Err(ParquetError::General("a page is too large".to_owned()));
        }
        self.file.get_read(start)
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        self.file.get_bytes(start, length)
    }
}

/// Bytes of a page.
struct PageSize {
    /// In memory.
    memory: u64,
    /// In the file, after its header.
    in_file: u64,
}

/// A reader that counts the bytes read.
struct CountingReader<R> {
    reader: R,
    bytes: u64,
}

impl<R: Read> Read for CountingReader<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.reader.read(out)?;
        self.bytes += len as u64;
        Ok(len)
    }
}

/// The size of a page, according to its header: a structure in Thrift's compact protocol, with the
/// sizes in the fields 2 and 3, and in 7 a structure whose field 1 counts the values of a dictionary.
fn page_size(header: &mut impl Read) -> io::Result<PageSize> {
    let (mut page_bytes, mut in_file, mut dictionary_values) = (0, 0, 0);
    thrift::read_fields(header, &mut |path, kind, number| {
        if !has_its_type(path, kind) {
            let id = path.last().unwrap_or(&0);
            return Err(thrift::invalid(format!("a page header has a field {id} of type {kind}")));
        }
        // A size below 0 is damage, which the parquet crate reports.
        let number = u64::try_from(number).unwrap_or(0);
        match path {
            [2] => page_bytes = number.max(page_bytes),
            [3] => {
                page_bytes = number.max(page_bytes);
                in_file = number;
            }
            [7, 1] => dictionary_values = number.max(dictionary_values),
            _ => {}
        }
        Ok(())
    })?;
    let dictionary_bytes = dictionary_values.saturating_mul(size_of::<ByteArray>() as u64);
    Ok(PageSize { memory: dictionary_bytes.saturating_add(page_bytes), in_file })
}

/// False if the format gives the field of a page header, named by ids as in [`thrift::OnField`], another
/// type.
fn has_its_type(path: &[i64], kind: u8) -> bool {
    match path {
        // Sizes and counts; whole numbers of all widths are written alike.
        [1..=4] | [5, 1..=4] | [7, 1..=2] | [8, 1..=6] => matches!(kind, thrift::I16..=thrift::I64),
        [7, 3] | [8, 7] => matches!(kind, thrift::TRUE | thrift::FALSE),
        [5..=8] => kind == thrift::STRUCT,
        _ => !matches!(kind, thrift::LIST | thrift::SET),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(header: &mut &[u8]) -> io::Result<u64> {
        page_size(header).map(|size| size.memory)
    }

    #[test]
    fn the_memory_of_a_page_is_read_from_its_header() {
        // Type 2 (dictionary), 300 bytes, 100 compressed, field 7 = {1: 5 values, 2: encoding 0}.
        let dictionary: &[u8] = &[0x15, 4, 0x15, 0xD8, 4, 0x15, 0xC8, 1, 0x4C, 0x15, 10, 0x15, 0, 0, 0];
        let values = 5 * size_of::<ByteArray>() as u64;
        assert_eq!(memory(&mut &*dictionary).unwrap(), 300 + values);
        // The last field of several is read, a statistic of 3 bytes (8 in 5) is skipped.
        let data: &[u8] = &[0x15, 0, 0x15, 2, 0x15, 20, 0x2C, 0x15, 10, 0x4C, 0x18, 3, 1, 2, 3, 0, 0, 0];
        assert_eq!(memory(&mut &*data).unwrap(), 10);
        for end in 0..data.len() {
            assert!(memory(&mut &data[..end]).is_err(), "{end}");
        }
        assert!(memory(&mut &[0x1C; 100][..]).is_err(), "too deep");
        assert!(memory(&mut &[0x19, 0][..]).is_err(), "a list");
        assert!(memory(&mut &[0x13, 0, 0][..]).is_err(), "a byte where the page's type is due");
        assert!(memory(&mut &[0x5C, 0x23, 0, 0, 0][..]).is_err(), "a byte where an encoding is due");
        // The field -2, and from there on to those that the format knows.
        assert!(memory(&mut &[0x04, 3, 6, 0x33, 0, 0][..]).is_err(), "a field below 1");
    }
}
