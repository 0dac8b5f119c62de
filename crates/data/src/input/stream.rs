//! An input file as a stream of decompressed bytes, with errors that give the position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::files::InputFile;
use super::foreign::{self, START_BYTES};
use super::gzip::GzipMembers;
use super::kinds::Compression;
use super::zstd_frames::ZstdFrames;
use crate::error::{DataError, Result};

const BUFFER_BYTES: usize = 256 << 10;

/// Reader of decompressed bytes that counts them.
pub(crate) struct InputStream {
    reader: Box<dyn BufRead + Send>,
    path: PathBuf,
    compression: Compression,
    offset: u64,
}

/// Opens a file; `bytes_read` is updated with the position in the (possibly compressed) file.
///
/// # Errors
/// The file cannot be opened, or its first bytes are not what its name says.
pub(crate) fn open(file: &InputFile, bytes_read: Arc<AtomicU64>) -> Result<InputStream> {
    let InputFile { path, compression, bytes, .. } = file;
    let opened = File::open(path).map_err(DataError::io(path, "open the input"))?;
    let mut counted = BufReader::with_capacity(BUFFER_BYTES, CountingReader { file: opened, bytes_read });
    // An empty file is not a compressed stream, but the decoders accept it as empty text.
    if *bytes == 0 && *compression != Compression::None {
        return Err(damaged(path, 0, "the file is empty"));
    }
    let start = first_bytes(&mut counted).map_err(DataError::io(path, "read the input"))?;
    if let Some(error) = foreign::refuse_uncompressed(path, *compression, start) {
        return Err(error);
    }
    let reader: Box<dyn BufRead + Send> = match compression {
        Compression::None => Box::new(counted),
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, GzipMembers::new(counted))),
        Compression::Zstd => {
            let frames = ZstdFrames::new(counted, *bytes).map_err(|e| damaged(path, 0, &e.to_string()))?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, frames))
        }
    };
    let mut stream = InputStream { reader, path: path.clone(), compression: *compression, offset: 0 };
    let refused = match first_bytes(&mut stream.reader) {
        Ok(start) => foreign::refuse(path, file.format, *compression, start),
        Err(error) => Some(stream.error(error)),
    };
    refused.map_or(Ok(stream), Err)
}

/// The first bytes of a file, which stay unread.
fn first_bytes(reader: &mut impl BufRead) -> io::Result<&[u8]> {
    while let Err(error) = reader.fill_buf() {
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    let start = reader.fill_buf()?;
    Ok(&start[..start.len().min(START_BYTES)])
}

impl InputStream {
    /// The file's name, for errors.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of decompressed bytes read so far.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Appends some bytes to `out`; false at the end of the file.
    pub(crate) fn read_some(&mut self, out: &mut Vec<u8>) -> Result<bool> {
        let filled = loop {
            match self.reader.fill_buf() {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                // Returning the buffer from the loop would keep it borrowed, so it is fetched again below.
                other => break other.map(<[u8]>::len),
            }
        };
        if let Err(error) = filled {
            return Err(self.error(error));
        }
        let bytes = self.reader.fill_buf().unwrap_or_default();
        let len = bytes.len();
        out.extend_from_slice(bytes);
        self.reader.consume(len);
        self.offset += len as u64;
        Ok(len > 0)
    }

    /// True if the first byte that is no white space is this one, after a byte-order mark if any. Nothing is
    /// read but what is buffered.
    pub(crate) fn begins_with(&mut self, byte: u8) -> Result<bool> {
        let start = match first_bytes(&mut self.reader) {
            Ok(start) => start,
            Err(error) => return Err(self.error(error)),
        };
        let text = start.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(start);
        Ok(text.trim_ascii_start().first() == Some(&byte))
    }

    /// Appends bytes up to and including the next newline, at most `limit`. Returns their number, 0 at the
    /// end.
    pub(crate) fn read_line(&mut self, limit: usize, out: &mut Vec<u8>) -> Result<usize> {
        let len = match (&mut self.reader).take(limit as u64).read_until(b'\n', out) {
            Ok(len) => len,
            Err(error) => return Err(self.error(error)),
        };
        self.offset += len as u64;
        Ok(len)
    }

    fn error(&self, error: io::Error) -> DataError {
        if self.compression == Compression::None || error.raw_os_error().is_some() {
            return DataError::io(&self.path, "read the input")(error);
        }
        let problem = error.to_string();
        let location = || format!("after {} decompressed bytes", self.offset);
        // Such files are not damaged.
        if error.kind() == io::ErrorKind::OutOfMemory || problem.starts_with("Allocation error") {
            let advice = "decompress it first (zstd -d --long=31), or compress it again without --long";
            return DataError::input(&self.path, location(), problem, advice);
        }
        if problem == "Dictionary mismatch" {
            let problem = "it is compressed with a dictionary, which reading it needs";
            let advice = "decompress it first (zstd -d -D <dictionary>), or compress it again without one";
            return DataError::input(&self.path, location(), problem, advice);
        }
        damaged(&self.path, self.offset, &problem)
    }
}

fn damaged(path: &Path, offset: u64, problem: &str) -> DataError {
    DataError::input(
        path,
        format!("after {offset} decompressed bytes"),
        format!("the compressed data is damaged or ends early ({problem})"),
        "fetch or compress the file again",
    )
}

/// A file that counts the bytes read.
struct CountingReader {
    file: File,
    bytes_read: Arc<AtomicU64>,
}

impl Read for CountingReader {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.file.read(out)?;
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        Ok(len)
    }
}
