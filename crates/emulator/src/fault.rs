//! Faults of kernels and their reports.

use std::fmt;

/// An error of a thread. The executor adds kernel, source line and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ThreadFault {
    /// The lane that caused it.
    pub(crate) lane: u32,
    pub(crate) kind: FaultKind,
    pub(crate) problem: String,
    /// The source line, if it is another one than that of the step.
    pub(crate) location: Option<u32>,
}

/// The kind of a fault, which decides the driver's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// An access outside the memory that a thread may reach.
    Address,
    /// A misaligned address.
    Alignment,
    /// Uninitialised memory or an uninitialised register.
    Uninitialised,
    /// A barrier or warp-wide instruction that not all threads reach, or a wait that never ends.
    Synchronisation,
}

/// The result of a step. Faults are boxed because they are rare.
pub(crate) type Outcome<T = ()> = Result<T, Box<ThreadFault>>;

impl ThreadFault {
    pub(crate) fn new(lane: u32, kind: FaultKind, problem: impl Into<String>) -> Box<ThreadFault> {
        Box::new(ThreadFault { lane, kind, problem: problem.into(), location: None })
    }

    /// The fault of asynchronous work that a step at this source line began.
    pub(crate) fn of_work<T>(problem: impl Into<String>, location: u32) -> Outcome<T> {
        let fault = ThreadFault::new(0, FaultKind::Synchronisation, problem);
        Err(Box::new(ThreadFault { location: Some(location), ..*fault }))
    }
}

/// A fault and its place, displayed as one line.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) kind: FaultKind,
    pub(crate) kernel: String,
    /// `rms_quantize/kernel.cu:94`.
    pub(crate) location: String,
    pub(crate) block: [u32; 3],
    pub(crate) thread: [u32; 3],
    pub(crate) problem: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { kernel, location, block, thread, problem, .. } = self;
        write!(f, "{problem}: kernel {kernel}, {location}, block {block:?}, thread {thread:?}")
    }
}
