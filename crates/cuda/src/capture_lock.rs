//! The capture lock: nothing that may synchronise the device runs while a graph is captured or work is timed.

use std::cell::Cell;
use std::sync::{LockResult, PoisonError, RwLock};

/// Held exclusively while work is timed or a graph is captured, and shared by everything else that may
/// synchronise the device: many threads prepare programs at the same time.
static LOCK: RwLock<()> = RwLock::new(());

thread_local! {
    /// True if this thread holds [`LOCK`]. Asking for it again would deadlock.
    static HELD: Cell<bool> = const { Cell::new(false) };
}

/// A guard of [`LOCK`], held by this thread.
struct Held<G> {
    _guard: G,
}

impl<G> Held<G> {
    /// Takes the lock; None if this thread holds it already.
    fn new(lock: impl FnOnce() -> LockResult<G>) -> Option<Held<G>> {
        (!HELD.get()).then(|| {
            let guard = lock().unwrap_or_else(PoisonError::into_inner);
            HELD.set(true);
            Held { _guard: guard }
        })
    }
}

impl<G> Drop for Held<G> {
    fn drop(&mut self) {
        HELD.set(false);
    }
}

/// Excludes graph capture and timing while the guard lives. Hold it for whatever runs for the first time,
/// allocates or frees: such calls may wait for all streams of the device, and waiting for a captured stream,
/// from any thread, invalidates every capture of the process (CUDA programming guide, "Prohibited and
/// Unhandled Operations" of stream capture).
///
/// None if this thread holds the lock already, shared or exclusive.
#[must_use]
pub fn exclude_capture() -> Option<impl Sized> {
    Held::new(|| LOCK.read())
}

/// Excludes all other work while the guard lives. Hold it to time work or to capture a graph. None if this
/// thread holds the lock exclusively already. Do not call it within [`exclude_capture`]: the lock cannot be
/// upgraded.
#[must_use]
pub(crate) fn exclusive() -> Option<impl Sized> {
    Held::new(|| LOCK.write())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_the_lock_does_not_wait_for_itself() {
        let exclusive = exclusive();
        assert!(exclusive.is_some() && exclude_capture().is_none());
        drop(exclusive);
        let (outer, inner) = (exclude_capture(), exclude_capture());
        assert!(outer.is_some() && inner.is_none());
        drop((inner, outer));
        assert!(exclude_capture().is_some());
    }
}
