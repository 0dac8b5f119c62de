//! The thread that ends NCCL's collectives where they cannot complete: a collective that waits for a rank
//! which never takes part waits for ever, and so does the host.
//!
//! It looks at NCCL's errors, at the end of the run on another rank, and at how long this rank has waited for
//! the GPU, or for NCCL to connect the ranks of a collective. The first of these that it meets ends the run,
//! and aborts the communicators. A wait then ends, with the error instead of incomplete results.

use crate::part::Part;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use xtrain_cuda::{Context, CudaError, Event, NcclCommunicator, Stream};
use xtrain_distributed::{CommError, Communicator, Fault};

/// Time between two looks.
const TICK: Duration = Duration::from_millis(100);

/// Time in which the control connection may learn why NCCL failed, such as the end of another process.
const REASON: Duration = Duration::from_secs(1);

/// Parts in flight after which completed ones are forgotten.
const MANY_PARTS: usize = 16;

/// The thread, and what it watches.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    context: Context,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    nccl: Vec<Arc<NcclCommunicator>>,
    host: Arc<dyn Communicator>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The time since which the host has waited for the GPU, or since which it has seen progress.
    waits_since: Option<Instant>,
    /// The time since which NCCL has been enqueuing a collective. It connects the ranks of the first ones.
    connects_since: Option<Instant>,
    /// Parts of programs that may not have completed, each with an event after it.
    parts: VecDeque<(Part, Event)>,
    /// Events of parts that have completed.
    free: Vec<Event>,
    failed: Option<CommError>,
    ends: bool,
}

impl Watchdog {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(
        nccl: Vec<Arc<NcclCommunicator>>,
        host: Arc<dyn Communicator>,
        context: &Context,
    ) -> Result<Watchdog, CommError> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { nccl, host, state, changed });
        let watched = shared.clone();
        let thread = thread::Builder::new().name("NCCL watchdog".into()).spawn(move || watched.watch());
        let thread = thread.map_err(|error| CommError::System(format!("a thread for NCCL: {error}")))?;
        Ok(Watchdog { shared, context: context.clone(), thread: Some(thread) })
    }

    /// The error that ended the communicators, if any.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.shared.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Tells that NCCL begins or ends to enqueue a collective.
    pub(super) fn set_connects(&self, connects: bool) {
        self.shared.lock().connects_since = connects.then(Instant::now);
    }

    /// Notes that `stream` ends with `part`.
    pub(super) fn enqueued(&self, part: Part, stream: &Stream) -> Result<(), CudaError> {
        let mut state = self.shared.lock();
        if state.parts.len() >= MANY_PARTS {
            state.drop_completed()?;
        }
        let event = state.free.pop().map_or_else(|| Event::new(&self.context), Ok)?;
        event.record(stream)?;
        state.parts.push_back((part, event));
        Ok(())
    }

    /// Tells that the host begins or ends to wait for the GPU.
    ///
    /// # Errors
    /// That of [`Watchdog::check`]: an abort lets a wait succeed, or fail with a consequence.
    pub(super) fn set_waits(&self, waits: bool) -> Result<(), CommError> {
        self.shared.lock().waits_since = waits.then(Instant::now);
        self.check()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.lock().ends = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self) {
        loop {
            let state = self.lock();
            let waited = self.changed.wait_timeout_while(state, TICK, |state| !state.ends);
            let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
            if state.ends {
                return;
            }
            let Some(error) = self.fault(&mut state) else { continue };
            drop(state);
            let fault = match error {
                CommError::Aborted(fault) => fault,
                // Also where the abort below never returns, the run ends.
                own => self.reason().unwrap_or_else(|| self.host.abort(&own.to_string())),
            };
            self.lock().failed = Some(CommError::Aborted(fault));
            self.nccl.iter().for_each(|nccl| nccl.abort());
            return;
        }
    }

    /// The first cause of the end of the run, if it comes soon.
    fn reason(&self) -> Option<Fault> {
        let since = Instant::now();
        while since.elapsed() < REASON {
            if let Some(fault) = self.host.fault() {
                return Some(fault);
            }
            thread::sleep(TICK);
        }
        None
    }

    /// The reason to end the run, if there is one.
    fn fault(&self, state: &mut State) -> Option<CommError> {
        if let Some(fault) = self.host.fault() {
            return Some(CommError::Aborted(fault));
        }
        if let Err(error) = self.nccl.iter().try_for_each(|nccl| nccl.check()) {
            return Some(CommError::System(error.to_string()));
        }
        let timeout = self.host.timeout()?;
        let is_late = |since: &Instant| since.elapsed() >= timeout;
        if state.connects_since.as_ref().is_some_and(is_late) {
            return Some(CommError::System(format!(
                "NCCL has tried to connect the ranks of a collective for {} s: \
                 another rank does not take part in it",
                timeout.as_secs_f32()
            )));
        }
        if !is_late(&state.waits_since?) {
            return None;
        }
        let before = state.parts.len();
        if let Err(error) = state.drop_completed() {
            return Some(CommError::System(error.to_string()));
        }
        let (part, _) = state.parts.front()?;
        if state.parts.len() < before {
            state.waits_since = Some(Instant::now());
            return None;
        }
        Some(CommError::System(format!(
            "the GPU has not completed {} for {} s: \
             another rank does not take part in one of its collectives",
            part.words(),
            timeout.as_secs_f32()
        )))
    }
}

impl State {
    /// Forgets the first parts as far as they have completed.
    fn drop_completed(&mut self) -> Result<(), CudaError> {
        while let Some((part, event)) = self.parts.pop_front() {
            if !event.is_done()? {
                self.parts.push_front((part, event));
                break;
            }
            self.free.push(event);
        }
        Ok(())
    }
}
