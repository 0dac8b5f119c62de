//! A program beside a run: it ends with the run, has a bounded log, and does not take itself for a rank.
//!
//! Another process of this program supervises it, because only a process that outlives a killed run can end
//! the program then. Run and supervisor share a socket. The supervisor sends the result of the start; the run
//! sends a byte when it ends in order; a socket that closes without one is a run that was killed.

use super::bounded_log::BoundedLog;
use super::open_files::{pass_on_open_files, restore_open_files};
use super::output::{log_of_supervisor, of_supervisor};
use crate::environment::{Variables, is_of_a_launch};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::stdio::dup2_stdin;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// First argument of a process that supervises.
const SUPERVISE: &str = "--supervise";

/// Time for the program to end after a run that has ended in order, which closes its input.
const AFTER_THE_END: Duration = Duration::from_secs(30);

/// Time for the program to end after a run that was killed.
const AFTER_A_KILL: Duration = Duration::from_secs(3);

/// Time in which a supervisor starts the program.
const START: Duration = Duration::from_secs(30);

/// Time to read the rest of the program's output after its end.
const REST: Duration = Duration::from_secs(1);

/// True once `main` has shown that it supervises if it is asked to.
static CAN_SUPERVISE: AtomicBool = AtomicBool::new(false);

/// A program that receives text on its standard input.
#[derive(Debug)]
pub struct Supervised {
    input: ChildStdin,
    process: Child,
}

/// The tie between a run and its program. Dropping it says that the run has ended in order: the program then
/// has 30 seconds to end. If this process is killed, it has three.
#[derive(Debug)]
pub struct Tie(Option<UnixStream>);

impl Supervised {
    /// Starts `program` with these variables in addition to those of this process, but without those by which
    /// launchers number ranks, and with the limit on open files from before
    /// [`raise_open_files`](crate::raise_open_files). Its output is appended to `log`, which is open for
    /// reading and appending and keeps the first and the last MiB. Ctrl-C does not reach it.
    ///
    /// In a program whose `main` does not call [`supervise`], nothing supervises it: it is started directly,
    /// and writes to `log` without a bound.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(
        program: &str,
        args: &[String],
        variables: &[(&str, &OsStr)],
        log: File,
    ) -> io::Result<(Supervised, Tie)> {
        let is_supervised = CAN_SUPERVISE.load(Ordering::Relaxed);
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = match is_supervised {
            true => {
                let mut command = Command::new(std::env::current_exe()?);
                command.arg(SUPERVISE).arg(program).stdout(OwnedFd::from(theirs)).stderr(log);
                pass_on_open_files(&mut command);
                command
            }
            false => {
                let mut command = outsider(program.as_ref());
                command.stdout(log.try_clone()?).stderr(log);
                command
            }
        };
        command.args(args).envs(variables.iter().copied()).stdin(Stdio::piped()).process_group(0);
        let mut process = command.spawn()?;
        // It holds the supervisor's end of the socket.
        drop(command);
        let Some(input) = process.stdin.take() else { unreachable!("it is piped") };
        if is_supervised {
            started(&ours)?;
        }
        Ok((Supervised { input, process }, Tie(is_supervised.then_some(ours))))
    }

    /// The standard input of the program. Dropping this value closes it.
    pub fn input(&mut self) -> &mut impl Write {
        &mut self.input
    }

    /// The end of the program, if it ends within this time.
    pub fn status_within(&mut self, limit: Duration) -> Option<ExitStatus> {
        let since = Instant::now();
        loop {
            match self.process.try_wait() {
                Ok(None) if since.elapsed() < limit => thread::sleep(Duration::from_millis(5)),
                status => return status.ok().flatten(),
            }
        }
    }
}

impl Drop for Tie {
    fn drop(&mut self) {
        // The program may have ended.
        self.0.iter_mut().for_each(|run| drop(run.write_all(b".")));
    }
}

/// A command without the variables by which launchers number ranks.
fn outsider(program: &OsStr) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(is_of_a_launch) {
            command.env_remove(name);
        }
    }
    command
}

