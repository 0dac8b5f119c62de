//! The thread that ends collectives between GPUs where they cannot complete: a collective that waits for a
//! rank which never takes part waits for ever, and so does the host.
//!
//! It looks at the errors of the links between GPUs, at the end of the run on another rank, and at how long
//! this rank has waited for the GPU, or for NCCL to connect the ranks of a collective. The first of these
//! that it meets ends the run, and aborts the links. A wait then ends, with the error instead of incomplete
//! results.

use super::positions::{Passage, Positions};
use crate::part::{Part, ProgramId};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use xtrain_cuda::{Context, CudaError, Event, Stream};
use xtrain_distributed::{Cause, CommError, Communicator, Fault, system_error};
use xtrain_program::Program;

/// Time between two looks.
const TICK: Duration = Duration::from_millis(100);

/// Time between two aborts: each lets waits go on that have begun by then.
const ABORT_TICK: Duration = Duration::from_millis(2);

/// Time in which the control connection may learn why a link failed, such as the end of another process.
const REASON: Duration = Duration::from_secs(1);

/// Parts in flight after which completed ones are forgotten.
const MANY_PARTS: usize = 16;

/// A connection of this rank's GPU with others.
pub(super) trait PeerLink: Send + Sync {
    /// The error that it has met by itself, if any.
    fn check(&self) -> Result<(), CudaError>;

    /// Lets enqueued work that waits for other ranks go on, with outputs that are not complete. It is called
    /// again and again until no work is left.
    fn abort(&self);
}

/// The thread, and what it watches.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    context: Context,
    names_in_graphs: bool,
    thread: Option<JoinHandle<()>>,
}

/// Why a run ends.
enum End {
    /// Another rank has ended it.
    OnAnother(Fault),
    /// This rank ends it, for this reason.
    Here(Cause, String),
}

struct Shared {
    links: Vec<Arc<dyn PeerLink>>,
    host: Arc<dyn Communicator>,
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    /// The time since which the host has waited for the GPU, or since which it has seen progress.
    waits_since: Option<Instant>,
    /// The time since which NCCL has been enqueuing a collective. It connects the ranks of the first ones.
    connects_since: Option<Instant>,
    /// The collectives that the host enqueues, or has enqueued last, in words.
    enqueues: String,
    /// The positions among the collectives of each program.
    positions: Vec<Arc<Positions>>,
    /// Parts of programs that may not have completed.
    parts: VecDeque<Enqueued>,
    /// Events of parts that have completed.
    free: Vec<Event>,
    failed: Option<CommError>,
    ends: bool,
}

/// A part of a program, with an event after it and, if the GPU notes them, its positions.
struct Enqueued {
    part: Part,
    event: Event,
    positions: Option<Arc<Positions>>,
}

impl Enqueued {
    /// The position of the GPU in words.
    fn describe(&self) -> String {
        match &self.positions {
            Some(positions) => format!("it {}", positions.describe()),
            None => "parallel.name_collectives = true names the collective in which it waits".to_owned(),
        }
    }
}

