//! Who has the card to itself: what is timed or recorded, beside which nothing else may go on.

use std::cell::Cell;
use std::sync::{LockResult, PoisonError, RwLock};

/// Locked to write by what must run alone, and to read by what may run beside others: programs are made ready on many threads.
static RUNNING: RwLock<()> = RwLock::new(());

thread_local! {
    /// Whether this thread holds [`RUNNING`]: who holds it has what it wants, and would wait for itself.
    static HELD: Cell<bool> = const { Cell::new(false) };
}

/// That [`RUNNING`] is held by this thread.
struct Held<G> {
    _guard: G,
}

impl<G> Held<G> {
    /// None where this thread holds it already.
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

/// To be held by whoever runs something for the first time, or takes or gives back what is the card's: nothing is timed beside it, and no
/// graph recorded. For such calls may wait for all streams of the card, and to wait for one that is recorded ends every recording in an error
/// (CUDA programming guide, "Prohibited and Unhandled Operations" of stream capture), whichever thread does so. None where this thread
/// holds the lock already, in either way.
#[must_use]
pub fn exclude_capture() -> Option<impl Sized> {
    Held::new(|| RUNNING.read())
}

/// To be held by whoever takes the time or records a graph. None where this thread is alone already; not to be asked for within
/// [`exclude_capture`], where it cannot be had.
#[must_use]
pub(crate) fn exclusive() -> Option<impl Sized> {
    Held::new(|| RUNNING.write())
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
