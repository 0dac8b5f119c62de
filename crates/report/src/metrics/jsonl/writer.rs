//! Writer that appends to `metrics.jsonl`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::resume::{self, Recovery};
use super::wire;
use crate::metrics::{DroppedRecords, MetricsError, Record};

/// An open metrics file. Each record is one unbuffered write of a whole line.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl Writer {
    /// Creates the file for a new run; fails if the file has content.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let writer = Self::append(path)?;
        match writer.len_bytes {
            0 => Ok(writer),
            _ => Err(MetricsError::Exists { path: path.to_owned() }),
        }
    }

    /// Opens the file of a resumed run, without the lines of `dropped` records and without a torn last line.
    /// The file need not exist.
    ///
    /// A rename replaces the old file after the new one is synced, so a crash in between loses nothing.
    pub fn resume(path: &Path, dropped: DroppedRecords) -> Result<(Self, Recovery), MetricsError> {
        let recovery = resume::drop_records(path, dropped)?;
        Ok((Self::append(path)?, recovery))
    }

    /// Writes `record` as one line.
    ///
    /// After an error the file is unchanged, so that the next record starts on a line of its own.
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

    /// The bytes written so far, for another thread that syncs them to disk.
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

/// Lines in the file that may not be on disk yet.
#[derive(Debug)]
pub struct Unsynced {
    file: File,
    path: PathBuf,
}

impl Unsynced {
    /// Syncs them to disk.
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
        assert!(
            error.ends_with(
                "; free some space and run the command again (a run that has begun: with --resume)"
            ),
            "{error}"
        );
    }
}
