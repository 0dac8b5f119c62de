//! The signals that ask a command to stop.

use crate::failure::Failure;
use crate::terminal::print_error;
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use xtrain_checkpoint::advice;

/// Signals within this time after the first count as one with it. Some launchers, `timeout` among them,
/// signal a process and then its group, and do not mean to discard unsaved work.
const ONE_REQUEST: Duration = Duration::from_secs(1);

/// The exit code of a command that was ended at once, or that has no result because it was asked to stop: a
/// shell's for Ctrl-C.
pub(crate) const STOPPED: u8 = 130;

/// A write beyond the limit on file sizes (`ulimit -f`) fails from now on, with an error that names the file.
/// Unhandled, the limit's signal ends the process.
pub(crate) fn survive_file_size_limits() {
    // It is only refused for signals that cannot be handled.
    let _ = flag::register(SIGXFSZ, Arc::new(AtomicBool::new(false)));
}

/// Flag that is set when the user asks to stop.
#[derive(Clone)]
pub(crate) struct Stop(pub(crate) Arc<AtomicBool>);

impl Stop {
    /// Installs the handlers. The first SIGTERM, SIGUSR1 or Ctrl-C asks the command to stop; another one a
    /// second later or more ends it at once.
    ///
    /// Open MPI's `mpirun` kills its ranks one second after a SIGTERM, but forwards SIGUSR1 and nothing more.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        Stop::on_signals_of(print_error)
    }

    /// As [`Stop::on_signals`], for a process that does not say what a signal does, because another one does.
    pub(crate) fn on_signals_silently() -> Result<Self, Failure> {
        Stop::on_signals_of(|_| ())
    }

    fn on_signals_of(say: fn(&str)) -> Result<Self, Failure> {
        let mut signals = Signals::new([SIGTERM, SIGINT, SIGUSR1]).map_err(refused)?;
        let stop = Arc::new(AtomicBool::new(false));
        let asked = stop.clone();
        let watch = move || {
            let mut first = None;
            for _ in signals.forever() {
                let since = first.get_or_insert_with(Instant::now).elapsed();
                if !asked.swap(true, Ordering::Relaxed) {
                    say("stopping; a second signal ends it at once and saves nothing more");
                } else if since >= ONE_REQUEST {
                    say("ended at once; what was not saved is lost");
                    end_at_once();
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(watch).map_err(refused)?;
        Ok(Stop(stop))
    }

    /// Control flow for callers that poll between two pieces of work.
    pub(crate) fn check(&self) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// Ends the command after a signal, without exit handlers: those of the driver may wait for the GPU.
pub(crate) fn end_at_once() -> ! {
    signal_hook::low_level::exit(STOPPED.into())
}

/// Ctrl-C in a chat: stops the answer that is being written. A second one before it has ended, and one at
/// any other time, ends the program.
#[derive(Clone)]
pub(crate) struct AnswerStop(Arc<AtomicU8>);

/// No answer is being written.
const IDLE: u8 = 0;
/// An answer is being written.
const ANSWERING: u8 = 1;
/// It is to end.
const ASKED: u8 = 2;

impl AnswerStop {
    /// Installs the handler.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        let mut signals = Signals::new([SIGINT]).map_err(refused)?;
        let state = Arc::new(AtomicU8::new(IDLE));
        let shared = state.clone();
        // rustyline turns off echo while a line is edited.
        let mode = tcgetattr(std::io::stdin()).ok();
        let watch = move || {
            for _ in signals.forever() {
                let answering =
                    shared.compare_exchange(ANSWERING, ASKED, Ordering::Relaxed, Ordering::Relaxed);
                if answering.is_err() {
                    if let Some(mode) = &mode {
                        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, mode);
                    }
                    // The shell's prompt follows on a line of its own.
                    print_error("");
                    end_at_once();
                }
            }
        };
        thread::Builder::new().name("signals".into()).spawn(watch).map_err(refused)?;
        Ok(AnswerStop(state))
    }

    /// An answer begins.
    pub(crate) fn begin(&self) {
        self.0.store(ANSWERING, Ordering::Relaxed);
    }

    /// The answer has ended.
    pub(crate) fn end(&self) {
        self.0.store(IDLE, Ordering::Relaxed);
    }

    /// True if the answer is to end.
    pub(crate) fn is_asked(&self) -> bool {
        self.0.load(Ordering::Relaxed) == ASKED
    }
}

fn refused(error: std::io::Error) -> Failure {
    Failure::user(format!("cannot watch for signals: {error}{}", advice(&error)))
}
