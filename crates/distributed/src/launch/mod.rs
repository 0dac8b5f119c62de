//! A run of several processes on this machine: a program starts copies of itself, with torchrun's variables.

mod bounded_log;
mod open_files;
mod output;
mod parent;
mod supervised;

pub use open_files::raise_open_files;
pub use parent::die_with_launcher;
pub use supervised::{Supervised, Tie, supervise};

use crate::environment::{LAUNCHER_VARIABLE, Variables};
use crate::error::CommError;
use crate::limits::{self, check_open_files};
use crate::net::secret::{SECRET_VARIABLE, random_text};
use output::Output;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGCHLD, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use std::ffi::OsString;
use std::io::{self, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// Longest wait for a signal, should that of a process that ended be lost.
const TICK: Duration = Duration::from_secs(1);

/// Time in which the other ranks end by themselves after one has failed: they learn the cause over the
/// control connection, and report it.
const PAUSE: Duration = Duration::from_secs(2);

/// Variables of another launcher that would mislead the ranks.
const REMOVED: [&str; 2] = ["TORCHELASTIC_USE_AGENT_STORE", "XTRAIN_PORT"];

/// Processes to start on this machine, one for each rank.
#[derive(Clone, Debug)]
pub struct RankLauncher {
    /// The number of ranks.
    pub ranks: usize,
    /// The program of all ranks.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Time between SIGTERM and SIGKILL for ranks that still run after one has failed.
    pub grace: Duration,
}

impl RankLauncher {
    /// Copies of this program with other arguments.
    ///
    /// # Errors
    /// The path of this program is not known.
    pub fn copies(ranks: usize, args: Vec<OsString>) -> Result<Self, CommError> {
        let unknown = |e| CommError::System(format!("the path of this program is not known: {e}"));
        let program = std::env::current_exe().map_err(unknown)?;
        Ok(RankLauncher { ranks, program, args, grace: Duration::from_secs(10) })
    }

    /// True if a launch of this program started the process with these variables.
    pub fn is_parent(variables: &Variables) -> bool {
        variables.has(LAUNCHER_VARIABLE)
    }

    /// Starts the ranks, waits until all have ended, and returns the exit code of the run: that of the first
    /// rank that failed, 128 + n for a rank that signal n ended, or 0.
    ///
    /// Rank 0 has the standard input and outputs of this process. The lines of the others' standard
    /// error output are passed on with `[rank r] ` in front; their standard output only if they fail. SIGINT,
    /// SIGTERM and SIGUSR1 are passed on to the ranks, and have no other effect on this process any more,
    /// also after the return. When a rank fails, the others have two seconds to end by themselves; then they
    /// get SIGTERM, and SIGKILL after [`RankLauncher::grace`].
    ///
    /// The calling thread must live as long as the ranks, as it does while it waits here. Linux ties the
    /// signal that [`die_with_launcher`] asks for to the thread that started a process, not to the process of
    /// that thread. So a thread that calls `run` must not be ended from outside.
    ///
    /// # Errors
    /// A process cannot be started. No other one stays then.
    pub fn run(&self) -> Result<i32, CommError> {
        check_open_files(self.ranks)?;
        let refused = |e: io::Error| limits::system("cannot watch for signals", &e);
        let mut signals = Signals::new([SIGINT, SIGTERM, SIGUSR1, SIGCHLD]).map_err(refused)?;
        let closes = signals.handle();
        let (to, received) = mpsc::channel();
        let watch = move || {
            for signal in signals.forever() {
                if to.send(signal).is_err() {
                    return;
                }
            }
        };
        let watch = thread::Builder::new().name("signals".into()).spawn(watch).map_err(refused)?;
        let code = self.start().map(|ranks| ranks.wait(&received, self.grace));
        closes.close();
        // It ends by itself, and a panic in it has been printed.
        let _ = watch.join();
        code
    }

    fn start(&self) -> Result<Ranks, CommError> {
        let refused = |what: &str, e: io::Error| match limits::system(&format!("cannot start {what}"), &e) {
            CommError::System(text) => CommError::Start(text),
            limit => limit,
        };
        let port = free_port().map_err(|e| refused("a run on this machine", e))?;
        let secret = random_text().map_err(|e| refused("a run on this machine", e))?;
        let mut ranks = Ranks(Vec::with_capacity(self.ranks));
        for rank in 0..self.ranks {
            let name = format!("rank {rank}, {}", self.program.display());
            let mut command = Command::new(&self.program);
            command.args(&self.args);
            for name in REMOVED {
                command.env_remove(name);
            }
            let numbers = [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", self.ranks),
                ("LOCAL_WORLD_SIZE", self.ranks),
                ("MASTER_PORT", port.into()),
                (LAUNCHER_VARIABLE, std::process::id() as usize),
            ];
            command.envs(numbers.map(|(name, number)| (name, number.to_string())));
            command.env("MASTER_ADDR", Ipv4Addr::LOCALHOST.to_string()).env(SECRET_VARIABLE, &secret);
            open_files::pass_on_open_files(&mut command);
            if rank > 0 {
                command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            }
            let mut child = command.spawn().map_err(|e| refused(&name, e))?;
            let pipes = child.stdout.take().zip(child.stderr.take());
            ranks.0.push(RankProcess { rank, child, status: None, output: None });
            if let Some((stdout, stderr)) = pipes {
                let output = Output::read(rank, stdout, stderr).map_err(|e| refused(&name, e))?;
                ranks.0[rank].output = Some(output);
            }
        }
        Ok(ranks)
    }
}

/// A port that is free now. Another program may take it before rank 0 does, which is then told so.
fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

/// The processes. Dropping them ends all.
struct Ranks(Vec<RankProcess>);

struct RankProcess {
    rank: usize,
    child: Child,
    status: Option<ExitStatus>,
    output: Option<Output>,
}

impl Ranks {
    /// Waits until all have ended. Returns the exit code of the run.
    fn wait(mut self, signals: &Receiver<i32>, grace: Duration) -> i32 {
        let mut first_failure: Option<(usize, ExitStatus)> = None;
        let mut has_signalled = false;
        // The next signal for ranks that still run, and its time.
        let mut end = None;
        while self.is_running() {
            self.look();
            // A killed rank closes its connections before it can be waited for, so that ranks that fail
            // because of it may be seen first.
            let is_sought =
                first_failure.is_none_or(|(_, status)| status.signal().is_none() && !has_signalled);
            let is_killed = |(_, status): &(usize, ExitStatus)| status.signal().is_some();
            if let Some((rank, status)) = self.failures().find(is_killed).filter(|_| is_sought) {
                report(rank, status);
                first_failure = Some((rank, status));
            }
            first_failure = first_failure.or_else(|| self.failures().next());
            let now = Instant::now();
            end = match end {
                None => first_failure.map(|_| (now + PAUSE, Signal::TERM)),
                Some((at, signal)) if at <= now => {
                    self.signal(signal);
                    // A stopped process ends only when it goes on.
                    self.signal(Signal::CONT);
                    has_signalled = true;
                    Some((now + grace, Signal::KILL))
                }
                waits => waits,
            };
            if !self.is_running() {
                break;
            }
            let limit = end.map_or(TICK, |(at, _)| at.saturating_duration_since(now).min(TICK));
            match signals.recv_timeout(limit) {
                Ok(SIGINT) => self.signal(Signal::INT),
                Ok(SIGTERM) => self.signal(Signal::TERM),
                Ok(SIGUSR1) => self.signal(Signal::USR1),
                Ok(_) | Err(_) => {}
            }
        }
        for rank in &self.0 {
            // A rank that our signal ended has nothing to say.
            let is_first = first_failure.is_some_and(|(first, _)| first == rank.rank);
            let has_failed = is_first || rank.status.and_then(|s| s.code()).is_some_and(|code| code != 0);
            rank.output.iter().for_each(|output| output.end(has_failed));
        }
        first_failure.map_or(0, |(_, status)| code(status))
    }

    /// Notes which ranks have ended.
    fn look(&mut self) {
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            // A process that cannot be waited for is none of ours any more.
            rank.status = rank.child.try_wait().unwrap_or(Some(ExitStatus::from_raw(1 << 8)));
        }
    }

    /// The ranks that have failed.
    fn failures(&self) -> impl Iterator<Item = (usize, ExitStatus)> {
        let ended = self.0.iter().filter_map(|rank| Some((rank.rank, rank.status?)));
        ended.filter(|(_, status)| !status.success())
    }

    fn is_running(&self) -> bool {
        self.0.iter().any(|rank| rank.status.is_none())
    }

    /// Sends a signal to all that run. Their numbers are theirs until they are waited for, which only happens
    /// on this thread.
    fn signal(&self, signal: Signal) {
        for rank in self.0.iter().filter(|rank| rank.status.is_none()) {
            if let Some(pid) = Pid::from_raw(rank.child.id() as i32) {
                // It may have ended.
                let _ = kill_process(pid, signal);
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        for rank in self.0.iter_mut().filter(|rank| rank.status.is_none()) {
            // It was killed.
            let _ = rank.child.wait();
        }
    }
}

fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Reports a rank that a signal ended: such a rank cannot do it.
fn report(rank: usize, status: ExitStatus) {
    if let Some(signal) = status.signal() {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("unknown");
        // The reader of our output may have gone; the exit code tells it too.
        let _ =
            writeln!(io::stderr(), "[rank {rank}] ended by signal {signal} ({name}); ending the other ranks");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_exist_is_an_error_with_its_path() {
        let launch = RankLauncher {
            program: "/nonexistent/program".into(),
            ..RankLauncher::copies(2, vec![]).expect("a path")
        };
        let error = launch.run().expect_err("no program").to_string();
        assert!(error.starts_with("cannot start rank 0, /nonexistent/program: "), "{error}");
    }
}