impl Watchdog {
    /// Starts the thread. If `names_in_graphs`, graphs tell which collectives they have come to.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn start(
        links: Vec<Arc<dyn PeerLink>>,
        host: Arc<dyn Communicator>,
        context: &Context,
        names_in_graphs: bool,
    ) -> Result<Watchdog, CommError> {
        let (state, changed) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { links, host, state, changed });
        let watched = shared.clone();
        let thread = thread::Builder::new().name("watchdog".into()).spawn(move || watched.watch());
        let thread = thread.map_err(|error| system_error("a thread that watches collectives", &error))?;
        Ok(Watchdog { shared, context: context.clone(), names_in_graphs, thread: Some(thread) })
    }

    /// The error that ended the links, if any.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.shared.lock().failed.clone().map_or(Ok(()), Err)
    }

    /// Enqueues collectives of NCCL, which may first connect their ranks and asks meanwhile whether to go on.
    pub(super) fn while_connecting<E: From<CommError>>(
        &self,
        enqueue: impl FnOnce(&dyn Fn() -> Result<(), E>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.shared.lock().connects_since = Some(Instant::now());
        let enqueued = enqueue(&|| Ok(self.check()?));
        self.shared.lock().connects_since = None;
        enqueued
    }

    /// Keeps the positions among the collectives of `program`, which becomes `id`.
    pub(super) fn reserve(&self, id: ProgramId, program: &Program, stream: &Stream) -> Result<(), CudaError> {
        let positions = Arc::new(Positions::new(program, self.shared.host.rank(), stream)?);
        let mut state = self.shared.lock();
        // A program that could not be loaded has left its place to another.
        state.positions.truncate(id.0);
        state.positions.push(positions);
        Ok(())
    }

    /// The positions among the collectives of a program.
    fn positions(&self, id: ProgramId) -> Arc<Positions> {
        self.shared.lock().positions[id.0].clone()
    }

    /// Tells that `stream` comes to the collectives of a program that begin with the instance `first`, or
    /// leaves them; the graph that it captures, if it does.
    pub(super) fn passes(
        &self,
        id: ProgramId,
        first: usize,
        passage: Passage,
        stream: &Stream,
        is_captured: bool,
    ) -> Result<(), CudaError> {
        if passage == Passage::Before {
            self.comes_to(id, first);
        }
        let positions = self.positions(id);
        match is_captured && !self.names_in_graphs {
            true => Ok(()),
            false => positions.pass(first, passage, stream),
        }
    }

    /// Tells that the host comes to the collectives of a program that begin with the instance `first`.
    pub(super) fn comes_to(&self, id: ProgramId, first: usize) {
        let positions = self.positions(id);
        positions.words(first).clone_into(&mut self.shared.lock().enqueues);
    }

    /// Notes that `stream` ends with `part` of a program, which was enqueued op by op or as a graph.
    pub(super) fn enqueued(
        &self,
        id: ProgramId,
        part: Part,
        is_graph: bool,
        stream: &Stream,
    ) -> Result<(), CudaError> {
        let positions = (!is_graph || self.names_in_graphs).then(|| self.positions(id));
        let mut state = self.shared.lock();
        if state.parts.len() >= MANY_PARTS {
            state.drop_completed()?;
        }
        let event = state.free.pop().map_or_else(|| Event::new(&self.context), Ok)?;
        event.record(stream)?;
        state.parts.push_back(Enqueued { part, event, positions });
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
    fn lock(&self) -> MutexGuard<'_, WatchState> {
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
            let Some(end) = self.end(&mut state) else { continue };
            drop(state);
            let fault = match end {
                End::OnAnother(fault) => {
                    // This rank may be the one that others wait for.
                    if fault.cause == Cause::Timeout {
                        self.log_position();
                    }
                    fault
                }
                // Also where the abort below never returns, the run ends.
                End::Here(cause, message) => {
                    self.reason().unwrap_or_else(|| self.host.abort(cause, &message))
                }
            };
            self.lock().failed = Some(CommError::Aborted(fault));
            return self.abort();
        }
    }

    /// Aborts the links until the engine, which waits for the GPU, has ended.
    fn abort(&self) {
        let mut state = self.lock();
        while !state.ends {
            drop(state);
            self.abort_links();
            let waited = self.changed.wait_timeout_while(self.lock(), ABORT_TICK, |state| !state.ends);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Aborts the links at the same time: NCCL waits for queued work, which may be behind that of another.
    fn abort_links(&self) {
        thread::scope(|scope| {
            for link in &self.links {
                let is_alone = self.links.len() == 1;
                if is_alone || thread::Builder::new().spawn_scoped(scope, || link.abort()).is_err() {
                    link.abort();
                }
            }
        });
    }

    /// Logs where this rank is when another one has waited in vain.
    fn log_position(&self) {
        let state = self.lock();
        match (state.connects_since, state.waits_since, state.parts.front()) {
            (Some(_), ..) => tracing::warn!("this rank waits for other ranks before {}", state.enqueues),
            (None, Some(_), Some(first)) => {
                tracing::warn!(
                    "this rank's GPU has not completed {}: {}",
                    first.part.words(),
                    first.describe()
                );
            }
            _ => tracing::warn!("this rank does not wait for its GPU; the others wait for it"),
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
    fn end(&self, state: &mut WatchState) -> Option<End> {
        if let Some(fault) = self.host.fault() {
            return Some(End::OnAnother(fault));
        }
        if let Err(error) = self.links.iter().try_for_each(|link| link.check()) {
            return Some(End::Here(Cause::Failure, error.to_string()));
        }
        let timeout = self.host.timeout()?;
        let is_late = |since: &Instant| since.elapsed() >= timeout;
        if state.connects_since.as_ref().is_some_and(is_late) {
            let message = format!(
                "NCCL has tried to connect the ranks of a collective for {} s: another rank does not take part in {}",
                timeout.as_secs_f32(),
                state.enqueues
            );
            return Some(End::Here(Cause::Timeout, message));
        }
        let waits_since = state.waits_since?;
        let before = state.parts.len();
        if let Err(error) = state.drop_completed() {
            return Some(End::Here(Cause::Failure, error.to_string()));
        }
        if state.parts.len() < before {
            state.waits_since = Some(Instant::now());
            return None;
        }
        if !is_late(&waits_since) {
            return None;
        }
        let first = state.parts.front()?;
        let message = format!(
            "the GPU has not completed {} for {} s: another rank does not take part in one of its collectives, or a kernel hangs; {}",
            first.part.words(),
            timeout.as_secs_f32(),
            first.describe()
        );
        Some(End::Here(Cause::Timeout, message))
    }
}

impl WatchState {
    /// Forgets the first parts as far as they have completed.
    fn drop_completed(&mut self) -> Result<(), CudaError> {
        while let Some(first) = self.parts.pop_front() {
            if !first.event.is_done()? {
                self.parts.push_front(first);
                break;
            }
            self.free.push(first.event);
        }
        Ok(())
    }
}
