//! What a kernel does wrong, and how it is reported.

use std::fmt;

/// Something that a thread of a kernel must not do. The executor adds the kernel, the line and the thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The lane of the warp that did it.
    pub(crate) lane: u32,
    pub(crate) kind: FaultKind,
    pub(crate) problem: String,
}

/// Which status the driver reports a fault by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultKind {
    /// An access outside the memory that a thread may reach.
    Address,
    /// An address that is no multiple of what it accesses.
    Alignment,
    /// Memory or a register that was never written.
    Uninitialised,
    /// A barrier or another collective that its threads do not all reach, or a wait that never ends.
    Synchronisation,
}

/// What a step of a kernel results in; faults are rare and kept out of the way.
pub(crate) type Outcome<T = ()> = Result<T, Box<Fault>>;

impl Fault {
    pub(crate) fn new(lane: u32, kind: FaultKind, problem: impl Into<String>) -> Box<Fault> {
        Box::new(Fault { lane, kind, problem: problem.into() })
    }
}

/// A fault with the place where it happened: one line.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) kind: FaultKind,
    pub(crate) kernel: String,
    /// `rms_norm/cast.cu:94`.
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
