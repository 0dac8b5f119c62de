//! `log.command`: a user's program that receives each line of metrics on its standard input.
//!
//! A thread writes the lines, so training never waits for the program. If the queue is full, lines are lost;
//! if the program has ended, all further lines are lost. Each case causes one warning.

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

/// Maximum number of lines that wait for the program.
const QUEUE: usize = 4096;
/// Time limit for writing the remaining lines at the end of a run.
const AT_THE_END: Duration = Duration::from_secs(1);
/// File of the run folder that receives the output of the program.
pub const COMMAND_LOG: &str = "command.log";
/// Environment variable that names the run folder for the program.
const RUN_FOLDER: &str = "XTRAIN_RUN";

/// A started program, and its queue of lines. Dropping this closes the program's standard input after at most
/// one second, and does not wait for the program to end.
pub struct Command {
    name: String,
    lines: Option<SyncSender<String>>,
    /// Set by the thread when all lines are written, or no more can be.
    is_done: Arc<AtomicBool>,
    has_warned: bool,
}

impl std::fmt::Debug for Command {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Command").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Command {
    /// Starts `command`, a program and its arguments, without a shell, in its own process group, so that
    /// Ctrl-C does not reach it. Its output goes to a file in `folder`, so it holds none of the run's own
    /// streams open. Its environment names `folder` in `XTRAIN_RUN`.
    ///
    /// # Errors
    ///
    /// The program cannot be started.
    pub fn start(command: &[String], folder: &Path) -> Result<Option<Self>, MetricsError> {
        Command::start_with(command, folder, |program, arguments| {
            let mut start = std::process::Command::new(program);
            start.args(arguments);
            Ok(start)
        })
    }

    /// As [`Command::start`]; `process` returns the process to start for the program and its arguments.
    ///
    /// # Errors
    ///
    /// Those of `process`, or the program cannot be started.
    pub fn start_with(
        command: &[String],
        folder: &Path,
        process: impl FnOnce(&str, &[String]) -> io::Result<std::process::Command>,
    ) -> Result<Option<Self>, MetricsError> {
        let [program, arguments @ ..] = command else { return Ok(None) };
        let cannot = |source: io::Error| MetricsError::Command { program: program.clone(), source };
        let mut start = process(program, arguments).map_err(cannot)?;
        start.stdin(Stdio::piped());
        start.env(RUN_FOLDER, std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned()));
        let log = folder.join(COMMAND_LOG);
        let output = OpenOptions::new().create(true).append(true).open(&log);
        let output = output.map_err(MetricsError::io("open the output of log.command", &log))?;
        start.stderr(output.try_clone().map_err(MetricsError::io("open the output of log.command", &log))?);
        start.stdout(output);
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut start, 0);
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
fn write_all(name: &str, log: &Path, mut child: Child, lines: &Receiver<String>) {
    let Some(mut input) = child.stdin.take() else { unreachable!("it is piped") };
    for line in lines {
        // A full pipe blocks this thread alone.
        let Err(error) = input.write_all(line.as_bytes()) else { continue };
        let how = match child.try_wait() {
            Ok(Some(status)) => format!("ended ({status})"),
            _ => format!("has stopped reading ({error})"),
        };
        return tracing::warn!(
            "log.command: {name} {how}; the run continues without it, and metrics.jsonl has all lines; its output is in {}",
            log.display()
        );
    }
}
