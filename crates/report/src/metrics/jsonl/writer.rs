//! Appending to `metrics.jsonl`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::resume::{self, Recovery};
use super::wire;
use crate::metrics::{Lost, MetricsError, Record};

/// An open metrics file. Each record is one write of a whole line, with nothing held back.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl Writer {
    /// Makes the file for a new run; it is an error if it holds anything already.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let writer = Self::append(path)?;
        match writer.len_bytes {
            0 => Ok(writer),
            _ => Err(MetricsError::Exists { path: path.to_owned() }),
        }
    }

    /// Opens the file of a resumed run, without the lines of `lost` records and without a torn last line. The
    /// file need not exist.
    ///
    /// The old file is replaced by one rename, after the new one is safely on disk, so a crash in between
    /// loses nothing.
    pub fn resume(path: &Path, lost: Lost) -> Result<(Self, Recovery), MetricsError> {
        let recovery = resume::drop_lost(path, lost)?;
        Ok((Self::append(path)?, recovery))
    }

    /// Writes `record` as one line.
    ///
    /// After an error the file is as it was, so that a later record starts on a line of its own.
    pub fn write(&mut self, record: &Record) -> Result<(), MetricsError> {
        let mut line = wire::encode(record);
        line.push('\n');
        if let Err(source) = self.file.write_all(line.as_bytes()) {
            // Report the error of the write. A device that cannot truncate the file leaves a torn line, which
            // readers expect.
            let _ = self.file.set_len(self.len_bytes);
            return Err(MetricsError::io("write metrics", &self.path)(source));
        }
        self.len_bytes += line.len() as u64;
        Ok(())
    }

    /// The bytes written so far; another thread can wait until they are on disk.
    pub fn unsynced(&self) -> Result<Unsynced, MetricsError> {
        let file = self.file.try_clone().map_err(MetricsError::io("write metrics", &self.path))?;
        Ok(Unsynced { file, path: self.path.clone() })
    }

    fn append(path: &Path) -> Result<Self, MetricsError> {
        let open = || -> io::Result<(File, u64)> {
            let file = OpenOptions::new().create(true).append(true).open(path)?;
            let len_bytes = file.metadata()?.len();
            Ok((file, len_bytes))
        };
        let (file, len_bytes) = open().map_err(MetricsError::io("open metrics", path))?;
        Ok(Self { file, path: path.to_owned(), len_bytes })
    }
}

/// Lines that are in the file, and may not be on the disk yet.
#[derive(Debug)]
pub struct Unsynced {
    file: File,
    path: PathBuf,
}

impl Unsynced {
    /// Waits until they are.
    pub fn sync(&self) -> Result<(), MetricsError> {
        self.file.sync_data().map_err(MetricsError::io("write metrics", &self.path))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::metrics::Resumed;

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file_and_the_remedy() {
        let path = Path::new("/dev/full");
        let file = OpenOptions::new().append(true).open(path).unwrap();
        let mut writer = Writer { file, path: path.to_owned(), len_bytes: 0 };
        let error =
            writer.write(&Record { time: 0.0, event: Resumed::after(1).into() }).unwrap_err().to_string();
        assert!(error.starts_with("/dev/full: cannot write metrics: "), "{error}");
        assert!(error.ends_with("; free some space and run the same command again"), "{error}");
    }
}