/// Waits for the result of the start: the number of an error, or 0.
fn started(mut supervisor: &UnixStream) -> io::Result<()> {
    supervisor.set_read_timeout(Some(START))?;
    let mut result = [0; 4];
    match supervisor.read_exact(&mut result) {
        Ok(()) if result == [0; 4] => Ok(()),
        Ok(()) => Err(io::Error::from_raw_os_error(i32::from_le_bytes(result))),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
            Err(io::Error::other("the process that starts it has ended; see command.log"))
        }
        Err(e) => Err(e),
    }
}

/// Supervises the program in `args`, the arguments of this process, if a [`Supervised::start`] asks for it.
/// Returns the exit code of this process then. It belongs at the beginning of `main`.
pub fn supervise(mut args: impl Iterator<Item = OsString>) -> Option<i32> {
    CAN_SUPERVISE.store(true, Ordering::Relaxed);
    if args.next()? != *SUPERVISE {
        return None;
    }
    let program = args.next().unwrap_or_default();
    let supervised = supervise_program(&program, args);
    Some(supervised.unwrap_or_else(|error| {
        log_of_supervisor(&format!("cannot supervise {}: {error}", program.to_string_lossy()));
        1
    }))
}

/// A message to the thread that supervises.
enum LaunchEvent {
    /// The program has ended.
    Ended(io::Result<ExitStatus>),
    /// The run is over, and the program has so much time.
    Over(Duration),
}

fn supervise_program(program: &OsStr, args: impl Iterator<Item = OsString>) -> io::Result<i32> {
    // The run decides when this process ends. A program does not inherit handlers.
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR1] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    let (mut run, log) = of_supervisor()?;
    let (output, theirs) = io::pipe()?;
    let mut command = outsider(program);
    command.args(args).stdout(theirs.try_clone()?).stderr(theirs).process_group(0);
    restore_open_files(&Variables::of_process());
    let process = match command.spawn() {
        Ok(process) => process,
        Err(e) => {
            let number = e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
            return run.write_all(&number.to_le_bytes()).map(|()| 1);
        }
    };
    // It holds the other end of the output.
    drop(command);
    let group = Pid::from_child(&process);
    let ended = attend(process, run, output, log);
    // What the program has left behind, or the program itself.
    let _ = kill_process_group(group, Signal::KILL);
    ended
}

/// Waits for the end of the program, and ends it if the run is over. Returns its exit code.
fn attend(mut process: Child, mut run: UnixStream, output: PipeReader, log: File) -> io::Result<i32> {
    // The program alone reads its input: its end breaks the pipe.
    dup2_stdin(File::open("/dev/null")?)?;
    let group = Pid::from_child(&process);
    let (to, events) = mpsc::channel();
    let (to_end, to_over) = (to.clone(), to);
    let copies = thread::Builder::new().spawn(move || BoundedLog::new(log).copy(output))?;
    run.write_all(&[0; 4])?;
    thread::Builder::new().spawn(move || to_end.send(LaunchEvent::Ended(process.wait())))?;
    thread::Builder::new().spawn(move || {
        let is_in_order = matches!(run.read(&mut [0]), Ok(1));
        to_over.send(LaunchEvent::Over(if is_in_order { AFTER_THE_END } else { AFTER_A_KILL }))
    })?;
    let status = end(&events, group)?;
    let _ = kill_process_group(group, Signal::KILL);
    let since = Instant::now();
    while !copies.is_finished() && since.elapsed() < REST {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0)))
}

/// Waits for the end of the program, whose group is killed if the run is over for too long.
fn end(events: &Receiver<LaunchEvent>, group: Pid) -> io::Result<ExitStatus> {
    let mut end = None;
    loop {
        let event = match end {
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(end) => events.recv_timeout(end - Instant::now().min(end)),
        };
        match event {
            Ok(LaunchEvent::Ended(status)) => return status,
            Ok(LaunchEvent::Over(limit)) => end = Some(Instant::now() + limit),
            Err(RecvTimeoutError::Timeout) => {
                kill_process_group(group, Signal::KILL)?;
                end = None;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("its threads have ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_other_arguments_supervises_nothing() {
        assert_eq!(supervise(["train".into(), "run.toml".into()].into_iter()), None);
        assert_eq!(supervise([].into_iter()), None);
    }
}
