//! A log whose first and last MiB are kept, so that a program that floods it fills no disk.
//!
//! ```text
//! first MiB | a line with the number of bytes that were left out | last MiB, or up to three
//! ```

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::thread;
use std::time::Duration;

/// Bytes at the beginning that are never removed.
const FIRST: u64 = 1 << 20;

/// Bytes at the end that stay when others are removed.
const LAST: u64 = 1 << 20;

/// Length at which bytes are removed, so that each is moved at most once.
const MOST: u64 = FIRST + 3 * LAST;

/// Pause after bytes were removed: a program that floods its log waits, rather than take a core from the run.
const PAUSE: Duration = Duration::from_millis(50);

/// Bytes that one call reads.
const CHUNK: usize = 64 << 10;

const BEFORE: &str = "\n[xtrain left out ";
const AFTER: &str = " bytes here]\n";

/// A log that another process may have begun. It is open for reading and appending.
pub(super) struct BoundedLog {
    file: File,
    bytes: u64,
}

impl BoundedLog {
    pub(super) fn new(file: File) -> Self {
        let bytes = length(&file);
        BoundedLog { file, bytes }
    }

    /// Appends what comes until its end. Errors of the disk lose output, and nothing else.
    pub(super) fn copy(mut self, mut from: impl Read) {
        let mut chunk = [0; CHUNK];
        loop {
            match from.read(&mut chunk) {
                Ok(0) => break,
                Ok(count) => self.append(&chunk[..count]),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.shorten(FIRST + LAST);
    }

    fn append(&mut self, text: &[u8]) {
        self.bytes = match self.file.write_all(text) {
            Ok(()) => self.bytes + text.len() as u64,
            Err(_) => length(&self.file),
        };
        if self.shorten(MOST) {
            thread::sleep(PAUSE);
        }
    }

    /// Removes bytes from the middle if there are more than `most`. True if there were.
    fn shorten(&mut self, most: u64) -> bool {
        // The line of an earlier removal is not much.
        let is_long = self.bytes > most + CHUNK as u64;
        if is_long {
            // What cannot be removed stays.
            let _ = self.remove_middle();
            self.bytes = length(&self.file);
        }
        is_long
    }

    fn remove_middle(&mut self) -> io::Result<()> {
        let (line, earlier) = self.left_out();
        let mut last = vec![0; LAST as usize];
        self.file.read_exact_at(&mut last, self.bytes - LAST)?;
        let left_out = earlier + (self.bytes - LAST).saturating_sub(FIRST + line);
        self.file.set_len(FIRST)?;
        self.file.write_all(format!("{BEFORE}{left_out}{AFTER}").as_bytes())?;
        self.file.write_all(&last)
    }

    /// Length of the line of an earlier removal, and its number. Both are 0 if there is none.
    fn left_out(&self) -> (u64, u64) {
        let mut line = [0; 64];
        let count = self.file.read_at(&mut line, FIRST).unwrap_or(0);
        let text = String::from_utf8_lossy(&line[..count]);
        let number =
            text.strip_prefix(BEFORE).and_then(|rest| rest.split_once(AFTER)).map(|(number, _)| number);
        let number = number.and_then(|text| Some((text.len(), text.parse().ok()?)));
        number.map_or((0, 0), |(digits, number)| ((BEFORE.len() + digits + AFTER.len()) as u64, number))
    }
}

fn length(file: &File) -> u64 {
    file.metadata().map_or(0, |metadata| metadata.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn appended(path: &Path, text: &[u8]) -> Vec<u8> {
        let file = File::options().create(true).read(true).append(true).open(path).expect("a file");
        BoundedLog::new(file).copy(text);
        std::fs::read(path).expect("a file")
    }

    /// Numbered lines of 10 bytes.
    fn lines(numbers: std::ops::Range<usize>) -> Vec<u8> {
        numbers.flat_map(|n| format!("{n:09}\n").into_bytes()).collect()
    }

    #[test]
    fn a_short_log_is_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        assert_eq!(appended(&path, b"one\n"), b"one\n");
        assert_eq!(appended(&path, b"two"), b"one\ntwo");
        let text = lines(0..200_000);
        assert!(appended(&folder.path().join("two"), &text) == text, "two MB");
    }

    #[test]
    fn the_first_and_the_last_mib_of_a_flood_stay_with_the_number_of_bytes_between() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let text = lines(0..2_000_000);
        let mut total = 0;
        // Also over several runs.
        for part in text.chunks(7_654_321) {
            total += part.len() as u64;
            let log = appended(&path, part);
            let line = format!("{BEFORE}{}{AFTER}", total - FIRST - LAST);
            let middle = FIRST as usize..FIRST as usize + line.len();
            assert_eq!(String::from_utf8_lossy(&log[middle.clone()]), line);
            assert!(log[..FIRST as usize] == text[..FIRST as usize], "the first MiB");
            assert!(log[middle.end..] == text[(total - LAST) as usize..total as usize], "the last MiB");
        }
    }

    #[test]
    fn a_flood_never_takes_more_than_a_few_mib() {
        struct Flood<'a>(&'a Path, u64);
        impl Read for Flood<'_> {
            fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
                let length = std::fs::metadata(self.0)?.len();
                assert!(length <= MOST + 2 * CHUNK as u64, "{length}");
                to.fill(b'x');
                self.1 += to.len() as u64;
                Ok(if self.1 < 40 << 20 { to.len() } else { 0 })
            }
        }
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let file = File::options().create(true).read(true).append(true).open(&path).expect("a file");
        BoundedLog::new(file).copy(Flood(&path, 0));
    }
}
