//! A program of the user's that receives each line of metrics on its standard input.
//!
//! A thread writes the lines, so a run never waits for the program: where it reads too slowly, the lines that
//! find no place in the queue are lost, and where it ended, all further ones. Either is warned of once.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{MetricsError, Record, jsonl};

/// Lines that wait for the program to read.
const QUEUE: usize = 4096;
/// Time that the lines still in the queue have at the end of a run.
const AT_THE_END: Duration = Duration::from_secs(1);
/// File of the run folder that receives the output of the program.
pub const COMMAND_LOG: &str = "command.log";
/// Environment variable in which the program finds the run folder.
const RUN_FOLDER: &str = "XTRAIN_RUN";

/// A program that was started, and the queue of the lines to it. Dropping it closes the program's standard
/// input, after one second at most, and does not wait for its end.
pub struct Command {
    name: String,
    lines: Option<SyncSender<String>>,
    /// Set by the thread when it has written all lines, or can write no more.
    is_done: Arc<AtomicBool>,
    has_warned: bool,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Command {
    /// Starts `command`, a program and its arguments, without a shell. It runs in a process group of its own,
    /// so that Ctrl-C ends the run first. The variable `XTRAIN_RUN` in its environment names `folder`, where
    /// its output goes to a file: it holds nothing of the run's open that others wait for.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn start(command: &[String], folder: &Path) -> Result<Option<Self>, MetricsError> {
        let [program, arguments @ ..] = command else { return Ok(None) };
        let mut start = std::process::Command::new(program);
        start.args(arguments).stdin(Stdio::piped());
        start.env(RUN_FOLDER, std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()));
        let log = folder.join(COMMAND_LOG);
        let output = OpenOptions::new().create(true).append(true).open(&log);
        let output = output.map_err(MetricsError::io("open the output of log.command", &log))?;
        start.stderr(output.try_clone().map_err(MetricsError::io("open the output of log.command", &log))?);
        start.stdout(output);
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut start, 0);
        let cannot = |source: io::Error| MetricsError::Command { program: program.clone(), source };
        let child = start.spawn().map_err(cannot)?;
        let (lines, waiting) = sync_channel(QUEUE);
        let is_done = Arc::new(AtomicBool::new(false));
        let (name, done) = (program.clone(), is_done.clone());
        let write = move || {
            write_all(&name, &log, child, &waiting);
            done.store(true, Ordering::Release);
        };
        thread::Builder::new().name("log.command".to_owned()).spawn(write).map_err(cannot)?;
        Ok(Some(Command { name: program.clone(), lines: Some(lines), is_done, has_warned: false }))
    }

    /// Hands over the line of `record`, or loses it.
    pub fn record(&mut self, record: &Record) {
        let Some(lines) = &self.lines else { return };
        match lines.try_send(jsonl::encode(record) + "\n") {
            Ok(()) => {}
            // The thread has warned that the program ended.
            Err(TrySendError::Disconnected(_)) => self.lines = None,
            Err(TrySendError::Full(_)) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    tracing::warn!(
                        "log.command: {} reads too slowly, so it misses lines of metrics; metrics.jsonl has them all",
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

/// Writes lines until there are no more, or the program takes none.
fn write_all(name: &str, log: &Path, mut child: Child, lines: &Receiver<String>) {
    let Some(mut input) = child.stdin.take() else { unreachable!("it is piped") };
    for line in lines {
        // A full pipe blocks this thread alone.
        let Err(error) = input.write_all(line.as_bytes()) else { continue };
        let how = match child.try_wait() {
            Ok(Some(status)) => format!("ended ({status})"),
            _ => format!("takes no more lines ({error})"),
        };
        return tracing::warn!(
            "log.command: {name} {how}; the run goes on without it, and metrics.jsonl has all lines; its output is in {}",
            log.display()
        );
    }
}
