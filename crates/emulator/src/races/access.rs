//! Accesses and fences, in the words of PTX's memory model.

/// Threads that a strong access or a fence takes part with. `.sys` counts as `.gpu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Scope {
    Block,
    Cluster,
    Gpu,
}

/// The hardware that accesses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    Thread,
    /// `cp.async`, in the generic proxy.
    Copy,
    /// Bulk and tensor copies, in the asynchronous proxy.
    Bulk,
    /// `wgmma`, in the asynchronous proxy.
    Wgmma,
}

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AccessKind {
    pub(crate) by: By,
    pub(crate) reads: bool,
    pub(crate) writes: bool,
    /// The scope of a strong access: volatile, relaxed, acquire, release, atomic.
    pub(crate) scope: Option<Scope>,
    pub(crate) acquires: bool,
    pub(crate) releases: bool,
    /// True if the memory must not change while the kernel runs (`ld.global.nc`).
    pub(crate) is_constant: bool,
}

impl AccessKind {
    pub(crate) const fn new(by: By, reads: bool, writes: bool) -> AccessKind {
        AccessKind { by, reads, writes, scope: None, acquires: false, releases: false, is_constant: false }
    }

    pub(crate) const READ: AccessKind = AccessKind::new(By::Thread, true, false);
    pub(crate) const WRITE: AccessKind = AccessKind::new(By::Thread, false, true);
    pub(crate) const UPDATE: AccessKind = AccessKind::new(By::Thread, true, true);

    /// This order and scope, for another kind of access by a thread.
    pub(crate) fn with(self, other: AccessKind) -> AccessKind {
        let AccessKind { reads, writes, .. } = other;
        AccessKind { reads, writes, ..self }
    }

    pub(super) fn is_async(self) -> bool {
        matches!(self.by, By::Bulk | By::Wgmma)
    }

    /// For messages: "strong update (.gpu)".
    pub(crate) fn describe(self) -> String {
        let does = match (self.reads, self.writes) {
            (true, true) => "update",
            (true, false) if self.is_constant => "read by `ld.global.nc`",
            (true, false) => "read",
            _ => "write",
        };
        let by = match self.by {
            By::Thread => "",
            By::Copy => " by `cp.async`",
            By::Bulk => " by a bulk copy",
            By::Wgmma => " by `wgmma`",
        };
        match self.scope {
            None => format!("{does}{by}"),
            Some(Scope::Block) => format!("strong {does}{by} (.cta)"),
            Some(Scope::Cluster) => format!("strong {does}{by} (.cluster)"),
            Some(Scope::Gpu) => format!("strong {does}{by} (.gpu)"),
        }
    }
}

/// A fence.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fence {
    /// `fence` and `membar`.
    Thread { scope: Scope, acquires: bool, releases: bool, is_sc: bool },
    /// `fence.proxy.async`, for shared and for global memory.
    Proxy([bool; 2]),
    /// `fence.mbarrier_init`.
    Mbarriers,
}

/// A place in memory: an address, or a block with an offset in its shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AccessPlace(pub(crate) u64);

impl AccessPlace {
    pub(crate) const SHARED: u64 = 1 << 63;

    pub(crate) fn shared(block: u32, offset: u64) -> AccessPlace {
        AccessPlace(AccessPlace::SHARED | u64::from(block) << 24 | offset)
    }

    pub(crate) fn is_shared(self) -> bool {
        self.0 & AccessPlace::SHARED != 0
    }
}
