//! A limit on the size of parquet pages, checked before a page is read and decompressed.
//!
//! A page is in memory as a whole, and a few kilobytes may declare gigabytes. The parquet crate reads each
//! page header at the start of a reader that it asks for, so this file parses the header there first. That
//! crate takes the types of known fields for granted, so a header in which one has another type is refused
//! here: both then read the same, and no lists, whose elements that crate skips by the billion.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use parquet::data_type::ByteArray;
use parquet::errors::{ParquetError, Result};
use parquet::file::reader::{ChunkReader, Length};

/// Maximum memory of a page: its bytes, compressed and decompressed, and the values of a dictionary.
const MAX_PAGE_BYTES: u64 = 512 << 20;

/// A parquet file whose pages are limited in size.
pub(super) struct LimitedPages {
    file: File,
    /// Size of a page that was refused; 0 if none was.
    refused_bytes: AtomicU64,
}

impl LimitedPages {
    pub(super) fn new(file: File) -> LimitedPages {
        LimitedPages { file, refused_bytes: AtomicU64::new(0) }
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
        let bytes = page_bytes(&mut self.file.get_read(start)?)?;
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

/// Memory that a page takes, according to its header: a structure in Thrift's compact protocol, with the
/// sizes in the fields 2 and 3, and in 7 a structure whose field 1 counts the values of a dictionary.
fn page_bytes(header: &mut impl Read) -> io::Result<u64> {
    let (mut page_bytes, mut dictionary_values) = (0, 0);
    read_fields(header, &mut |path, number| {
        // A size below 0 is damage, which the parquet crate reports.
        let number = u64::try_from(number).unwrap_or(0);
        match path {
            [2] | [3] => page_bytes = number.max(page_bytes),
            [7, 1] => dictionary_values = number.max(dictionary_values),
            _ => {}
        }
    })?;
    Ok(dictionary_values.saturating_mul(size_of::<ByteArray>() as u64).saturating_add(page_bytes))
}

/// Nesting of a header that is accepted. The format needs less.
const MAX_DEPTH: usize = 8;

/// Reads the fields of a structure up to its end. `on_number` gets the whole numbers in it, each with the ids
/// of the field and, before it, of the structure that holds it.
fn read_fields(input: &mut impl Read, on_number: &mut dyn FnMut(&[i64], i64)) -> io::Result<()> {
    struct Open {
        id: i64,
        last_field: i64,
    }
    let mut open = vec![Open { id: 0, last_field: 0 }];
    while let Some(inner) = open.last_mut() {
        let byte = read_byte(input)?;
        if byte == 0 {
            open.pop();
            continue;
        }
        inner.last_field = match byte >> 4 {
            0 => read_signed(input)?,
            delta => inner.last_field.saturating_add(delta.into()),
        };
        let (id, structure) = (inner.last_field, inner.id);
        let kind = byte & 15;
        let is_right = match open.len() {
            1 => has_its_type(&[id], kind),
            2 => has_its_type(&[structure, id], kind),
            _ => true,
        };
        if !is_right || !(1..=i16::MAX.into()).contains(&id) {
            let problem = format!("a page header has a field {id} of type {kind}");
            return Err(io::Error::new(ErrorKind::InvalidData, problem));
        }
        match kind {
            // True and false are in the type.
            1 | 2 => {}
            3 => drop(read_byte(input)?),
            4..=6 => {
                let number = read_signed(input)?;
                match open.len() {
                    1 => on_number(&[id], number),
                    2 => on_number(&[structure, id], number),
                    _ => {}
                }
            }
            7 => skip(input, 8)?,
            8 => {
                let len = read_unsigned(input)?;
                skip(input, len)?;
            }
            12 if open.len() < MAX_DEPTH => open.push(Open { id, last_field: 0 }),
            // A page header has no lists and maps.
            other => {
                let problem = format!("a page header has a field of type {other}");
                return Err(io::Error::new(ErrorKind::InvalidData, problem));
            }
        }
    }
    Ok(())
}

/// False if the format gives the field of a page header, named by ids as in [`read_fields`], another type.
fn has_its_type(path: &[i64], kind: u8) -> bool {
    match path {
        // Sizes and counts; whole numbers of all widths are written alike.
        [1..=4] | [5, 1..=4] | [7, 1..=2] | [8, 1..=6] => matches!(kind, 4..=6),
        [7, 3] | [8, 7] => matches!(kind, 1 | 2),
        [5..=8] => kind == 12,
        _ => true,
    }
}

fn read_byte(input: &mut impl Read) -> io::Result<u8> {
    let mut byte = [0];
    input.read_exact(&mut byte)?;
    Ok(byte[0])
}

fn skip(input: &mut impl Read, bytes: u64) -> io::Result<()> {
    match io::copy(&mut input.take(bytes), &mut io::sink())? {
        skipped if skipped == bytes => Ok(()),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// A number of up to 64 bits, seven bits in a byte, the lowest first.
fn read_unsigned(input: &mut impl Read) -> io::Result<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let byte = read_byte(input)?;
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(io::Error::new(ErrorKind::InvalidData, "a number in a page header has more than 64 bits"))
}

/// A number whose lowest bit is the sign.
fn read_signed(input: &mut impl Read) -> io::Result<i64> {
    let number = read_unsigned(input)?;
    Ok((number >> 1) as i64 ^ -((number & 1) as i64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_page_is_read_from_its_header() {
        // Type 2 (dictionary), 300 bytes, 100 compressed, field 7 = {1: 5 values, 2: encoding 0}.
        let dictionary: &[u8] = &[0x15, 4, 0x15, 0xD8, 4, 0x15, 0xC8, 1, 0x4C, 0x15, 10, 0x15, 0, 0, 0];
        let values = 5 * size_of::<ByteArray>() as u64;
        assert_eq!(page_bytes(&mut &*dictionary).unwrap(), 300 + values);
        // The last field of several is read, a statistic of 3 bytes (8 in 5) is skipped.
        let data: &[u8] = &[0x15, 0, 0x15, 2, 0x15, 20, 0x2C, 0x15, 10, 0x4C, 0x18, 3, 1, 2, 3, 0, 0, 0];
        assert_eq!(page_bytes(&mut &*data).unwrap(), 10);
        for end in 0..data.len() {
            assert!(page_bytes(&mut &data[..end]).is_err(), "{end}");
        }
        assert!(page_bytes(&mut &[0x1C; 100][..]).is_err(), "too deep");
        assert!(page_bytes(&mut &[0x19, 0][..]).is_err(), "a list");
        assert!(page_bytes(&mut &[0x13, 0, 0][..]).is_err(), "a byte where the page's type is due");
        assert!(page_bytes(&mut &[0x5C, 0x23, 0, 0, 0][..]).is_err(), "a byte where an encoding is due");
        // The field -2, and from there on to those that the format knows.
        assert!(page_bytes(&mut &[0x04, 3, 6, 0x33, 0, 0][..]).is_err(), "a field below 1");
    }
}
