//! Output of the ranks other than 0 (that of rank 0 is passed through), and the standard outputs of a process
//! that supervises a program.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Longest line that is written whole, in bytes. A longer one is cut into several.
const LINE: u64 = 16 << 10;

/// Bytes of a rank's standard output that are held in case it fails. Earlier ones are dropped.
const HELD: usize = 64 << 10;

/// Time to read the rest of the output after a rank has ended. A process that the rank started may hold it
/// open for longer.
const REST: Duration = Duration::from_secs(1);

/// The output of one rank.
pub(super) struct Output {
    rank: usize,
    held: Arc<Mutex<Vec<u8>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Output {
    /// Writes each line of `stderr` to the standard error output of this process, and holds `stdout`.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn read(
        rank: usize,
        stdout: impl Read + Send + 'static,
        stderr: impl Read + Send + 'static,
    ) -> io::Result<Self> {
        let held = Arc::new(Mutex::new(Vec::new()));
        let hold_in = held.clone();
        let readers = vec![
            thread::Builder::new().spawn(move || hold(stdout, &hold_in))?,
            thread::Builder::new().spawn(move || prefix(rank, stderr, &mut io::stderr()))?,
        ];
        Ok(Output { rank, held, readers })
    }

    /// Waits for the end of the output. If the rank has failed, writes what is held of its standard output.
    pub(super) fn end(&self, has_failed: bool) {
        let since = Instant::now();
        while self.readers.iter().any(|reader| !reader.is_finished()) && since.elapsed() < REST {
            thread::sleep(Duration::from_millis(5));
        }
        if has_failed {
            let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
            prefix(self.rank, &held[..], &mut io::stderr());
        }
    }
}

/// Copies lines to `to`, each with the rank in front and in one call.
fn prefix(rank: usize, from: impl Read, to: &mut impl Write) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    loop {
        line.clear();
        line.extend(format!("[rank {rank}] ").into_bytes());
        // Errors end the output; the rank's exit code says how it went.
        match (&mut from).take(LINE).read_until(b'\n', &mut line) {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        // The reader of our output may have gone. The rank's output is read all the same, so that it does not
        // wait.
        let _ = to.write_all(&line);
    }
}

fn hold(mut from: impl Read, held: &Mutex<Vec<u8>>) {
    let mut chunk = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        let mut held = held.lock().unwrap_or_else(PoisonError::into_inner);
        held.extend_from_slice(&chunk[..count]);
        let excess = held.len().saturating_sub(HELD);
        held.drain(..excess);
    }
}

/// The socket to the run, which is the standard output of a process that supervises, and the log of the
/// program, which is its standard error output.
pub(super) fn of_supervisor() -> io::Result<(UnixStream, File)> {
    let run = io::stdout().as_fd().try_clone_to_owned()?;
    let log = io::stderr().as_fd().try_clone_to_owned()?;
    Ok((run.into(), log.into()))
}

/// Appends a line to the log of a process that supervises.
pub(super) fn log_of_supervisor(line: &str) {
    // A log that cannot be written leaves the exit code.
    let _ = io::stderr().write_all(format!("{}\n", printable(line)).as_bytes());
}

/// `line` with its control characters escaped.
fn printable(line: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_debug().collect() } else { vec![c] };
    line.chars().flat_map(escaped).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefixed(text: &[u8]) -> String {
        let mut to = Vec::new();
        prefix(3, text, &mut to);
        String::from_utf8(to).expect("text")
    }

    #[test]
    fn each_line_begins_with_the_rank() {
        assert_eq!(prefixed(b"one\n\ntwo"), "[rank 3] one\n[rank 3] \n[rank 3] two\n");
        assert_eq!(prefixed(b""), "");
    }

    #[test]
    fn endless_lines_are_cut() {
        let lines = prefixed(&[b'x'; 40_000]);
        assert!(lines.lines().count() == 3 && lines.lines().all(|line| line.len() < 17_000));
    }

    #[test]
    fn control_characters_of_names_are_escaped() {
        assert_eq!(printable("a\u{1b}[2J\nb 'é'\\"), "a\\u{1b}[2J\\nb 'é'\\");
    }

    #[test]
    fn the_end_of_long_output_is_held() {
        let held = Mutex::new(Vec::new());
        hold([&[b'x'; 100_000][..], b"error"].concat().as_slice(), &held);
        let held = held.into_inner().expect("no panic");
        assert!(held.len() == HELD && held.ends_with(b"xerror"));
    }
}
