//! `log.command`: a user's program that receives each line of metrics on its standard input.
//!
//! A thread writes the lines, so training never waits for the program. If the queue is full, lines are lost;
//! if the program has ended, all further lines are lost. Each case causes one warning.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{MetricsError, Record, jsonl};
use xtrain_distributed::{Supervised, Tie};

/// Maximum number of lines that wait for the program.
const QUEUE: usize = 4096;
/// Time limit for writing the remaining lines at the end of a run.
const AT_THE_END: Duration = Duration::from_secs(1);
/// File of the run folder that receives the output of the program.
pub const COMMAND_LOG: &str = "command.log";
/// Environment variable that names the run folder for the program.
const RUN_FOLDER: &str = "XTRAIN_RUN";

/// A started program, and its queue of lines. Dropping this closes the program's standard input after at most
/// one second, and does not wait for the program to end, which has 30 seconds for that.
pub struct Command {
    name: String,
    lines: Option<SyncSender<String>>,
    /// Set by the thread when all lines are written, or no more can be.
    is_done: Arc<AtomicBool>,
    has_warned: bool,
    /// Its drop says that the run ends in order.
    _tie: Tie,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Command {
    /// Starts `command`, a program and its arguments, without a shell. Its environment names `folder` in
    /// `XTRAIN_RUN`. Its output goes to a file there, of bounded length, so it holds none of the run's own
    /// streams open. It ends with the run: see [`Supervised`] and [`Tie`].
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn start(command: &[String], folder: &Path) -> Result<Option<Self>, MetricsError> {
        let [program, arguments @ ..] = command else { return Ok(None) };
        let cannot = |source: io::Error| MetricsError::Command { program: program.clone(), source };
        let log = folder.join(COMMAND_LOG);
        let output = OpenOptions::new().create(true).read(true).append(true).open(&log);
        let output = output.map_err(MetricsError::io("open the output of log.command", &log))?;
        let run = std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
        let variables = [(RUN_FOLDER, run.as_os_str())];
        let (process, tie) = Supervised::start(program, arguments, &variables, output).map_err(cannot)?;
        let (lines, waiting) = sync_channel(QUEUE);
        let is_done = Arc::new(AtomicBool::new(false));
        let (name, done) = (program.clone(), is_done.clone());
        let write = move || {
            write_all(&name, &log, process, &waiting);
            done.store(true, Ordering::Release);
        };
        thread::Builder::new().name("log.command".to_owned()).spawn(write).map_err(cannot)?;
        Ok(Some(Command { name: program.clone(), lines: Some(lines), is_done, has_warned: false, _tie: tie }))
    }

    /// Queues the line of `record`, or drops it if the queue is full.
    pub fn record(&mut self, record: &Record) {
        let Some(lines) = &self.lines else { return };
        match lines.try_send(jsonl::encode(record) + "\n") {
            Ok(()) => {}
            // The thread has warned that the program ended.
            Err(TrySendError::Disconnected(_)) => self.lines = None,
            Err(TrySendError::Full(_)) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(
                        "log.command: {} reads too slowly and misses lines of metrics; metrics.jsonl has all of them",
                        self.name
                    );
                }
            }
        }
    }
}

impl Drop for Command {
    fn drop(&mut self) {
        self.lines = None;
        let begun = Instant::now();
        while !self.is_done.load(Ordering::Acquire) && begun.elapsed() < AT_THE_END {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Writes lines until the queue closes or the program stops reading.
fn write_all(name: &str, log: &Path, mut process: Supervised, lines: &Receiver<String>) {
    for line in lines {
        // A full pipe blocks this thread alone.
        let Err(error) = process.input().write_all(line.as_bytes()) else { continue };
        // A program that ends breaks the pipe a moment earlier.
        let how = match process.status_within(AT_THE_END) {
            Some(status) => format!("ended ({status})"),
            None => format!("has stopped reading ({error})"),
        };
        return tracing::warn!(
            "log.command: {name} {how}; the run continues without it, and metrics.jsonl has all lines; its output is in {}",
            log.display()
        );
    }
}
