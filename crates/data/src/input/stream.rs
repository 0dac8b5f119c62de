//! An input file as a stream of decompressed bytes, with errors that give the position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::files::{Compression, InputFile};
use super::gzip::GzipMembers;
use crate::error::{DataError, Result};

const BUFFER_BYTES: usize = 256 << 10;

/// Reader of decompressed bytes that counts them.
pub(super) struct InputStream {
    reader: Box<dyn BufRead + Send>,
    path: PathBuf,
    compression: Compression,
    offset: u64,
}

/// Opens a file; `bytes_read` is updated with the position in the (possibly compressed) file.
pub(super) fn open(file: &InputFile, bytes_read: Arc<AtomicU64>) -> Result<InputStream> {
    let opened = File::open(&file.path).map_err(DataError::io(&file.path, "open the input"))?;
    let counted = BufReader::with_capacity(BUFFER_BYTES, CountingReader { file: opened, bytes_read });
    let reader: Box<dyn BufRead + Send> = match file.compression {
        Compression::None => Box::new(counted),
        // An empty file is not a compressed stream, but the decoders accept it as empty text.
        _ if file.bytes == 0 => return Err(damaged(&file.path, 0, "the file is empty")),
        Compression::Gzip => Box::new(BufReader::with_capacity(BUFFER_BYTES, GzipMembers::new(counted))),
        Compression::Zstd => {
            let decoder =
                zstd::Decoder::with_buffer(counted).map_err(|e| damaged(&file.path, 0, &e.to_string()))?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder))
        }
    };
    Ok(InputStream { reader, path: file.path.clone(), compression: file.compression, offset: 0 })
}

impl InputStream {
    /// The file's name, for errors.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Number of decompressed bytes read so far.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Appends some bytes to `out`; false at the end of the file.
    pub(super) fn read_some(&mut self, out: &mut Vec<u8>) -> Result<bool> {
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

    /// Appends bytes up to and including the next newline, at most `limit`. Returns their number, 0 at the
    /// end.
    pub(super) fn read_line(&mut self, limit: usize, out: &mut Vec<u8>) -> Result<usize> {
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
        if self.compression == Compression::Zstd
            && let Some((problem, advice)) = zstd_option_needed(&problem)
        {
            return DataError::input(
                &self.path,
                format!("after {} decompressed bytes", self.offset),
                problem,
                advice,
            );
        }
        damaged(&self.path, self.offset, &problem)
    }
}

/// Problem and advice for an error of zstd that means that the file needs special options rather than that it
/// is damaged.
fn zstd_option_needed(error: &str) -> Option<(&'static str, &'static str)> {
    match error {
        "Frame requires too much memory for decoding" => Some((
            "it is compressed with a window of more than 128 MiB",
            "decompress it first (zstd -d --long=31), or compress it again without --long",
        )),
        "Dictionary mismatch" => Some((
            "it is compressed with a dictionary, which reading it needs",
            "decompress it first (zstd -d -D <dictionary>), or compress it again without one",
        )),
        _ => None,
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
